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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from penstock.cache.access import Access
from penstock.slots import Region, anonymous
from penstock.wire import Channel, ClosedError
from penstock.work import SMALL_BYTES, Memory, Request, Result, Work, failure

__all__ = ["STACK_SIGNAL", "die_with_parent", "held_signals", "keep_from_signals", "template_main"]

STACK_SIGNAL = signal.SIGRTMIN + 6
"""A worker that gets it writes the stacks of its threads to its stack file, even while the interpreter is stuck."""

_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_REPLY_INTERVAL_S = 0.002
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT, _MOST_KEPT = 16 << 20, 32 << 20
"""Bytes. A worker allocates and frees an image's buffers again and again; handing them back to the kernel each time
costs a page fault for every 4 KB, which was 8% of decoding photographs of 98 KB."""


def keep_from_signals() -> None:
    """Signals meant for the training process, which may reach all of its job, do not end this process.

    A call under `held_signals` leaves no moment when one could.
    """
    for name in _JOB_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Processes started meanwhile get no such signal before they call `keep_from_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """This process gets SIGKILL when its parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def keep_freed_memory() -> None:
    """Have malloc keep what was freed, up to a limit, for the next image. Only glibc's can be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def template_main(control: socket.socket, load: Callable[[], Work]) -> NoReturn:
    """Hold the work and fork workers on demand until the coordinator closes the connection; then end them all."""
    channel = Channel(control)
    workers: dict[int, int] = {}
    with contextlib.suppress(ClosedError):
        try:
            work = load()
        except BaseException as error:  # whatever the user's data set does when it is loaded
            channel.send(("template_failed", failure(error)))
            os._exit(1)
        _serve_template(channel, work, workers)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:  # none stays behind as a zombie, whatever process 1 of this machine does
        os.waitpid(pid, 0)
    os._exit(0)


def _serve_template(channel: Channel, work: Work, workers: dict[int, int]) -> None:
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
                _report_exits(channel, workers)
            else:
                for _, number, serial in channel.arrived():
                    workers[_fork_worker(channel, work, number, (wake, waker))] = serial


def _report_exits(channel: Channel, workers: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            serial = workers.pop(exited[0], None)
            if serial is not None:
                channel.send(("exited", serial, exited[1]))


def _fork_worker(channel: Channel, work: Work, number: int, template_fds: tuple[int, ...]) -> int:
    sock, stack = channel.take_fd(), channel.take_fd()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_DFL)
            die_with_parent(parent)
            keep_freed_memory()
            channel.close()  # with the descriptors of workers that are still to be forked
            for fd in template_fds:
                os.close(fd)
            with contextlib.suppress(AttributeError, ValueError):
                sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # workers end by SIGKILL
            _Worker(number, Channel(socket.socket(fileno=sock)), work, stack).main()
        except BaseException:  # nothing may unwind into the template's stack, which is the user's in fork mode
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    os.close(sock)
    os.close(stack)
    return pid


class _SlotMemory(Memory):
    """A batch's slot, or memory of its own that is handed on with the result: in the message where it is small."""

    def __init__(self, slot: memoryview | None, stage: memoryview | None) -> None:
        self.slot = slot
        self.stage = stage
        self.own_fd = -1
        self._small: bytearray | None = None

    def reserve(self, nbytes: int, whole: bool) -> memoryview | None:
        if self.slot is not None and nbytes <= len(self.slot):
            return self.slot[:nbytes]
        if not whole:
            return None
        if nbytes <= SMALL_BYTES:
            self._small = bytearray(nbytes)
            return memoryview(self._small)
        self.own_fd = anonymous(nbytes)
        return memoryview(mmap.mmap(self.own_fd, nbytes))

    def hand_on(self, result: Result) -> None:
        """Put what lies in neither the slot nor the message with the result."""
        result.own = self.own_fd >= 0
        if self._small is not None and result.layout is not None:
            result.inline = (bytes(self._small),)


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
            pidfd = os.pidfd_open(os.getpid())
            self._channel.send(("hello", os.getpid()), (pidfd,))
            os.close(pidfd)
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
        elif kind == "cache":
            access: Access = arguments[0]
            self._work.equip(access.open([self._channel.take_fd() for _ in range(3)], self._number))

    def _slot(self, slot: tuple[int, int] | None) -> memoryview | None:
        return None if slot is None else self._regions[slot[0]].slot(slot[1])

    def _run(self, task: int, pieces: list[tuple[Request, tuple[int, int] | None]]) -> None:
        """Run the pieces; answer for several at once unless they take long."""
        answers: list[tuple[int, Result]] = []
        fds: list[int] = []
        started = answered = time.perf_counter()
        rows = 0
        for index, (request, slot) in enumerate(pieces):
            memory = _SlotMemory(self._slot(slot), self._slot(request.stage))
            result = self._work.run(request, memory)
            rows += len(request.rows)
            fds += [memory.own_fd] if memory.own_fd >= 0 else []
            memory.hand_on(result)
            answers.append((index, result))
            now = time.perf_counter()
            last = index == len(pieces) - 1
            if last or fds or now - answered > _REPLY_INTERVAL_S:
                self._channel.send(("done", task, answers, now - started, rows, last), fds)
                for fd in fds:
                    os.close(fd)
                answers, fds, rows, answered, started = [], [], 0, now, now
