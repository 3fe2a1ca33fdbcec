"""The training process's side: starts the coordinator, waits for batches, shows them as tensors over their slots.

It does little per batch, waits in C, and holds no thread. A slot belongs to the user for as long as any tensor over it
lives; when the user keeps more batches than there are slots in reserve, batches are copied out instead.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.batch import fixed_layout
from penstock.cache.access import Opened
from penstock.cache.keeper import WATCH_S, Keeper
from penstock.coordinator import Config
from penstock.device import Device, DeviceThread
from penstock.errors import LaneError, PenstockError, StalledError
from penstock.graph import Field, Graph
from penstock.lanes import Slot
from penstock.lanes.processes import held_signals, keep_from_signals, template_main
from penstock.layout import Layout, restore
from penstock.order import Order
from penstock.seeding import preserved
from penstock.slots import Region, anonymous
from penstock.stats import Counters
from penstock.wire import Channel, ClosedError, pair
from penstock.work import Failure, Memory, Request, Result, Work, failure

__all__ = ["Arrival", "Feed", "InlineFeed", "ProcessFeed", "assemble_rows", "idle_stats", "raise_failure", "warn"]

_END_WAIT_S = 5.0
_TELL_EVERY = 8
"""Batches taken before the coordinator hears of it, while more are at hand; of devices' it hears at once, for CPU lanes
rest while enough of them wait."""


@dataclass
class Arrival:
    """A batch as it came: `value` is the batch, None where every sample of it was skipped."""

    seq: int
    value: Any = None
    failure: Failure | None = None
    ended: bool = False
    missing: tuple[int, ...] = ()
    """Rows of bad samples, which the batch lacks."""
    device: int = 0
    """Which of the devices it is on, where there are several."""


Buffer = memoryview | torch.Tensor | None
"""The memory of a batch: of the host, or bytes of a device."""


def arrival(seq: int, results: list[Result], buffers: Sequence[Buffer]) -> Arrival:
    """The batch, or what went wrong with it."""
    failed = _first_failure(results)
    if failed is not None or any(result.ended for result in results):
        return Arrival(seq, failure=failed, ended=failed is None)
    try:
        missing = tuple(sorted({row for result in results for row in result.missing}))
        return Arrival(seq, assemble(results, buffers), missing=missing)
    except Exception as error:  # what a user's object does when it is unpickled is anyone's guess
        return Arrival(seq, failure=failure(error))


class Feed(ABC):
    """Where a loader's batches come from."""

    @abstractmethod
    def begin(self, epoch: int, consumed: int, skip: frozenset[int]) -> int:
        """Prepare what remains of an epoch, without the steps in `skip`; returns the number of its first batch."""

    @abstractmethod
    def next(self, timeout_s: float | None) -> Arrival:
        """The next batch. Raises LaneError when there can be no more, StalledError when none came in time."""

    @abstractmethod
    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The counters. Raises LaneError or StalledError when they cannot be had."""

    @abstractmethod
    def close(self) -> None:
        """End everything this feed has started."""


def assemble(results: list[Result], buffers: Sequence[Buffer]) -> Any:
    """The batch that the results make; `buffers[i]` is the memory that result i lies in."""
    for result, buffer in zip(results, buffers, strict=True):
        if result.tree:
            return decode_tree(result, buffer)
    laid = next(((r.layout, buffer) for r, buffer in zip(results, buffers, strict=True) if r.layout), None)
    if laid is None:
        return None
    missing = {row for result in results for row in result.missing}
    return assemble_rows(Layout.unpack(laid[0]), laid[1], missing, _loose(results))


def assemble_rows(
    layout: Layout,
    buffer: Buffer,
    missing: Collection[int] = (),
    loose: Mapping[str, list[Any]] | None = None,
) -> Any:
    """The batch that lies in memory under a layout, without the missing rows."""
    keep = [row for row in range(layout.rows) if row not in missing] if missing else None
    columns = []
    for column in layout.columns:
        shape = column.shape if column.single else (layout.rows, *column.shape)
        tensor = tensor_over(buffer, column.dtype, shape, column.offset)
        if keep is not None and not column.single:
            tensor = tensor.view(_INDEXED.get(tensor.dtype, tensor.dtype))[keep].view(tensor.dtype)
        columns.append(tensor.movedim(-1, -3) if column.image else tensor)
    return restore(layout, columns, loose or {})


def empty_batch(graph: Graph) -> dict[str, Any]:
    """What is left of a batch when every sample of it was skipped: no rows, and nothing along axes whose length only
    samples could tell."""
    layout = fixed_layout(graph, 0)
    if layout is not None:
        whole: dict[str, Any] = assemble_rows(layout, None)
        return whole
    batch: dict[str, Any] = {}
    for name, field in graph.spec.items():
        batch[name] = _no_rows(field)
        if graph.batch is not None and graph.batch.ragged == "pad" and field.shape is not None and not field.fixed:
            batch[f"{name}_shape"] = torch.empty((0, len(field.shape)), dtype=torch.int64)
        if graph.batch is not None and graph.batch.ragged == "list" and not field.fixed:
            batch[name] = []
    return {**batch, "id": torch.empty(0, dtype=torch.int64)}


def _no_rows(field: Field) -> torch.Tensor:
    kind = getattr(torch, field.dtype or "", torch.float32)
    tensor = torch.empty((0, *(length or 0 for length in field.shape or ())), dtype=kind)
    return tensor.movedim(-1, -3) if field.kind == "image" and tensor.ndim == 4 else tensor


_INDEXED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch 2.6 cannot take rows of tensors of these types, but of others with the same bits."""


def _loose(results: list[Result]) -> dict[str, list[Any]]:
    values: dict[str, dict[int, Any]] = {}
    for result in results:
        if result.loose:
            rows, fields = pickle.loads(result.loose)
            for name, items in fields.items():
                values.setdefault(name, {}).update(zip(rows, items, strict=True))
    return {name: [by_row[row] for row in sorted(by_row)] for name, by_row in values.items()}


def _first_failure(results: list[Result]) -> Failure | None:
    """The failure of the lowest row, whatever order the rows were prepared in."""
    failed = [result for result in results if result.failure is not None]
    return min(failed, key=lambda result: result.failed_row).failure if failed else None


def tensor_over(buffer: Buffer, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over a part of a batch's memory; it keeps that memory."""
    kind: torch.dtype = getattr(torch, dtype)
    count = math.prod(shape)
    if count == 0 or buffer is None:
        return torch.empty(shape, dtype=kind)
    if isinstance(buffer, torch.Tensor):
        return buffer[offset : offset + count * kind.itemsize].view(kind).view(shape)
    return torch.frombuffer(buffer, dtype=kind, count=count, offset=offset).view(shape)


def decode_tree(result: Result, buffer: Buffer) -> Any:
    """A batch of any kind, its arrays and tensors over the batch's memory."""
    if not result.spans:
        return pickle.loads(result.tree, buffers=[bytearray(data) for data in result.inline])
    assert isinstance(buffer, memoryview)
    return pickle.loads(result.tree, buffers=[buffer[start : start + size] for start, size in result.spans])


def raise_failure(error: Failure) -> NoReturn:
    """The exception of a worker, here; its own traceback goes along as its cause."""
    original = pickle.loads(error.pickled) if error.pickled else None
    reraise: Callable[[], None] | None = getattr(original, "reraise", None)
    if reraise is not None:
        reraise()
    if isinstance(original, PenstockError):
        raise original from WorkerTracebackError(error.text)
    raise LaneError(f"a worker failed:\n{error.text}")


class WorkerTracebackError(Exception):
    """Carries the traceback of another process as text."""

    def __str__(self) -> str:
        return f"\n\nIn the worker:\n{self.args[0]}"


class ProcessFeed(Feed):
    """Batches from worker processes."""

    def __init__(
        self,
        config: Config,
        work: Work,
        sizes: array[int] | None,
        devices: Sequence[Device] = (),
        cache: Sequence[int] = (),
    ) -> None:
        """Takes the descriptors of the cache: the arena's, the tally's, and that of a socket where it is found."""
        self._work = work
        self._devices = devices
        self.threads: list[DeviceThread] = []
        """One for each device."""
        self._fork = config.work is None
        self._reserve = config.reserve
        self._regions: dict[int, Region] = {}
        self._ready: deque[tuple[int, Slot | None, list[Result], list[int]]] = deque()
        self._returned: deque[tuple[Device | None, Slot]] = deque()
        self._unsent: list[Slot] = []
        self._leased = 0
        self._given_back = 0
        self._taken = 0
        self._told = 0
        self._wait_s = 0.0
        self._copied = 0
        self._stats: dict[str, Any] | None = None
        self._stalled: str | None = None
        self._warnings: deque[str] = deque()
        self._epoch_base: int | None = None
        self._next_seq = 0
        self.small = False
        """The last batch travelled in messages, without a slot."""
        self.between = False
        """A GPU lane is to work between the training's steps."""
        self._metrics_port: int | None = None
        self._started = False
        ours, theirs = pair()
        self._channel = Channel(ours)
        self._children: list[int] = []
        with theirs, held_signals():  # an interrupt comes before anything was started, or finds what ends it
            process = _start_coordinator(theirs.fileno())
            self._finalizer = weakref.finalize(self, _shut_down, self._channel, process, self._children, os.getpid())
        fds = [_array_fd(sizes)] if sizes is not None else []
        for device in devices:
            ours, theirs = pair()
            self.threads.append(DeviceThread(device, Channel(ours)))
            fds.append(theirs.detach())
        fds += cache
        self._send(config, fds)
        for fd in fds:
            os.close(fd)
        if config.work is None:
            self._on_fork()
        for thread in self.threads:
            thread.start()

    # what a loader calls

    def begin(self, epoch: int, consumed: int, skip: frozenset[int]) -> int:
        self._epoch_base = None
        self._tell()
        self._send(("epoch", epoch, consumed, skip))
        self._discard()
        while self._epoch_base is None:
            self._receive(None)
        self._next_seq = self._epoch_base
        return self._epoch_base

    def submit(self, batches: list[tuple[int, Any, int | None]]) -> int:
        """Prepare these: rows, payload, lane. Returns the number of the first."""
        self._send(("batches", batches))
        self._next_seq += len(batches)
        return self._next_seq - len(batches)

    def resize(self, workers: int) -> None:
        """Have so many workers from now on."""
        self._send(("workers", workers))

    def next(self, timeout_s: float | None) -> Arrival:
        while self._warnings:  # now, where nothing is lost if the user has made them errors
            warn(self._warnings.popleft())
        for device in self._devices:
            device.waiting(self.between)
        if not self._ready or self._taken - self._told >= (1 if self._devices else _TELL_EVERY):
            self._tell()
        if not self._ready:
            self._wait(timeout_s)
        for device in self._devices:
            device.stepping()
        seq, slot, results, fds = self._ready.popleft()
        self._taken += 1
        self.small = slot is None and not fds
        if not self._devices:
            return arrival(seq, results, self._buffers(slot, results, fds, None))
        turn = (seq - (self._epoch_base or 0)) % len(self._devices)
        arrived = arrival(seq, results, self._buffers(slot, results, fds, self._devices[turn]))
        arrived.device = turn
        if slot is None:
            arrived.value = moved(arrived.value, self._devices[turn].torch_device)
        return arrived

    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        self._stats = None
        self._tell()
        self._send(("stats",))
        while self._stats is None:
            if not self._receive(timeout_s):
                raise StalledError(f"the process that coordinates the workers did not answer in {timeout_s:g} s")
        return self._stats

    @property
    def metrics_port(self) -> int | None:
        """Where metrics are served; None where they are not."""
        while not self._started:
            self._receive(None)
        return self._metrics_port

    def close(self) -> None:
        self._discard()
        for device in self._devices:
            device.waiting(False)  # what was to be done between steps is done now
        self._finalizer()
        for thread in self.threads:
            thread.join(_END_WAIT_S)

    # inside

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        if self._channel.fileno() < 0:
            raise self._gone()
        try:
            self._channel.send(message, fds)
        except ClosedError as error:
            raise self._gone() from error

    def _gone(self) -> LaneError:
        """Raises what the coordinator said at its end, if it said anything."""
        with contextlib.suppress(ClosedError):
            while self._channel.fileno() >= 0 and (messages := self._channel.recv(0)) is not None:
                for kind, *arguments in messages:
                    if kind == "failed":
                        self._on_failed(*arguments)
        self._finalizer()
        return LaneError(
            "the process that coordinates the workers is gone; was it killed? Iterating again starts another; "
            "a Loader goes on where it stopped if given its state_dict() before"
        )

    @property
    def held(self) -> int:
        """Slots whose memory the user holds."""
        self._collect_returned()
        return self._leased - self._given_back

    def _collect_returned(self) -> None:
        while self._returned:
            device, slot = self._returned.popleft()
            if device is not None:
                device.given_back(slot)
            self._unsent.append(slot)
            self._given_back += 1

    def _tell(self) -> None:
        """Tell the coordinator what was taken and what came back."""
        held = self.held
        if self._taken == self._told and not self._unsent:
            return
        own = {
            "wait_s": self._wait_s,
            "batches_taken": self._taken,
            "batches_copied": self._copied,
            "slots_held": held,
        }
        self._send(("took", self._taken - self._told, self._unsent, own))
        self._told = self._taken
        self._unsent = []

    def _wait(self, timeout_s: float | None) -> None:
        started = time.perf_counter()
        try:
            while not self._ready:
                left = None if timeout_s is None else timeout_s - (time.perf_counter() - started)
                if (left is not None and left <= 0) or not self._receive(left):
                    self._report_stall(timeout_s or 0.0)
        finally:
            self._wait_s += time.perf_counter() - started

    def _report_stall(self, timeout_s: float) -> NoReturn:
        self._stalled = None
        self._send(("stalled", timeout_s))
        while self._stalled is None:
            self._receive(None)
        raise StalledError(f"no batch came in {timeout_s:g} s; workers that hang are replaced.\n{self._stalled}")

    def _receive(self, timeout_s: float | None) -> bool:
        """Take in what the coordinator sent; False when nothing came in time."""
        if self._channel.fileno() < 0:
            raise self._gone()
        try:
            messages = self._channel.recv(timeout_s)
        except ClosedError as error:
            raise self._gone() from error
        if messages is None:
            return False
        for kind, *arguments in messages:
            getattr(self, f"_on_{kind}")(*arguments)
        return True

    def _on_started(self, metrics_port: int | None) -> None:
        self._metrics_port = metrics_port
        self._started = True

    def _on_region(self, generation: int, slots: int, capacity: int) -> None:
        fd = self._channel.take_fd()
        if not self._devices:
            self._regions[generation] = Region(fd, slots, capacity, forkable=True)
        os.close(fd)
        self._reserve = min(self._reserve, slots - 1)

    def _on_forget(self, generation: int) -> None:
        self._regions.pop(generation, None)

    def _on_batch(self, seq: int, slot: Slot | None, results: list[Result], fds: int) -> None:
        self._ready.append((seq, slot, results, [self._channel.take_fd() for _ in range(fds)]))

    def _on_epoch(self, base: int) -> None:
        """Batches that came before belong to what was abandoned."""
        self._discard()
        self._epoch_base = base

    def _on_stats(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def _on_warn(self, text: str) -> None:
        self._warnings.append(text)

    def _on_stalled(self, text: str) -> None:
        self._stalled = text

    def _on_failed(self, error: Failure) -> None:
        self._finalizer()
        raise_failure(error)

    def _on_fork(self) -> None:
        """Workers share this process's memory: fork the template they come from."""
        ours, theirs = pair()
        for stream in (sys.stdout, sys.stderr):  # or workers would write what is in their buffers once more
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        with warnings.catch_warnings(), held_signals():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of their code
            pid = os.fork()
            if pid == 0:
                ours.close()
                _become_template(theirs.detach(), self._channel, self._work)
            self._children[:] = [*(child for child in self._children if not _reaped(child)), pid]
        theirs.close()
        self._send(("template", pid), (ours.fileno(),))
        ours.close()

    def _discard(self) -> None:
        """Give back what was prepared and not taken."""
        while self._ready:
            _, slot, _, fds = self._ready.popleft()
            for fd in fds:
                os.close(fd)
            if slot is not None:
                self._unsent.append(slot)

    def _buffers(self, slot: Slot | None, results: list[Result], fds: list[int], device: Device | None) -> list[Buffer]:
        """The memory of each result: the slot, or memory of its own."""
        shared = self._lease(slot, results, device) if slot is not None else None
        own = iter(fds)
        return [
            _own_memory(next(own), r.nbytes) if r.own else memoryview(bytearray(r.inline[0])) if _small(r) else shared
            for r in results
        ]

    def _lease(self, slot: Slot, results: list[Result], device: Device | None) -> memoryview | torch.Tensor:
        if device is not None:
            mirror, holder = device.lease(slot)
            return mirror if self._hold(holder, slot, device) else mirror.clone()
        # An array owns the lease: slices of a memoryview keep what it views alive, but not the memoryview itself.
        owner: Any = np.frombuffer(self._regions[slot[0]].slot(slot[1]), np.uint8)
        if self._hold(owner, slot, None):
            return memoryview(owner)
        return memoryview(bytearray(owner[: max(result.nbytes for result in results)]))

    def _hold(self, owner: Any, slot: Slot, device: Device | None) -> bool:
        """A slot is the user's while its owner lives. False where the user holds so many that this one is copied."""
        self._leased += 1
        weakref.finalize(owner, self._returned.append, (device, slot)).atexit = False
        if self.held <= self._reserve:
            return True
        self._copied += 1
        return False


def moved(value: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    return value


def _small(result: Result) -> bool:
    """Its memory came in the message."""
    return result.layout is not None and bool(result.inline)


def _own_memory(fd: int, nbytes: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(fd, max(1, nbytes)))
    finally:
        os.close(fd)


def _array_fd(sizes: array[int]) -> int:
    fd = anonymous(0)
    with open(fd, "wb", closefd=False) as file:
        file.write(sizes)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _start_coordinator(fd: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter without site packages: the coordinator needs only the standard library and this package."""
    package = str(Path(__file__).parent.parent)
    # at the end of the path: what else is installed there must not stand before the standard library
    # garbage collection off until all is imported: it takes a tenth of that time
    code = (
        f"import gc, sys; gc.disable(); sys.path.append({package!r}); from penstock.coordinator import main; main({fd})"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True)


def _become_template(sock: int, trainer: Channel, work: Work) -> NoReturn:
    """In the child that the training process forked."""
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        keep_from_signals()
        os.setsid()
        trainer.close()
        template_main(socket.socket(fileno=sock), work.load)
    except BaseException:  # nothing may unwind into the user's stack
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _shut_down(channel: Channel, process: subprocess.Popen[bytes], children: list[int], owner: int) -> None:
    """Ends the coordinator, and with it everything. Does nothing in a child that the user forked."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(ClosedError, OSError):
        channel.send(("bye",))
    channel.close()
    try:
        process.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in children:  # they end with the coordinator, after the workers they have to wait for
        deadline = time.monotonic() + _END_WAIT_S
        while not _reaped(pid):
            time.sleep(0.001)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)


def _reaped(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


def idle_stats(counters: Counters, cache: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `stats` says where no workers run."""
    gauges = {"window": 0, "slots": 0, "slots_free": 0, "slot_bytes": 0, "starting": 0, "lent": 0, "borrowed": 0}
    return counters.snapshot(cache, **gauges, tiny_batch=0)


def warn(text: str) -> None:
    """Warn of what the user should know, at their line: they called `next` of an epoch, and that of a feed's."""
    warnings.warn(text, RuntimeWarning, stacklevel=5)


class _Heap(Memory):
    """Memory of this process."""

    buffer: memoryview | None = None

    def reserve(self, nbytes: int, whole: bool) -> memoryview:
        self.buffer = memoryview(bytearray(nbytes))
        return self.buffer


class InlineFeed(Feed):
    """The same work in the training process itself, batch by batch, for `workers=0`."""

    def __init__(
        self,
        work: Work,
        order: Order | None,
        name: str,
        devices: Sequence[torch.device] = (),
        cache: Opened | None = None,
    ) -> None:
        self._work = work
        self._order = order
        self._devices = devices
        self._counters = Counters(name, os.getpid(), 0)
        self._steps: Iterator[tuple[int, Any]] = iter(())
        self._seq = self._base = 0
        self._opened = False
        self._cache = cache
        self._keeper = Keeper(cache) if cache is not None else None
        self._watched = 0.0

    def begin(self, epoch: int, consumed: int, skip: frozenset[int]) -> int:
        assert self._order is not None
        steps = self._order.steps(consumed)
        self._steps = ((step.rows, (epoch, step.first)) for step in steps if step.first not in skip)
        self._base = self._seq
        return self._seq

    def next(self, timeout_s: float | None) -> Arrival:
        started = time.perf_counter()
        if self._keeper is not None and started - self._watched > WATCH_S:
            self._watched = started
            for text in self._keeper.watch():
                warn(text)
        rows, payload = next(self._steps)
        seq = self._seq
        self._seq += 1
        heap = _Heap()
        with preserved():
            if not self._opened:
                self._open()
            result = self._work.run(Request(seq, tuple(range(rows)), rows, True, False, payload), heap)
        seconds = time.perf_counter() - started
        self._counters.count(result.tally)
        for note in result.notes:
            warn(note)
        self._counters.deliver(0 if result.failure is not None else rows - len(result.missing), result.bad)
        own = self._counters.trainer
        own["wait_s"] = own.get("wait_s", 0.0) + seconds
        own["batches_taken"] = own.get("batches_taken", 0) + 1
        arrived = arrival(seq, [result], [heap.buffer])
        if self._devices:
            arrived.device = (seq - self._base) % len(self._devices)
            arrived.value = moved(arrived.value, self._devices[arrived.device])
        return arrived

    def _open(self) -> None:
        try:
            self._work.open(0)
        except Exception as error:
            raise LaneError(f"the pipeline could not be opened: {type(error).__name__}: {error}") from error
        if self._cache is not None:
            self._work.equip(self._cache)
        self._opened = True

    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        return idle_stats(self._counters, self._keeper.snapshot() if self._keeper is not None else None)

    def close(self) -> None:
        """Nothing was started."""
        if self._cache is not None:
            self._cache.arena.close()
