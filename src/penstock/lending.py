"""Ranks of one job on one machine lend each other workers: those whose training waits borrow from those with batches to
spare, and give back when they no longer need to.

A loan is a connection between two coordinators and lasts as long as it does: whoever closes it, or dies, has lent or
borrowed nothing any more. What moves is a number. The lender ends a worker, once that has done what it began; the
borrower forks one, in milliseconds. So no tiny-batch is left half done, and batches are what they always are.

    lending = Lending(loop, group, workers, changed)  # `changed()` is called when `lending.balance` has changed
    lending.look(waits=..., spare=...)                # now and then
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from functools import partial

from penstock.loop import Loop

__all__ = ["LOOK_S", "Lending", "Patience"]

LOOK_S = 0.2
"""How often a coordinator looks at how its training fares."""
_HUNGRY = 3
"""Looks in a row at which the training waited before a worker is borrowed, or called home."""
_FULL = 15
"""Looks in a row with batches to spare before a borrowed worker goes back: it is not to go to and fro."""
_PREFIX = "penstock-rank-"
_PEER = struct.Struct("3i")


class Patience:
    """Whether to get a worker or to give one back, from how it looked several times in a row."""

    def __init__(self) -> None:
        self._hungry = self._full = 0

    def look(self, *, waits: bool, spare: bool) -> int:
        """1: get one. -1: one can be given back. 0: leave it."""
        self._hungry = self._hungry + 1 if waits else 0
        self._full = self._full + 1 if spare else 0
        if self._hungry == _HUNGRY:
            self._hungry = 0
            return 1
        if self._full == _FULL:
            self._full = 0
            return -1
        return 0


class Lending:
    """A coordinator's part. `group` is the same for all ranks of a job, and for no other job."""

    def __init__(self, loop: Loop, group: str, workers: Callable[[], int], changed: Callable[[], None]) -> None:
        self._loop = loop
        self._workers = workers
        self._changed = changed
        self._prefix = f"{_PREFIX}{os.getuid()}-{group}-"
        self._name = f"{self._prefix}{os.getpid()}-{os.urandom(4).hex()}"
        self._lent: list[socket.socket] = []
        self._borrowed: list[socket.socket] = []
        self._asked: socket.socket | None = None
        self._spare = False
        self._patience = Patience()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(f"\0{self._name}")
        self._server.listen(16)
        self._server.setblocking(False)
        loop.watch(self._server.fileno(), self._accept)

    @property
    def lent(self) -> int:
        """Workers that others have."""
        return len(self._lent)

    @property
    def borrowed(self) -> int:
        """Workers of others."""
        return len(self._borrowed)

    @property
    def balance(self) -> int:
        """By how many there are more workers than this rank's own."""
        return self.borrowed - self.lent

    def look(self, *, waits: bool, spare: bool) -> None:
        """How the training fares: it waits for batches; or has had some to spare, all the time since the last look."""
        self._spare = spare
        wish = self._patience.look(waits=waits, spare=spare)
        if wish > 0 and self._lent:
            self._end(self._lent, self._lent[-1])
        elif wish > 0 and self._asked is None:
            self._ask(self._others())
        elif wish < 0 and self._borrowed:
            self._end(self._borrowed, self._borrowed[-1])

    # lending

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._server.accept()
            client.setblocking(False)
            _, uid, _ = _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid == os.getuid() and self._spare and not self._borrowed and self._workers() > 1:
                client.send(b"+")
                self._begin(self._lent, client)
            else:
                client.close()

    # borrowing

    def _others(self) -> list[str]:
        """Ranks to ask, beginning with another one each time."""
        with open("/proc/net/unix") as table:
            names = sorted({line.split()[-1][1:] for line in table if f"@{self._prefix}" in line} - {self._name})
        turn = os.urandom(1)[0] % max(1, len(names))
        return names[turn:] + names[:turn]

    def _ask(self, names: list[str]) -> None:
        """Ask one after another until one lends."""
        self._asked = None
        while names and self._asked is None:
            asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asked.setblocking(False)
            try:
                asked.connect(f"\0{names.pop(0)}")
            except OSError:  # it is gone, or busy
                asked.close()
                continue
            self._asked = asked
            self._loop.watch(asked.fileno(), partial(self._answered, asked, names))

    def _answered(self, asked: socket.socket, names: list[str]) -> None:
        self._loop.forget(asked.fileno())
        if _received(asked) == b"+":
            self._asked = None
            self._begin(self._borrowed, asked)
        else:
            asked.close()
            self._ask(names)

    # loans

    def _begin(self, loans: list[socket.socket], loan: socket.socket) -> None:
        loans.append(loan)
        self._loop.watch(loan.fileno(), lambda: self._end(loans, loan))
        self._changed()

    def _end(self, loans: list[socket.socket], loan: socket.socket) -> None:
        """Either side ends it by closing; nothing is ever sent."""
        if loan in loans:
            loans.remove(loan)
            self._loop.forget(loan.fileno())
            loan.close()
            self._changed()


def _received(sock: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return sock.recv(1)
    return b""
