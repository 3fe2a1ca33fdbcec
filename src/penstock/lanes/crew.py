"""The coordinator's side of the worker processes: starts them, passes tasks and answers, notices deaths, replaces them.

A worker counts as lost only when it is dead for certain: its template has waited for it, or its pidfd says so. Until
then the slots it may write to stay its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from penstock.cache.access import Access
from penstock.errors import LaneError
from penstock.lanes import Events, Slot
from penstock.lanes.processes import STACK_SIGNAL, die_with_parent, template_main
from penstock.loop import Loop
from penstock.slots import Pools, anonymous
from penstock.wire import Channel, pair
from penstock.work import Request, Work, failure

__all__ = ["Crew"]

_START_ATTEMPTS = 5
_STATUS_WAIT_S = 1.0
_STACK_WAIT_S = 3.0
_STACK_LOOK_S = 0.1
_END_WAIT_S = 2.0
_OWN_CRASH = 4
"""Blame for a hang, a death by another signal, or an exit: the sample is the likely cause."""
_KILLED = 1
"""Blame for SIGKILL or SIGTERM: somebody, or the kernel for want of memory, ended the worker."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Worker:
    number: int
    serial: int
    channel: Channel
    stack: int
    template: Channel | None = None
    pid: int = 0
    pidfd: int = -1
    ready: bool = False
    failed_starts: int = 0
    regions: set[int] = field(default_factory=set)
    busy_since: float | None = None
    tasks: int = 0
    hung: bool = False
    dismissed: bool = False
    lost: bool = False
    """Its process has ended, and its descriptors are closed."""


Tell = Callable[[dict[int, str], list[int]], None]
"""Called with a text for each lane, and the lanes that still are what the text says."""


class Crew:
    """Implements `penstock.lanes.Lanes` with a template and workers.

    Without `work` the template is forked by the training process, which sends the first of itself; `adopt` takes it,
    `want_template` asks for another when it is lost.
    """

    def __init__(
        self,
        loop: Loop,
        events: Events,
        pools: Pools,
        lanes: Sequence[int],
        work: bytes | None,
        sys_path: Sequence[str],
        want_template: Callable[[], None],
        cache: tuple[Access, Sequence[int]] | None = None,
    ) -> None:
        self._loop = loop
        self._events = events
        self._pools = pools
        self._first = lanes
        self._work = work
        self._sys_path = sys_path
        self._want_template = want_template
        self._cache = cache
        """What workers read through, where they do; the descriptors stay the coordinator's."""
        self._workers: dict[int, _Worker] = {}
        self._template: Channel | None = None
        self._template_pidfd = -1
        self._template_starts = 0
        self._serial = 0
        self._unborn: list[tuple[_Worker, tuple[int, int]]] = []
        """Workers that wait for a template to fork them."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to reap workers whose template was killed

    # what the coordinator calls

    def start(self) -> None:
        if self._work is not None:
            self._start_template()
        for number in self._first:
            self._start_worker(number, 0)

    def run(self, lane: int, task: int, pieces: Sequence[tuple[Request, Slot | None]]) -> None:
        worker = self._workers[lane]
        named = [slot for request, own in pieces for slot in (own, request.stage) if slot is not None]
        for generation in {generation for generation, _ in named} - worker.regions:
            worker.regions.add(generation)
            fd, slots, capacity = self._pools.region(generation)
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
        if lane in self._workers:
            self._workers[lane].hung = True
            self._signal(self._workers[lane], signal.SIGKILL)

    def dismiss(self, lane: int) -> None:
        """End a lane that has nothing to do; none takes its place."""
        worker = self._workers.get(lane)
        if worker is not None:
            worker.dismissed = True
            self._signal(worker, signal.SIGKILL)

    def add(self, lane: int) -> None:
        """Begin one more lane, under a number of its own."""
        self._start_worker(lane, 0)

    def close(self) -> None:
        for worker in self._workers.values():
            self._signal(worker, signal.SIGKILL)
        deadline = time.monotonic() + _END_WAIT_S
        if self._template is not None:
            self._template.close()
            if not _ended(self._template_pidfd, deadline):
                signal.pidfd_send_signal(self._template_pidfd, signal.SIGKILL)
                _ended(self._template_pidfd, deadline + _END_WAIT_S)
        for worker in self._workers.values():
            _ended(worker.pidfd, deadline)
        _reap()

    def adopt(self, channel: Channel, pid: int) -> None:
        """Use this template."""
        self._template = channel
        with contextlib.suppress(ProcessLookupError):  # its connection is closed then, too
            self._template_pidfd = os.pidfd_open(pid)
        self._loop.listen(channel, self._from_template, closed=lambda: self._template_lost(channel))
        for worker, fds in self._unborn:
            self._order(worker, channel, fds)
        self._unborn.clear()

    def _order(self, worker: _Worker, template: Channel, fds: tuple[int, int]) -> None:
        worker.template = template
        self._loop.post(template, ("fork", worker.number, worker.serial), fds)

    def stacks(self, lanes: Sequence[int], longer_than_s: float, tell: Tell) -> None:
        """Have the lanes that are at one task for longer than that (or else all of them) write down where they are."""
        now = time.monotonic()
        workers = [self._workers[lane] for lane in lanes]
        slow = [w for w in workers if w.busy_since is not None and now - w.busy_since > longer_than_s] or workers
        for worker in slow:
            os.ftruncate(worker.stack, 0)
            os.lseek(worker.stack, 0, os.SEEK_SET)
            self._signal(worker, STACK_SIGNAL)
        self._await_stacks(slow, [0] * len(slow), now + _STACK_WAIT_S, tell)

    def _await_stacks(self, slow: list[_Worker], before: Sequence[int], deadline: float, tell: Tell) -> None:
        """Until all that can write have written; on a busy machine that may take a while."""
        sizes = [0 if worker.lost else os.fstat(worker.stack).st_size for worker in slow]
        missing = any(_can_write(worker) and not size for worker, size in zip(slow, sizes, strict=True))
        if (sizes == before and not missing) or time.monotonic() > deadline:
            texts = {worker.number: _describe(worker) for worker in slow}
            tell(texts, [worker.number for worker in slow if not worker.lost])
        else:
            self._loop.after(_STACK_LOOK_S, lambda: self._await_stacks(slow, sizes, deadline, tell))

    @property
    def busy(self) -> list[int]:
        """Lanes that have a task."""
        return [worker.number for worker in self._workers.values() if worker.tasks]

    @property
    def starting(self) -> list[int]:
        """Lanes that are not ready yet."""
        return [worker.number for worker in self._workers.values() if not worker.ready and not worker.dismissed]

    @property
    def numbers(self) -> Collection[int]:
        """Lanes that are there, or that are not known to be gone."""
        return self._workers.keys()

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
            serial, status = arguments
            worker = next((w for w in self._workers.values() if w.serial == serial), None)
            if worker is not None:
                self._lost(worker, _blame(status))
        elif kind == "template_failed":
            self._events.lanes_failed(arguments[0])
        elif kind == "template_ready":
            self._template_starts = 0

    def _template_lost(self, channel: Channel) -> None:
        """Its workers die with it; each is noticed by its pidfd, and nobody will say how it died."""
        channel.close()
        self._template = None
        if self._template_pidfd >= 0:
            if self._work is not None:
                _ended(self._template_pidfd, time.monotonic() + _END_WAIT_S)
            os.close(self._template_pidfd)
            self._template_pidfd = -1
        _reap()
        self._start_template()
        for worker in list(self._workers.values()):
            if worker.template is channel:
                worker.template = None
                if worker.pidfd >= 0 and _ended(worker.pidfd, 0.0):
                    self._lost(worker, _KILLED)

    # workers

    def _start_worker(self, number: int, failed_starts: int) -> None:
        ours, theirs = pair()
        stack = anonymous(0)
        self._serial += 1
        worker = _Worker(number, self._serial, Channel(ours), stack, failed_starts=failed_starts)
        self._workers[number] = worker
        self._loop.listen(
            worker.channel, lambda message: self._from_worker(worker, message), closed=lambda: self._hung_up(worker)
        )
        if self._cache is not None:
            access, descriptors = self._cache
            self._loop.post(worker.channel, ("cache", access), [os.dup(fd) for fd in descriptors])
        fds = (theirs.detach(), os.dup(stack))
        if self._template is None:
            self._unborn.append((worker, fds))
        else:
            self._order(worker, self._template, fds)

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
            worker.pidfd = worker.channel.take_fd()
            self._loop.watch(worker.pidfd, lambda: self._died(worker))
            if worker.dismissed:
                self._signal(worker, signal.SIGKILL)
        elif worker.dismissed:
            return
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
        if worker.template is None:
            self._lost(worker, _KILLED)
        else:
            self._loop.after(_STATUS_WAIT_S, lambda: self._lost(worker, _KILLED))

    def _lost(self, worker: _Worker, blame: int) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        self._loop.forget(worker.channel)
        worker.channel.close()
        os.close(worker.stack)
        worker.lost = True
        if worker.pidfd >= 0:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
        del self._workers[worker.number]
        _reap()
        if worker.dismissed:
            return
        failed_starts = 0 if worker.ready else worker.failed_starts + 1
        if failed_starts >= _START_ATTEMPTS:
            error = LaneError(f"worker {worker.number} died {failed_starts} times in a row before it was ready to work")
            self._events.lanes_failed(failure(error))
            return
        self._start_worker(worker.number, failed_starts)
        if worker.ready:
            self._events.lane_lost(worker.number, _OWN_CRASH if worker.hung else blame)

    def _signal(self, worker: _Worker, number: int) -> None:
        if worker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, number)


def _become_template(sock: socket.socket, work: bytes, sys_path: Sequence[str], parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        keep = sock.fileno()
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != keep:
                with contextlib.suppress(OSError):  # the one that the folder was read through
                    os.close(fd)
        sys.path[:] = sys_path
        gc.disable()
        template_main(sock, lambda: _loaded(work))
    except BaseException:  # nothing may unwind into the coordinator's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _loaded(work: bytes) -> Work:
    try:
        try:
            loaded = pickle.loads(work)
        except ModuleNotFoundError:  # packages that only the interpreter's site hooks find, such as editable installs
            path = list(sys.path)
            importlib.import_module("site").main()
            sys.path[:] = path
            loaded = pickle.loads(work)
    except Exception as error:
        raise LaneError(
            f"the pipeline could not be loaded in a clean process: {type(error).__name__}: {error}; use start='fork', "
            "or define functions and classes in a module that can be imported"
        ) from error
    assert isinstance(loaded, Work)
    ready = loaded.load()
    gc.enable()
    return ready


def _ended(pidfd: int, deadline: float) -> bool:
    """The process is dead, at the latest by then."""
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _reap() -> None:
    """Dead children: the template, and workers that it left behind."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _blame(status: int) -> int:
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM)
    return _KILLED if killed else _OWN_CRASH


def _state(worker: _Worker) -> str:
    """As the kernel calls it: "R (running)", "T (stopped)"."""
    try:
        with open(f"/proc/{worker.pid}/status") as status:
            return next(line.split(":", 1)[1].strip() for line in status if line.startswith("State:"))
    except OSError:
        return "gone"


def _can_write(worker: _Worker) -> bool:
    return not worker.lost and _state(worker)[0] not in "TtZXg"


def _describe(worker: _Worker) -> str:
    if worker.lost:
        return f"worker {worker.number} (pid {worker.pid}) ended meanwhile"
    stack = os.pread(worker.stack, 1 << 16, 0).decode(errors="replace").strip()
    return f"worker {worker.number} (pid {worker.pid}, {_state(worker)}):\n{stack or 'no stack could be had'}"
