"""The lane of local worker processes: a template that holds the work, and workers forked from it.

The template has loaded the work once and waits, single-threaded, for orders to fork. Workers share its pages, start in
milliseconds, and die with it; it dies with the coordinator. A worker maps the slots, takes tasks from its socket, and
answers with what became of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.slots import Region, anonymous
from penstock.wire import Channel, ClosedError
from penstock.work import Memory, Request, Result, Work, failure

__all__ = ["STACK_SIGNAL", "die_with_parent", "template_main"]

STACK_SIGNAL = signal.SIGRTMIN + 6
"""A worker that gets it writes the stacks of its threads to its stack file, even while the interpreter is stuck."""

_PR_SET_PDEATHSIG = 1
_REPLY_INTERVAL_S = 0.002


def die_with_parent(parent: int) -> None:
    """This process gets SIGKILL when its parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def template_main(control: socket.socket, load: Callable[[], Work]) -> NoReturn:
    """Hold the work and fork workers on demand until the coordinator closes the connection."""
    channel = Channel(control)
    with contextlib.suppress(ClosedError, KeyboardInterrupt):
        try:
            work = load()
        except BaseException as error:  # whatever the user's data set does when it is loaded
            channel.send(("template_failed", failure(error)))
            os._exit(1)
        _serve_template(channel, work)
    os._exit(0)


def _serve_template(channel: Channel, work: Work) -> None:
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    gc.freeze()
    channel.send(("template_ready",))
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                os.read(wake, 4096)
                _report_exits(channel)
            else:
                for _, number in channel.arrived():
                    _fork_worker(channel, work, number, (wake, waker))


def _report_exits(channel: Channel) -> None:
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            channel.send(("exited", exited[0], exited[1]))


def _fork_worker(channel: Channel, work: Work, number: int, template_fds: tuple[int, ...]) -> None:
    sock, stack = channel.take_fd(), channel.take_fd()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(parent)
            for fd in (channel.fileno(), *template_fds):
                os.close(fd)
            _Worker(number, Channel(socket.socket(fileno=sock)), work, stack).main()
        except BaseException:  # nothing may unwind into the template's stack, which is the user's in fork mode
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    os.close(sock)
    os.close(stack)


class _SlotMemory(Memory):
    """A batch's slot, or memory of its own that is handed on with the result."""

    def __init__(self, slot: memoryview | None) -> None:
        self.slot = slot
        self.own_fd = -1

    def reserve(self, nbytes: int, whole: bool) -> memoryview | None:
        if self.slot is not None and nbytes <= len(self.slot):
            return self.slot[:nbytes]
        if not whole:
            return None
        self.own_fd = anonymous(max(1, nbytes))
        return memoryview(mmap.mmap(self.own_fd, max(1, nbytes)))[:nbytes]


class _Worker:
    def __init__(self, number: int, channel: Channel, work: Work, stack: int) -> None:
        self._number = number
        self._channel = channel
        self._work = work
        self._regions: dict[int, Region] = {}
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)

    def main(self) -> None:
        """Work until the coordinator closes the connection."""
        with contextlib.suppress(ClosedError):
            self._channel.send(("hello", os.getpid()))
            try:
                torch = sys.modules.get("torch")
                if torch is not None:
                    torch.set_num_threads(1)
                self._work.open(self._number)
            except BaseException as error:  # the user's start function
                self._channel.send(("start_failed", failure(error)))
                return
            self._channel.send(("ready",))
            while True:
                self._handle(*self._channel.recv())

    def _handle(self, kind: str, *arguments: Any) -> None:
        if kind == "task":
            self._run(*arguments)
        elif kind == "region":
            generation, slots, capacity = arguments
            fd = self._channel.take_fd()
            self._regions[generation] = Region(fd, slots, capacity, forkable=False)
            os.close(fd)
        elif kind == "forget":
            self._regions.pop(arguments[0], None)

    def _run(self, task: int, pieces: list[tuple[Request, tuple[int, int] | None]]) -> None:
        """Run the pieces; answer for several at once unless they take long."""
        answers: list[tuple[int, Result]] = []
        fds: list[int] = []
        started = answered = time.perf_counter()
        rows = 0
        for index, (request, slot) in enumerate(pieces):
            memory = _SlotMemory(self._regions[slot[0]].slot(slot[1]) if slot else None)
            result = self._work.run(request, memory)
            rows += len(request.rows)
            fds += [memory.own_fd] if memory.own_fd >= 0 else []
            result.own = memory.own_fd >= 0
            answers.append((index, result))
            now = time.perf_counter()
            last = index == len(pieces) - 1
            if last or fds or now - answered > _REPLY_INTERVAL_S:
                self._channel.send(("done", task, answers, now - started, rows, last), fds)
                for fd in fds:
                    os.close(fd)
                answers, fds, rows, answered, started = [], [], 0, now, now
