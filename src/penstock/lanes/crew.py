"""The coordinator's side of the worker processes: starts them, passes tasks and answers, notices deaths, replaces them.

A worker counts as lost only when it is dead for certain: its template has waited for it, or its pidfd says so. Until
then the slots it may write to stay its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from penstock.errors import LaneError
from penstock.lanes import Events, Slot
from penstock.lanes.processes import STACK_SIGNAL, die_with_parent, template_main
from penstock.loop import Loop
from penstock.slots import Books, anonymous
from penstock.wire import Channel, pair
from penstock.work import Request, Work, failure

__all__ = ["Crew"]

_START_ATTEMPTS = 5
_STATUS_WAIT_S = 1.0
_STACK_WAIT_S = 0.3
_END_WAIT_S = 2.0
_OWN_CRASH = 4
"""Blame for a death by a signal other than SIGKILL, or by an exit: the sample is the likely cause."""
_KILLED = 1
"""Blame for SIGKILL: somebody, or the kernel for want of memory, ended the worker."""


@dataclass
class _Worker:
    number: int
    channel: Channel
    stack: int
    pid: int = 0
    pidfd: int = -1
    ready: bool = False
    failed_starts: int = 0
    regions: set[int] = field(default_factory=set)
    busy_since: float | None = None
    tasks: int = 0


class Crew:
    """Implements `penstock.lanes.Lanes` with a template and workers.

    Without `work` the template is forked by the training process, which sends the first of itself; `adopt` takes it,
    `want_template` asks for another when it is lost.
    """

    def __init__(
        self,
        loop: Loop,
        events: Events,
        books: Books,
        workers: int,
        work: bytes | None,
        sys_path: Sequence[str],
        want_template: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._events = events
        self._books = books
        self._size = workers
        self._work = work
        self._sys_path = sys_path
        self._want_template = want_template
        self._workers: dict[int, _Worker] = {}
        self._template: Channel | None = None
        self._template_pid = 0
        self._template_starts = 0
        self._unborn: list[tuple[int, tuple[int, int]]] = []
        """Workers that wait for a template to fork them."""

    # what the coordinator calls

    def start(self) -> None:
        if self._work is not None:
            self._start_template()
        for number in range(self._size):
            self._start_worker(number, 0)

    def run(self, lane: int, task: int, pieces: Sequence[tuple[Request, Slot | None]]) -> None:
        worker = self._workers[lane]
        for generation in {slot[0] for _, slot in pieces if slot is not None} - worker.regions:
            worker.regions.add(generation)
            fd, slots, capacity = self._books.region(generation)
            self._loop.post(worker.channel, ("region", generation, slots, capacity), (os.dup(fd),))
        worker.tasks += 1
        if worker.busy_since is None:
            worker.busy_since = time.monotonic()
        self._loop.post(worker.channel, ("task", task, pieces))

    def forget_region(self, generation: int) -> None:
        for worker in self._workers.values():
            if generation in worker.regions:
                worker.regions.discard(generation)
                self._loop.post(worker.channel, ("forget", generation))

    def kill(self, lane: int) -> None:
        self._signal(self._workers[lane], signal.SIGKILL)

    def close(self) -> None:
        for worker in self._workers.values():
            self._signal(worker, signal.SIGKILL)
        if self._template_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._template_pid, signal.SIGKILL)
            if self._work is not None:
                os.waitpid(self._template_pid, 0)
        deadline = time.monotonic() + _END_WAIT_S
        for worker in self._workers.values():
            if worker.pidfd >= 0:
                select.select([worker.pidfd], [], [], max(0.0, deadline - time.monotonic()))

    def adopt(self, channel: Channel, pid: int) -> None:
        """Use this template."""
        self._template = channel
        self._template_pid = pid
        self._loop.listen(channel, self._from_template, closed=lambda: self._template_lost(channel))
        for number, fds in self._unborn:
            self._loop.post(channel, ("fork", number), fds)
        self._unborn.clear()

    def stacks(self, lanes: Sequence[int], longer_than_s: float, tell: Callable[[dict[int, str]], None]) -> None:
        """Have the lanes that are at one task for longer than that (or else all of them) write down where they are.

        Calls `tell` with a text for each.
        """
        now = time.monotonic()
        workers = [self._workers[lane] for lane in lanes]
        slow = [w for w in workers if w.busy_since is not None and now - w.busy_since > longer_than_s] or workers
        for worker in slow:
            os.ftruncate(worker.stack, 0)
            self._signal(worker, STACK_SIGNAL)
        self._loop.after(_STACK_WAIT_S, lambda: tell({worker.number: _describe(worker) for worker in slow}))

    @property
    def starting(self) -> list[int]:
        """Lanes that are not ready yet."""
        return [worker.number for worker in self._workers.values() if not worker.ready]

    # the template

    def _start_template(self) -> None:
        self._template_starts += 1
        if self._template_starts > _START_ATTEMPTS:
            error = LaneError(f"the process that workers are forked from died {_START_ATTEMPTS} times while it started")
            self._events.lanes_failed(failure(error))
        elif self._work is None:
            self._want_template()
        else:
            ours, theirs = pair()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_template(theirs, self._work, self._sys_path, parent)
            theirs.close()
            self.adopt(Channel(ours), pid)

    def _from_template(self, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "exited":
            pid, status = arguments
            worker = next((w for w in self._workers.values() if w.pid == pid), None)
            if worker is not None:
                self._lost(worker, _blame(status))
        elif kind == "template_failed":
            self._events.lanes_failed(arguments[0])
        elif kind == "template_ready":
            self._template_starts = 0

    def _template_lost(self, channel: Channel) -> None:
        """Its workers die with it; each is noticed by its pidfd."""
        channel.close()
        if self._template is channel:
            self._template = None
            if self._work is not None:
                os.waitpid(self._template_pid, 0)
            self._template_pid = 0
            self._start_template()

    # workers

    def _start_worker(self, number: int, failed_starts: int) -> None:
        ours, theirs = pair()
        stack = anonymous(0)
        worker = self._workers[number] = _Worker(number, Channel(ours), stack, failed_starts=failed_starts)
        self._loop.listen(
            worker.channel, lambda message: self._from_worker(worker, message), closed=lambda: self._hung_up(worker)
        )
        fds = (theirs.detach(), os.dup(stack))
        if self._template is None:
            self._unborn.append((number, fds))
        else:
            self._loop.post(self._template, ("fork", number), fds)

    def _from_worker(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "done":
            task, answers, seconds, rows, ended = arguments
            worker.tasks -= ended
            worker.busy_since = time.monotonic() if worker.tasks else None
            taken = [(index, result, worker.channel.take_fd() if result.own else -1) for index, result in answers]
            self._events.lane_done(worker.number, task, taken, seconds, rows)
        elif kind == "hello":
            worker.pid = arguments[0]
            with contextlib.suppress(ProcessLookupError):
                worker.pidfd = os.pidfd_open(worker.pid)
                self._loop.watch(worker.pidfd, lambda: self._died(worker))
        elif kind == "ready":
            worker.ready = True
            worker.failed_starts = 0
            self._events.lane_ready(worker.number, worker.pid)
        elif kind == "start_failed":
            self._events.lanes_failed(arguments[0])

    def _hung_up(self, worker: _Worker) -> None:
        if worker.pidfd < 0:
            self._lost(worker, _KILLED)
        else:
            self._signal(worker, signal.SIGKILL)

    def _died(self, worker: _Worker) -> None:
        """The pidfd says so; the template, where there is one, will say how."""
        self._loop.forget(worker.pidfd)
        if self._template is None:
            self._lost(worker, _KILLED)
        else:
            self._loop.after(_STATUS_WAIT_S, lambda: self._lost(worker, _KILLED))

    def _lost(self, worker: _Worker, blame: int) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        self._loop.forget(worker.channel)
        worker.channel.close()
        os.close(worker.stack)
        if worker.pidfd >= 0:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
        del self._workers[worker.number]
        failed_starts = 0 if worker.ready else worker.failed_starts + 1
        if failed_starts >= _START_ATTEMPTS:
            error = LaneError(f"worker {worker.number} died {failed_starts} times in a row before it was ready to work")
            self._events.lanes_failed(failure(error))
            return
        self._start_worker(worker.number, failed_starts)
        if worker.ready:
            self._events.lane_lost(worker.number, blame)

    def _signal(self, worker: _Worker, number: int) -> None:
        if worker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, number)


def _become_template(sock: socket.socket, work: bytes, sys_path: Sequence[str], parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        sys.path[:] = sys_path

        def load() -> Work:
            loaded = pickle.loads(work)
            assert isinstance(loaded, Work)
            return loaded.load()

        template_main(sock, load)
    except BaseException:  # nothing may unwind into the coordinator's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _blame(status: int) -> int:
    return _KILLED if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else _OWN_CRASH


def _describe(worker: _Worker) -> str:
    stack = os.pread(worker.stack, 1 << 16, 0).decode(errors="replace").strip()
    try:
        with open(f"/proc/{worker.pid}/status") as status:
            state = next(line.split(":", 1)[1].strip() for line in status if line.startswith("State:"))
    except OSError:
        state = "gone"
    return f"worker {worker.number} (pid {worker.pid}, {state}):\n{stack or 'no stack could be had'}"
