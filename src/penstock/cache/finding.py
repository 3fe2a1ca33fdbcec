"""How the loaders of one user on a host come to use one arena.

Every coordinator that holds the arena listens on an abstract Unix socket; a loader that wants a cache asks these, and
makes an arena only if none answers. An abstract socket has no file: it is found in /proc/net/unix while its process
lives. Two loaders never look at the same time, or each would make one.

The first arena is everybody's: its budget is the largest that anyone asked for. Loaders without workers have no
coordinator; they find an arena, and each other within their process, but are not found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator

from penstock.cache.arena import Arena

__all__ = ["answer", "find_arena", "hold", "listen"]

_PREFIX = "penstock-cache-1-"
"""With the version of the arena's layout."""
_PEER = struct.Struct("3i")
_LOOKING_S = 10.0
"""Who looks for longer has been stopped; then others go on without waiting for it."""
_ANSWER_S = 5.0

_here: weakref.WeakSet[Arena] = weakref.WeakSet()
"""Arenas that this process holds open."""


def find_arena(budget: int) -> tuple[Arena, socket.socket]:
    """The arena of this user on this host, and a socket on which `answer` lets others find it.

    OSError where there is none and none can be made."""
    with _looking():
        arena = next(_others(), None) or Arena.create(budget)
        arena.raise_budget(budget)
        return arena, listen()


def hold(arena: Arena) -> None:
    """Let this process's other loaders find it, as long as it is open here."""
    _here.add(arena)


def listen() -> socket.socket:
    """A socket that others find as long as anybody holds it."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0{_PREFIX}{os.getuid()}-{os.getpid()}-{os.urandom(4).hex()}")
    server.listen(64)
    return server


def answer(server: socket.socket, arena: Arena) -> None:
    """Give the arena to whoever asks, if it is the same user."""
    with contextlib.suppress(OSError):
        client, _ = server.accept()
        with client:
            if _user(client) == os.getuid():
                socket.send_fds(client, [b"+"], list(arena.descriptors))


def _user(peer: socket.socket) -> int:
    """Whose process is at the other end."""
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """One process at a time: whoever has the name. The kernel takes it from one that dies."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        deadline = time.monotonic() + _LOOKING_S
        while time.monotonic() < deadline:
            try:
                name.bind(f"\0{_PREFIX}{os.getuid()}-looking")
                break
            except OSError:
                time.sleep(0.01)
        yield


def _others() -> Iterator[Arena]:
    """Arenas that are held on this host, to be held here too."""
    for arena in list(_here):
        if arena.descriptors:
            yield Arena(*map(os.dup, arena.descriptors))
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if f"@{_PREFIX}{os.getuid()}-" in line}
    for name in sorted(names):
        descriptors = _asked(name.removeprefix("@"))
        if len(descriptors) == 2:
            yield Arena(*descriptors)


def _asked(name: str) -> list[int]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER_S)
        client.connect(f"\0{name}")
        if _user(client) == os.getuid():
            _, descriptors, _, _ = socket.recv_fds(client, 1, 2)
            return descriptors
    return []
