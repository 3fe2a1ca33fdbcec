"""The process around the scheduler: keeps the books of slots, feeds lanes, hands batches to the training process.

Single-threaded, imports neither numpy nor torch, so it starts in milliseconds and can fork. It ends when the training
process does, however that ends, and takes all lanes with it.

Everything that arrives (orders, slots given back, results, deaths) becomes an event of the scheduler; its instructions
become messages. `Config` is what the training process says at the start.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.cache.access import Access
from penstock.cache.finding import answer
from penstock.cache.keeper import WATCH_S, Keeper
from penstock.errors import LaneError
from penstock.kernels import native
from penstock.lanes import MOST_WORKERS, Answer, Slot
from penstock.lanes.crew import Crew
from penstock.lanes.gpu import GpuLane
from penstock.lanes.link import DeviceConfig, DeviceLink, image_column
from penstock.lanes.processes import keep_from_signals
from penstock.layout import Layout
from penstock.lending import LOOK_S, Lending
from penstock.loop import Loop
from penstock.order import Order
from penstock.schedule import Assign, BatchSpec, Deliver, Dismiss, Instruction, Piece, Scheduler
from penstock.slots import Books, Pools
from penstock.stats import Counters
from penstock.view import View
from penstock.wire import MOST_FDS, Channel, ClosedError
from penstock.work import SMALL_BYTES, BadSample, Failure, Request, Result, failure

__all__ = ["Config", "Policy", "main"]

_TASK_S = 0.01
"""What a tiny-batch should take: long beside the 0.1 ms a task costs to hand out, short beside a batch."""
_OPAQUE_TASK_S = 0.03
"""The same for parts of torch's batches: collating and handing on each of them costs 0.6 ms where caches are cold."""
_QUEUE_BELOW_S = 0.02
"""Lanes queue a second task where tasks are shorter than this; longer ones wait where they can go to any lane. Where
there are more workers than cores, workers wait for something else than a core, and their time is not to be spent on
waiting for the next task, too: there tasks of usual length are queued as well."""
_FDS_PER_WORKER = 5
_ENOUGH = 2
"""Batches, for each device, that wait for the training process where the GPU lane keeps up by itself."""
_MANY = 64
"""How many batches may be prepared ahead where they are small and take under a millisecond."""
_SPLIT_ABOVE_S = 0.02
"""Batches that may be cut but need not be are cut when they take longer than this."""


@dataclass(frozen=True)
class Policy:
    """What the scheduler does beyond handing out work. Left out only to measure what it is worth."""

    sort: bool = True
    """Small samples go to CPU lanes, large ones to the GPU lane."""
    leave_last: bool = True
    """CPU lanes leave the last rows of a batch to the GPU lane."""


@dataclass(frozen=True)
class Config:
    """What the training process wants. Plain data."""

    name: str
    parent: int
    workers: int
    work: bytes | None
    """What the template loads; None: the training process forks the template, which shares its memory."""
    sys_path: tuple[str, ...]
    order: Order | None
    """The plan of an epoch; None: the training process sends each batch's content."""
    seed: int
    shuffle: bool
    sizes: int
    """How many sizes of samples (int64) lie in the descriptor that comes along; 0 without."""
    delivery: Literal["plan", "ready"]
    cut: Literal["always", "known", "never"]
    """Whether batches may be cut into tiny-batches: always; once their memory is known and it pays; never."""
    window: int | None
    """Batches prepared ahead; None: as many as suits them."""
    reserve: int
    """Slots beyond the window, for batches that the user holds."""
    memory_bytes: int
    batch_bytes: int
    """Bytes of a batch where they are known beforehand, else 0."""
    metrics_port: int | None
    device: DeviceConfig | None = None
    """None: batches stay in host memory. Otherwise the connections to the devices' threads come along."""
    devices: int = 0
    """How many there are; batches go to them in turn."""
    policy: Policy = Policy()
    group: str | None = None
    """What the ranks that lend each other workers have in common; None: this one neither lends nor borrows."""
    started: float = field(default_factory=time.monotonic)
    """When the loader began, by the clock that all processes share: from then on it waits."""
    cache: Access | None = None
    """What workers read through; the descriptors of the arena, the tally and a listening socket come along."""


@dataclass
class _State:
    """A batch between its opening and its delivery."""

    spec: BatchSpec
    slot: Slot | None
    part: int = 0
    """Which device it goes to."""
    results: list[Result] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    cancelled: bool = False
    restarted: bool = False
    """It turned out that it cannot be cut: parts of it count no more."""
    on_device: set[int] = field(default_factory=set)
    """Rows whose images a GPU lane has made."""


@dataclass
class _Outgoing:
    """A batch on its way to the training process, in whose order they go."""

    message: tuple[Any, ...]
    fds: list[int]
    slot: Slot | None
    ready: bool
    cancelled: bool = False


class Coordinator:
    """See the module's text. Implements `penstock.lanes.link.DeviceEvents`."""

    def __init__(
        self,
        trainer: Channel,
        config: Config,
        sizes: array[int] | None,
        devices: Sequence[Channel],
        cache: Sequence[int],
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._sizes = sizes
        self._loop = Loop()
        self._pools = Pools(config.memory_bytes, max(1, len(devices)))
        self._scheduler = Scheduler(order=config.delivery, leave_last=config.policy.leave_last)
        self._workers = set(range(config.workers))
        """Lanes of worker processes that take tasks, or will."""
        self._retired: set[int] = set()
        """Those that end when their tasks are done."""
        each = config.device.stagers if config.device else 0
        self._stagers = {MOST_WORKERS + number: number // each for number in range(each * len(devices))}
        """Workers that stage for GPU lanes, and for which device's."""
        self._gpu = MOST_WORKERS + len(self._stagers)
        """The number of the GPU lane, of which every device has a part."""
        lanes = [*range(config.workers), *self._stagers]
        self._keeper: Keeper | None = None
        if config.cache is not None:
            self._keep_cache(config.cache, cache)
        self._crew = Crew(
            self._loop,
            self,
            self._pools,
            lanes,
            config.work,
            config.sys_path,
            self._want_template,
            (config.cache, cache[:3]) if config.cache is not None else None,
        )
        self._links = [self._linked(channel, books) for channel, books in zip(devices, self._pools.parts, strict=False)]
        self._own = config.workers
        """Workers, without those that are lent and borrowed."""
        self._least = 0
        """The fewest batches that waited for the training process since that was last looked at."""
        self._lending: Lending | None = None
        if config.group is not None:
            self._lending = Lending(self._loop, config.group, lambda: len(self._workers), self._balance)
            self._loop.after(LOOK_S, self._look)
        self._base = 0
        """The number of an epoch's first batch, which goes to the first device."""
        self._outgoing: dict[int, _Outgoing] = {}
        self._exact = config.device is not None and config.device.exact
        self._tied = False
        """All rows are tied to the GPU lane, but those that it returns."""
        self._counters = Counters(config.name, config.parent, config.workers, started=config.started)
        self._batches: dict[int, _State] = {}
        self._feed: Iterator[BatchSpec] = iter(())
        self._queue: deque[BatchSpec] = deque()
        self._next_seq = 0
        self._undelivered = 0
        """Batches sent to the training process that it has not taken yet."""
        self._outbox: list[tuple[Any, ...]] = []
        self._outbox_fds: list[int] = []
        self._cuttable = config.cut != "never"
        self._task_s = _OPAQUE_TASK_S if config.cut == "known" else _TASK_S
        self._cores = len(os.sched_getaffinity(0))
        self._row_s = 0.0
        self._rows = config.order.batch if config.order else 1
        self._bytes = config.batch_bytes
        self._ending = False
        self._said: set[str] = set()

    def _linked(self, channel: Channel, books: Books) -> DeviceLink:
        assert self._config.device is not None
        return DeviceLink(self._loop, channel, self, books, self._crew, self._config.device, self._gpu)

    def run(self) -> None:
        """Serve until the training process is gone or says so."""
        self._loop.listen(self._trainer, self._from_trainer, closed=self._stop)
        self._loop.watch(os.pidfd_open(self._config.parent), self._stop)
        try:
            view = View(self._loop, self._snapshot, self._config.metrics_port)
            self._outbox.append(("started", view.metrics_port))
            if self._bytes:
                self._grow(self._bytes)
            self._crew.start()
            self._watch_cache()
            while not self._ending:
                self._rest()
                self._fill()
                self._flush()
                self._loop.step()
        except Exception as error:  # whatever it is, the training process must hear of it
            self.lanes_failed(failure(error))
            self._flush()
        finally:
            self._crew.close()

    def _stop(self) -> None:
        self._ending = True

    def _keep_cache(self, access: Access, descriptors: Sequence[int]) -> None:
        """Watch over the cache, and let other loaders find it."""
        keeper = Keeper(access.open([os.dup(fd) for fd in descriptors[:3]], access.readers))
        server = socket.socket(fileno=descriptors[3])
        self._loop.watch(server.fileno(), lambda: answer(server, keeper.arena))
        self._keeper = keeper

    def _watch_cache(self) -> None:
        if self._keeper is not None:
            self._outbox += [("warn", text) for text in self._keeper.watch()]
            self._loop.after(WATCH_S, self._watch_cache)

    # the training process

    def _from_trainer(self, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        handlers: dict[str, Callable[..., None]] = {
            "batches": self._enqueue,
            "took": self._took,
            "epoch": self._begin_epoch,
            "template": self._adopt_template,
            "workers": self._resize,
            "stats": lambda: self._outbox.append(("stats", self._snapshot())),
            "stalled": self._examine,
            "bye": self._stop,
        }
        handlers[kind](*arguments)

    def _enqueue(self, batches: list[tuple[int, Any, int | None]]) -> None:
        """Prepare these batches: rows, payload, lane."""
        for rows, payload, lane in batches:
            self._queue.append(BatchSpec(self._seq(), rows, payload, lane=lane))

    def _took(self, batches: int, slots: list[Slot], trainer: dict[str, float]) -> None:
        """The training process took batches, and gives slots back."""
        self._undelivered -= batches
        self._least = min(self._least, self._undelivered)
        self._counters.trainer = trainer
        for slot in slots:
            self._give(slot)

    def _begin_epoch(self, epoch: int, consumed: int, skip: frozenset[int]) -> None:
        """Prepare what remains of an epoch after `consumed` samples, without the steps that begin at `skip`.

        Whatever was begun before is forgotten.
        """
        self._cancel()
        self._base = self._next_seq
        self._outbox.append(("epoch", self._base))
        if self._config.order is not None:
            self._feed = self._plan(epoch, self._config.order, consumed, skip)

    def _adopt_template(self, pid: int) -> None:
        self._crew.adopt(Channel(socket.socket(fileno=self._trainer.take_fd())), pid)

    def _want_template(self) -> None:
        self._outbox.append(("fork",))

    def _examine(self, waited_s: float) -> None:
        """No batch came in time: say what its workers are at, and replace those that hang."""
        seq = self._scheduler.first_open()
        lanes = (self._scheduler.working_on(seq) if seq is not None else []) or self._crew.busy
        if self._gpu in lanes:
            lanes = [*(lane for lane in lanes if lane != self._gpu), *self._stagers]

        def tell(stacks: dict[int, str], hung: list[int]) -> None:
            text = (
                "\n\n".join(stacks.values()) or f"no worker has work; still starting: {self._crew.starting or 'none'}"
            )
            self._outbox.append(("stalled", text))
            for lane in hung:
                self._crew.kill(lane)

        self._crew.stacks(lanes, 0.9 * waited_s, tell)

    def _tell(self, message: tuple[Any, ...], fds: Sequence[int]) -> None:
        if len(self._outbox_fds) + len(fds) > MOST_FDS:
            self._flush()
        self._outbox.append(message)
        self._outbox_fds += fds

    def _flush(self) -> None:
        if self._outbox:
            self._loop.post(self._trainer, self._outbox, self._outbox_fds)
            self._outbox, self._outbox_fds = [], []

    # batches in

    def _seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    def _plan(self, epoch: int, order: Order, consumed: int, skip: frozenset[int]) -> Iterator[BatchSpec]:
        for step in order.steps(consumed):
            if step.first in skip:
                continue
            sizes = (
                self._row_sizes(epoch, order.n, step.first, step.rows)
                if self._sizes and self._config.policy.sort
                else None
            )
            yield BatchSpec(self._seq(), step.rows, (epoch, step.first), sizes)

    def _row_sizes(self, epoch: int, n: int, first: int, rows: int) -> list[int]:
        assert self._sizes is not None
        positions = list(range(first, first + rows))
        ids = native.order(self._config.seed, epoch, n, positions) if self._config.shuffle else positions
        return [self._sizes[id] for id in ids]

    def _window(self) -> int:
        """How many batches may be prepared ahead of the training process."""
        if self._config.window is not None:
            return self._config.window
        light = 0 < self._row_s * self._rows < 0.001 and self._bytes <= SMALL_BYTES
        return max(_MANY if light else 4, 2 * len(self._workers), self._gpu_window())

    def _gpu_window(self) -> int:
        """As many as GPU lanes have at a time, and those that wait when CPU lanes rest."""
        device = self._config.device
        if device is None or not device.lane:
            return 0
        return (-(-device.depth * device.grain // self._rows) + _ENOUGH) * len(self._links)

    def _fill(self) -> None:
        """Open batches while the window, the slots and the feed have any."""
        if not self._pools.capacity and self._bytes and self._worth_cutting:
            self._grow(self._bytes)  # small batches need no slots, but their parts have to meet somewhere
        if self._exact and not all(link.open for link in self._links):
            return  # which rows are tied to the lane depends on what it is
        while self._scheduler.window + self._undelivered < self._window():
            part = (self._next_seq - self._base) % len(self._pools.parts)
            books = self._pools.parts[part]
            slotted = books.capacity > 0
            if slotted and not books.free:
                return
            spec = self._queue.popleft() if self._queue else next(self._feed, None)
            if spec is None:
                return
            self._rows = max(self._rows, spec.rows)
            slot = books.take() if slotted else None
            spec = replace(spec, whole=not self._may_cut(slot), large=[True] * spec.rows if self._tied else None)
            self._batches[spec.seq] = _State(spec, slot, part)
            self._act(self._scheduler.batch_opened(spec))

    def _rest(self) -> None:
        """CPU lanes leave decoding to a GPU lane that keeps up: for a CPU it is work, for the GPU's engine none."""
        config = self._config.device
        if config is None or not config.lane:
            return
        rests = not config.spare or self._undelivered >= _ENOUGH * len(self._links)
        if rests != self._scheduler.rests:
            self._act(self._scheduler.small_end_rests(rests))

    def _may_cut(self, slot: Slot | None) -> bool:
        if slot is None or not self._cuttable:
            return False
        return self._config.cut == "always" or self._worth_cutting

    @property
    def _worth_cutting(self) -> bool:
        return self._cuttable and self._row_s * self._rows > _SPLIT_ABOVE_S

    def _cancel(self) -> None:
        """Forget what was begun; memory that is being written to comes back when its writers are done."""
        self._scheduler.cancel()
        self._queue.clear()
        self._undelivered = 0
        for outgoing in self._outgoing.values():
            outgoing.cancelled = True
            for fd in outgoing.fds:
                os.close(fd)
        busy = self._scheduler.busy
        for seq, state in list(self._batches.items()):
            state.cancelled = True
            if seq not in busy:
                self._drop(seq)

    # batches out

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Deliver):
                self._deliver(instruction.seq)
            elif isinstance(instruction, Assign):
                self._run(instruction.lane, instruction.task, [self._request(piece) for piece in instruction.pieces])
            elif isinstance(instruction, Dismiss):
                self._dismiss(instruction.lane)
            else:
                self._strand()

    def _strand(self) -> None:
        reason = "exact=True ties samples to the GPU lane here, and the lane is lost; loader.explain() says why"
        self.lanes_failed(failure(LaneError(reason)))

    def _request(self, piece: Piece) -> tuple[Request, Slot | None]:
        state = self._batches[piece.seq]
        rows = tuple(sorted(piece.rows))
        request = Request(piece.seq, rows, state.spec.rows, piece.whole, piece.crashed, state.spec.payload)
        return request, state.slot

    def _run(self, lane: int, task: int, pieces: list[tuple[Request, Slot | None]]) -> None:
        if lane != self._gpu:
            self._crew.run(lane, task, pieces)
            return
        for index, (request, slot) in enumerate(pieces):
            assert slot is not None, "what a GPU lane may take has a slot"
            self._links[self._batches[request.seq].part].run(task, index, request, slot)

    def _deliver(self, seq: int) -> None:
        state = self._batches.pop(seq)
        slot = state.slot
        if slot is not None and not any(_uses_slot(result) for result in state.results):
            self._give(slot)
            slot = None
        self._undelivered += 1
        failed = any(result.failure is not None for result in state.results)
        missing = sum(len(result.missing) for result in state.results)
        self._counters.deliver(0 if failed else state.spec.rows - missing, _bad_samples(state.results))
        message = ("batch", seq, slot, state.results, len(state.fds))
        self._outgoing[seq] = _Outgoing(message, state.fds, slot, ready=slot is None or not self._links)
        if slot is not None and self._links:
            self._links[state.part].copy(seq, slot, _spans(state))
        self._send_ready()

    def batch_copied(self, seq: int) -> None:
        self._outgoing[seq].ready = True
        self._send_ready()

    def _send_ready(self) -> None:
        """Batches go in the order in which they were delivered, also where some have to be copied first."""
        while self._outgoing:
            seq, first = next(iter(self._outgoing.items()))
            if not first.ready:
                return
            del self._outgoing[seq]
            if not first.cancelled:
                self._tell(first.message, first.fds)
            elif first.slot is not None:
                self._give(first.slot)

    def _drop(self, seq: int) -> None:
        """A cancelled batch's memory comes back."""
        state = self._batches.pop(seq)
        self._empty(state)
        if state.slot is not None:
            self._give(state.slot)

    def _empty(self, state: _State) -> None:
        for fd in state.fds:
            os.close(fd)
        state.fds.clear()
        state.results.clear()

    def _give(self, slot: Slot) -> None:
        part = self._pools.part(slot[0])
        useless = self._pools.parts[part].give(slot)
        if useless is not None:
            self._forget(useless, part)

    def _forget(self, generation: int, part: int) -> None:
        self._crew.forget_region(generation)
        self._outbox.append(("forget", generation))
        if self._links:
            self._links[part].forget(generation)

    def _grow(self, nbytes: int) -> None:
        for part, generation in enumerate(self._pools.grow(nbytes, self._window() + self._config.reserve)):
            fd, slots, capacity = self._pools.region(generation)
            self._tell(("region", generation, slots, capacity), [os.dup(fd)])
            if self._links:
                self._links[part].region(generation, os.dup(fd), slots, capacity)
            books = self._pools.parts[part]
            for older in books.generations:
                if books.release(older):
                    self._forget(older, part)

    # lanes

    def lane_ready(self, lane: int, pid: int) -> None:
        self._counters.worker(lane).pid = pid
        stages = self._stages(lane)
        if stages is not None:
            stages.stager_ready(lane)
        elif lane in self._workers:
            self._act(self._scheduler.lane_joined(lane, depth=self._depth()))

    def _stages(self, lane: int) -> GpuLane | None:
        """The part of the GPU lane that a worker stages for, if it does."""
        return self._links[self._stagers[lane]].lane if lane in self._stagers else None

    def _look(self) -> None:
        """See whether the training waits, or has batches to spare."""
        assert self._lending is not None
        under_way = self._scheduler.window > 0
        waits = under_way and self._least == self._undelivered == 0
        self._lending.look(waits=waits, spare=self._least > 0 or not under_way)
        self._least = self._undelivered
        self._loop.after(LOOK_S, self._look)

    def _resize(self, count: int) -> None:
        """Have so many workers of this rank's own from now on."""
        self._own = count
        self._balance()

    def _balance(self) -> None:
        """Have as many workers as are this rank's own, or borrowed, but not lent. Those that are too many finish what
        they have."""
        count = max(1, self._own + (self._lending.balance if self._lending is not None else 0))
        _allow_descriptors(_FDS_PER_WORKER * (count + len(self._retired) + len(self._stagers)))
        while len(self._workers) > count:
            lane = max(self._workers)
            self._workers.remove(lane)
            self._retired.add(lane)
            self._act(self._scheduler.lane_retired(lane))
        free = (number for number in range(MOST_WORKERS) if number not in self._crew.numbers)
        for number in itertools.islice(free, count - len(self._workers)):
            self._workers.add(number)
            self._crew.add(number)
        self._counters.workers = count

    def _dismiss(self, lane: int) -> None:
        """A lane was retired, and has nothing to do any more."""
        if lane != self._gpu:
            self._retired.discard(lane)
            self._counters.forget(lane)
            self._crew.dismiss(lane)

    def device_open(self) -> None:
        lanes = [link.lane for link in self._links if link.lane is not None and not link.lane.lost]
        if not lanes or not all(link.open for link in self._links):
            return
        assert self._config.device is not None
        self._tied = self._exact and not all(link.identical for link in self._links)
        grain, depth = self._config.device.grain, self._config.device.depth * len(lanes)
        self._act(self._scheduler.lane_joined(self._gpu, depth=depth, large_end=True, grain=grain))

    def gpu_failed(self) -> None:
        if self._tied:
            self._strand()
        if all(link.lane is None or link.lane.lost for link in self._links):
            self._act(self._scheduler.lane_retired(self._gpu))

    def lane_lost(self, lane: int, blame: int) -> None:
        self._counters.lost += 1
        stages = self._stages(lane)
        if stages is not None:
            stages.stager_lost(lane)
            return
        retired = lane in self._retired
        if retired:
            self._dismiss(lane)
        instructions = self._scheduler.lane_lost(lane, blame=blame, for_good=retired)
        self._drop_quiet()
        self._act(instructions)

    def lanes_failed(self, error: Failure) -> None:
        """Tell the training process, which will close this loader."""
        self._outbox.append(("failed", error))

    def lane_done(self, lane: int, task: int, answers: Sequence[Answer], seconds: float, rows: int) -> None:
        for _, result, _ in answers:
            self._heed(result)
        stages = self._stages(lane)
        if stages is not None:
            self._count(lane, seconds, rows)
            for _, result, _ in answers:
                stages.stager_done(lane, result)
            return
        self._learn(lane, seconds, rows)
        for index, result, own_fd in answers:
            piece = self._scheduler.piece(lane, task, index)
            state = self._batches[piece.seq]
            if own_fd >= 0:
                state.fds.append(own_fd)
            if state.restarted and not piece.whole:
                self._act(self._scheduler.piece_done(lane, task, index))
            elif state.cancelled or self._meets(state, result):
                state.results.append(result)
                if lane == self._gpu:
                    state.on_device |= set(piece.rows).difference(result.returned)
                self._act(self._scheduler.piece_done(lane, task, index, returned=result.returned))
            else:
                self._cuttable = self._config.cut == "always"
                state.restarted = True
                self._empty(state)
                self._act(self._scheduler.piece_refused(lane, task, index))
            self._fit(result)
        self._drop_quiet()

    def _heed(self, result: Result) -> None:
        """What a result says beside its rows: counts, and what the user is told once."""
        self._counters.count(result.tally)
        for note in result.notes:
            if note not in self._said:
                self._said.add(note)
                self._outbox.append(("warn", note))
        result.tally, result.notes = {}, ()

    def _drop_quiet(self) -> None:
        cancelled = [seq for seq, state in self._batches.items() if state.cancelled]
        if cancelled:
            busy = self._scheduler.busy
            for seq in cancelled:
                if seq not in busy:
                    self._drop(seq)

    def _meets(self, state: _State, result: Result) -> bool:
        """The result can stand beside the others of its batch."""
        if result.refused or result.layout is None:
            return not result.refused
        return all(other.layout is None or other.layout == result.layout for other in state.results)

    def _fit(self, result: Result) -> None:
        """Slots as large as batches turn out to be; small batches need none until larger ones come."""
        self._bytes = max(self._bytes, result.nbytes)
        if result.nbytes > max(SMALL_BYTES, self._pools.capacity):
            self._grow(result.nbytes + result.nbytes // 8 if result.tree else result.nbytes)

    def _count(self, lane: int, seconds: float, rows: int) -> None:
        worker = self._counters.worker(lane)
        worker.busy_s += seconds
        worker.samples += rows

    def _learn(self, lane: int, seconds: float, rows: int) -> None:
        self._count(lane, seconds, rows)
        if lane == self._gpu:
            return
        row_s = seconds / max(1, rows)
        self._row_s = 0.9 * self._row_s + 0.1 * row_s if self._row_s else row_s
        share = max(1, self._window() * self._rows // (2 * len(self._workers)))
        self._scheduler.grain = max(1, min(int(self._task_s / max(self._row_s, 1e-9)), share))
        if lane in self._workers:
            self._scheduler.lane_depth(lane, self._depth())

    def _depth(self) -> int:
        rows = self._scheduler.grain if self._cuttable else self._rows
        usual_s = 1.5 * self._task_s if len(self._workers) > self._cores else 0.0
        return 2 if self._row_s * rows < max(_QUEUE_BELOW_S, usual_s) else 1

    def _snapshot(self) -> dict[str, Any]:
        return self._counters.snapshot(
            window=self._scheduler.window + self._undelivered,
            slots=self._pools.slots,
            slots_free=self._pools.free,
            slot_bytes=self._pools.capacity,
            starting=len(self._crew.starting),
            lent=self._lending.lent if self._lending is not None else 0,
            borrowed=self._lending.borrowed if self._lending is not None else 0,
            tiny_batch=self._scheduler.grain,
            cache=self._keeper.snapshot() if self._keeper is not None else None,
        )


def _spans(state: _State) -> list[tuple[int, int]]:
    """What of a slot has to be copied to the device: all but the images that were made there."""
    layouts = [result.layout for result in state.results if result.layout]
    if not state.on_device or not layouts:
        return [(0, max(result.nbytes for result in state.results))]
    layout = Layout.unpack(layouts[0])
    filled = image_column(layout)
    spans = []
    for index, column in enumerate(layout.columns):
        if index != filled:
            spans.append((column.offset, column.row_bytes * (1 if column.single else layout.rows)))
            continue
        rows = [row for row in range(layout.rows) if row not in state.on_device]
        for position, row in enumerate(rows):
            if position and rows[position - 1] == row - 1:
                spans[-1] = (spans[-1][0], spans[-1][1] + column.row_bytes)
            else:
                spans.append((column.offset + row * column.row_bytes, column.row_bytes))
    return spans


def _uses_slot(result: Result) -> bool:
    return not result.own and not result.inline and (result.layout is not None or bool(result.spans))


def _bad_samples(results: Sequence[Result]) -> list[BadSample]:
    """By row. Behind a failure it depends on how the batch was cut which rows were tried, so those do not count."""
    end = min((result.failed_row for result in results if result.failure is not None), default=None)
    found = [bad for result in results for bad in result.bad if end is None or bad.row <= end]
    return sorted(found, key=lambda bad: bad.row)


def _allow_descriptors(wanted: int) -> None:
    """The usual limit of 1,024 is too low for hundreds of workers; the hard limit is far higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + 256, hard), hard))


def main(fd: int) -> None:
    """The coordinator's whole life, on the connection to the training process."""
    trainer = Channel(socket.socket(fileno=fd))
    keep_from_signals()
    try:
        config = trainer.recv()
    except ClosedError:
        return
    if not isinstance(config, Config):  # it was interrupted while it started, and says goodbye
        return
    gc.freeze()
    gc.enable()
    stagers = config.devices * config.device.stagers if config.device else 0
    _allow_descriptors(_FDS_PER_WORKER * (config.workers + stagers))
    sizes = None
    if config.sizes:
        with os.fdopen(trainer.take_fd(), "rb") as file:
            sizes = array("q", file.read(8 * config.sizes))
    devices = [Channel(socket.socket(fileno=trainer.take_fd())) for _ in range(config.devices)]
    cache = [trainer.take_fd() for _ in range(4)] if config.cache is not None else []
    Coordinator(trainer, config, sizes, devices, cache).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
