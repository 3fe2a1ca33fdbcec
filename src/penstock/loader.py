"""The Loader: a pipeline and options in, epochs of batches out, exactly and again from where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.batch import fixed_layout
from penstock.cache.keeping import Keeping
from penstock.cache.loading import LoaderCache
from penstock.coordinator import Config, Policy
from penstock.device import Device
from penstock.devices import missing, open_device
from penstock.disk import DiskPlan, plan_disk, survey
from penstock.errors import GraphError, LaneError, OptionError, PenstockError, StalledError, StateError
from penstock.feed import Arrival, Feed, InlineFeed, ProcessFeed, empty_batch, idle_stats, raise_failure
from penstock.graph import Batch, Graph
from penstock.graphwork import GraphWork, Staging
from penstock.lanes import MOST_WORKERS
from penstock.lanes.link import DeviceConfig
from penstock.options import LoaderKeywords, LoaderOptions, available_cores
from penstock.order import Order, Step
from penstock.pipe import Pipe
from penstock.placing import Sizes, place
from penstock.sharing import Sharing
from penstock.slots import slot_bytes
from penstock.stats import Counters
from penstock.tail import OpenTail

__all__ = ["Loader"]

_RESERVE = 3
"""Slots for batches that the user holds: this one, the last one, and one whose return is not yet known."""
_LAST_WORDS_S = 1.0
_MOST_STAGERS = 3
"""Each stages about 8,000 images a second; the JPEG engine decodes about 21,000."""


class Loader:
    """Batches of a pipeline, epoch after epoch.

    Each iteration is one epoch: every sample once, in an order and with augmentations that follow from (seed, epoch)
    alone. Batches are dicts of tensors with the samples' numbers as `id`. `state_dict()` says where the training is;
    after `load_state_dict()` the next iteration goes on there, also on another number of ranks.
    """

    _policy = Policy()
    """A benchmark measures loaders without parts of it."""

    def __init__(self, pipe: Pipe, **options: Unpack[LoaderKeywords]) -> None:
        if not isinstance(pipe, Pipe):
            raise GraphError(
                f"Loader takes a pipe, such as ps.files(...).decode().batch(64), not {type(pipe).__name__}"
            )
        if pipe.graph.batch is None:
            raise GraphError("the pipeline has no batch step; end it with .batch(size)")
        self.options = LoaderOptions.checked(dict(options))
        self._graph = pipe.graph
        self._notes = pipe.notes
        self._batch: Batch = pipe.graph.batch
        option = self.options
        for device in option.devices:
            lacking = missing(device)
            if lacking is not None:
                raise OptionError(f"device={device!r} cannot be had: {lacking}")
        lane = option.gpu_lane != "off" and option.worker_count > 0
        self._placing = place(pipe.graph, device=bool(option.devices), lane=lane, exact=option.exact)
        self._plan = self._placing.head
        self._tails: list[OpenTail] = []
        """On each device, where there is anything to do behind the copy."""
        self._disk = self._plan_disk()
        self._sharing = Sharing(option.pinned_sharing)
        self._order = Order(
            len(pipe.graph.source), self._batch.size, self._batch.drop_last, option.rank, option.world_size
        )
        if self._order.count() == 0:
            raise GraphError(
                f"{self._order.n} samples do not fill one batch of {self._order.global_batch} over all ranks, and "
                "drop_last drops the rest; use a smaller batch or drop_last=False"
            )
        next(self._order.steps())
        if option.worker_count == 0 and option.metrics_port is not None:
            raise OptionError("metrics_port is served by the process that coordinates workers; it needs workers >= 1")
        self._epoch = 0
        self._consumed = 0
        self._ahead: list[int] = []
        keeping = Keeping.decide(option.cache_form, self._plan, lane=self._has_lane)
        self._cache = LoaderCache(option.cache, pipe.graph.source, keeping)
        self._feed: Feed | None = None
        self._owner = 0
        """The process that started the feed."""
        self._last_stats: dict[str, Any] | None = None
        self._begun = False
        """The epoch that is set has been begun."""
        self._pass = 0
        """Number of the iteration that is under way; earlier ones have ended."""

    def __len__(self) -> int:
        """Batches in an epoch, on each rank."""
        return self._order.count()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin an epoch: the one that was loaded or set, else the one after the last that was begun."""
        if self._begun:
            self.set_epoch(self._epoch + 1)
        self._pass += 1
        return _Epoch(self, self._pass)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its start."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**32:
            raise StateError(f"an epoch is a whole number from 0, not {epoch!r}")
        self._epoch, self._consumed, self._ahead = epoch, 0, []
        self._begun = False
        self._pass += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the training is: a few numbers, counted in samples that were handed out on all ranks."""
        return {
            "version": 1,
            "fingerprint": self.fingerprint(),
            "epoch": self._epoch,
            "samples": self._consumed,
            "ahead": list(self._ahead),
            "batch": self._batch.size,
            "rank": self.options.rank,
            "world_size": self.options.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from there."""
        lacking = [key for key in self.state_dict() if not (isinstance(state, Mapping) and key in state)]
        if lacking:
            raise StateError(f"a state is what state_dict() of a Loader gives; this one lacks {', '.join(lacking)}")
        if state["version"] != 1:
            raise StateError(f"a state of version 1 is needed, not {state['version']!r}")
        if state["fingerprint"] != self.fingerprint():
            raise StateError(
                "the state belongs to other data, another pipeline, seed or shuffle; its batches would not follow. "
                "Build the loader as it was (batch size per rank and number of ranks may change), or begin anew"
            )
        here = (self._batch.size, self.options.rank, self.options.world_size)
        if state["ahead"] and (state["batch"], state["rank"], state["world_size"]) != here:
            raise StateError(
                "a state saved within an epoch with order='ready' belongs to its rank and batch size; save one per rank"
            )
        samples = state["samples"]
        if isinstance(samples, bool) or not isinstance(samples, int) or not 0 <= samples <= self._order.n:
            raise StateError(f"the state is at sample {samples!r}, but an epoch has samples 0 to {self._order.n:,}")
        self.set_epoch(state["epoch"])
        self._consumed = samples
        self._ahead = list(state["ahead"])
        if self._consumed >= self._order.n or self._order.count(self._consumed) == 0:
            self.set_epoch(self._epoch + 1)

    def fingerprint(self) -> str:
        """Changes when a state would mean other batches: data, operators, seed, shuffle; not the batch size."""
        return f"{self._graph.fingerprint()}-{self.options.seed}-{'shuffled' if self.options.shuffle else 'ordered'}"

    def stats(self) -> dict[str, Any]:
        """The counters: samples, seconds waited, workers, slots, bad samples."""
        if self._feed is not None:
            return self._running().stats()
        counters = Counters(self.options.name, os.getpid(), self.options.worker_count)
        return self._last_stats or idle_stats(counters)

    @property
    def metrics_port(self) -> int | None:
        """Where metrics are served; starts the workers if they do not run yet."""
        feed = self._running()
        return feed.metrics_port if isinstance(feed, ProcessFeed) else None

    def resize(self, workers: int) -> None:
        """Have so many worker processes from now on. Batches come on meanwhile: new workers join when they are ready,
        and those that are too many end when they have done what they began."""
        changed = replace(self.options, workers=workers)
        if not (changed.worker_count and self.options.worker_count):
            raise OptionError("workers=0 prepares batches in the training process, from the start or not at all")
        self.options = changed
        if isinstance(self._feed, ProcessFeed):
            self._feed.resize(changed.worker_count)

    def explain(self) -> str:
        """What was decided, and why."""
        return "\n".join(self._explanation())

    def close(self) -> None:
        """End the workers and everything else. Batches that were handed out stay valid."""
        if self._feed is not None and self._owner == os.getpid():
            with contextlib.suppress(PenstockError):
                self._last_stats = self._feed.stats(_LAST_WORDS_S)
        self._end()

    # inside

    def _end(self) -> None:
        self._pass += 1
        feed, self._feed = self._feed, None
        if feed is not None and self._owner == os.getpid():
            feed.close()

    @property
    def _forks(self) -> bool:
        return self.options.start == "fork" or (self.options.start == "auto" and not self._graph.clean)

    def _running(self) -> Feed:
        if self._feed is None:
            self._feed = self._start()
            self._owner = os.getpid()
        elif self._owner != os.getpid():
            raise LaneError(
                f"the workers of this loader belong to process {self._owner}, which this one was forked from; "
                "make a Loader of its own here"
            )
        return self._feed

    def _start(self) -> Feed:
        option = self.options
        layout = fixed_layout(self._plan, self._batch.size)
        sizes = self._sizes()
        work = GraphWork(
            self._plan, option.seed, option.shuffle, option.on_error, self._staging(sizes), disk=self._disk
        )
        devices = [open_device(device, self._placing.recipe, sizes) for device in option.devices]
        tail = self._placing.tail
        if tail is not None:
            self._tails = [tail.open(device.torch_device, self._batch.size) for device in devices]
        if option.worker_count == 0:
            access, descriptors = self._cache.open(option.memory, 1, 1, served=False)
            opened = access.open(descriptors, 0) if access is not None else None
            return InlineFeed(work, self._order, option.name, [device.torch_device for device in devices], opened)
        placed = self._device_config(sizes) if devices else None
        stagers = placed.stagers * len(devices) if placed is not None else 0
        access, descriptors = self._cache.open(
            option.memory, option.worker_count + stagers, MOST_WORKERS + stagers, served=True
        )
        file_sizes = self._plan.source.sizes()
        config = Config(
            name=option.name,
            parent=os.getpid(),
            workers=option.worker_count,
            work=None if self._forks else self._pickled(work),
            sys_path=tuple(sys.path),
            order=self._order,
            seed=option.seed,
            shuffle=option.shuffle,
            sizes=0 if file_sizes is None else len(file_sizes),
            delivery=option.order,
            cut="always" if layout is not None else "known" if self._batch.ragged == "error" else "never",
            window=None if option.prefetch == "auto" else option.prefetch,
            reserve=_RESERVE,
            memory_bytes=self._batch_memory(sizes, 0 if layout is None else layout.nbytes),
            batch_bytes=0 if layout is None else layout.nbytes,
            metrics_port=option.metrics_port,
            device=placed,
            devices=len(devices),
            policy=self._policy,
            cache=access,
            group=self._group,
        )
        sizes_by_id = None if file_sizes is None else array("q", file_sizes)
        return ProcessFeed(config, work, sizes_by_id, devices, descriptors)

    @property
    def _has_lane(self) -> bool:
        """A GPU lane is to decode too."""
        return self._placing.recipe is not None and self.options.worker_count > 0

    def _plan_disk(self) -> DiskPlan | None:
        option = self.options
        if option.cache_folder is None:
            return None
        return plan_disk(self._graph.source, os.fspath(option.cache_folder), option.disk_budget)

    def _sizes(self) -> Sizes | None:
        """How the GPU lane, where there is to be one, divides its memory."""
        recipe = self._placing.recipe
        return None if recipe is None else Sizes.of(recipe, self._batch.size, self.options.device_bytes)

    def _staging(self, sizes: Sizes | None) -> Staging | None:
        recipe = self._placing.recipe
        if recipe is None or sizes is None:
            return None
        return Staging(recipe, sizes.shape, MOST_WORKERS)

    def _device_config(self, sizes: Sizes | None) -> DeviceConfig:
        if sizes is None:
            return DeviceConfig(False, 0, 0, 0, 0, False, False)
        depth = self._stagers + 1 + sizes.areas
        exact = self.options.exact
        return DeviceConfig(True, self._stagers, depth, sizes.shape.nbytes, sizes.grain, self._spare, exact)

    @property
    def _stagers(self) -> int:
        """Processes that stage for each device's lane."""
        return max(1, min(_MOST_STAGERS, 3 * self.options.worker_count // 4))

    @property
    def _spare(self) -> bool:
        """Whether there are cores for CPU lanes beside GPU lanes, which serve a core's time far better: one is for the
        training process, one for what serves the lanes."""
        return available_cores() > 2 + self._stagers * len(self.options.devices)

    @property
    def _group(self) -> str | None:
        """What the ranks of this job have in common, where they lend each other workers."""
        job = f"{self.fingerprint()}-{self.options.world_size}-{self.options.name}"
        return hashlib.sha256(job.encode()).hexdigest()[:16] if self.options.lend else None

    def _batch_memory(self, sizes: Sizes | None, batch_bytes: int) -> int:
        """Bytes of batches: on the host, and as many on the devices where batches go there."""
        option = self.options
        if not option.devices:
            return option.memory
        lane = sizes.workspace_bytes if sizes is not None else 0
        each = max(option.device_bytes - lane, 2 * slot_bytes(batch_bytes))
        return min(option.memory, len(option.devices) * each)

    def _pickled(self, work: GraphWork) -> bytes:
        try:
            return pickle.dumps(work)
        except Exception as error:  # what a user's object does when pickled is anyone's guess
            raise LaneError(
                f"start='clean' needs a pipeline that can be pickled, and this one cannot: {error}; "
                "use start='fork', or functions defined in a module"
            ) from error

    def _explanation(self) -> Iterator[str]:
        option, source = self.options, self._graph.source
        yield from self._notes
        if self._disk is not None:
            kept, held = survey(self._disk)
            yield (
                f"disk tier: {self._disk.place} keeps {kept:,} of these samples; the folder holds {held:,} of at most "
                f"{self._disk.budget_bytes:,} bytes"
            )
        operators = " -> ".join(operator.name for operator in self._plan.operators) or "(no operators)"
        yield f"source: {type(source).__name__.lower()}, {len(source):,} samples"
        yield f"operators: {operators}"
        for before, after in _joined(self._graph, self._plan):
            yield f"  {after}: {before} in one, so that only the pixels that are kept get decoded"
        if option.devices:
            yield from self._about_devices()
        if option.cache is not None:
            yield from self._cache.explanation(self.stats()["cache"])
        yield f"batches: {len(self):,} of {self._batch.size} per epoch on each of {option.world_size} ranks"
        if option.worker_count == 0:
            yield "workers: none; batches are prepared in the training process"
            return
        asked = "as asked" if option.workers != "auto" else "one for each core this process may use"
        yield f"workers: {option.worker_count}, {asked}"
        if option.lend:
            yield "  they are lent to ranks on this machine whose training waits while this one does not, and come back"
        why = "as asked" if option.start != "auto" else "the pipeline holds objects of yours"
        if self._forks:
            yield f"workers are forked from this process: {why}"
        else:
            yield "workers are forked from a clean process without torch: nothing in the pipeline needs it"
        layout = fixed_layout(self._plan, self._batch.size)
        if layout is not None:
            yield f"slots: {layout.nbytes:,} bytes a batch; every batch is cut into tiny-batches among the workers"
        else:
            yield "slots: sized by the first batches, as the samples' shapes are not known beforehand"
        yield f"batch memory: at most {option.memory:,} bytes"

    def _about_devices(self) -> Iterator[str]:
        """Where the parts of the pipeline run, and why."""
        placing, devices = self._placing, self.options.devices
        turns = ", one batch to each in turn" if len(devices) > 1 else ""
        yield f"device: {', '.join(devices)}{turns}; batches are copied ahead of the training, on a stream of their own"
        if placing.tail is not None:
            yield f"after the copy, on the device: {', '.join(gate.name for gate in placing.tail.gates)}"
        if placing.recipe is None:
            yield f"GPU lane: none; {placing.why_no_lane}"
        elif self.options.worker_count == 0:
            yield "GPU lane: none; without workers nothing stages for it"
        else:
            yield from self._about_lanes()

    def _about_lanes(self) -> Iterator[str]:
        size, threads = self._sizes(), self._feed.threads if isinstance(self._feed, ProcessFeed) else []
        assert size is not None
        broken = [thread for thread in threads if thread.problem is not None]
        for thread in broken:
            whose = f" of {thread.device.torch_device}" if len(threads) > 1 else ""
            yield f"GPU lane{whose}: none; {thread.problem}"
        if threads and len(broken) == len(threads):
            return
        yield (
            f"GPU lane: takes {size.grain} samples at a time, the largest of a batch; "
            f"works in {size.workspace_bytes >> 20:,} MiB of the device, taken once"
        )
        yield "  CPU lanes decode " + (
            "when it does not keep up with the training"
            if self._spare
            else "only what it cannot: all cores are taken by the training process and those that stage"
        )
        for thread in threads:
            if thread.problem is None:
                yield from _about_lane(thread.device)
        if threads:
            yield f"  {self._sharing.mode} the training's steps: {self._sharing.reason}"


def _about_lane(device: Device) -> Iterator[str]:
    same = "equal a CPU lane's, bit for bit" if device.identical else "differ from a CPU lane's"
    yield f"  its images {same}, as a look at some when it opened showed"
    if device.decoder_bytes:
        yield f"  of its memory the decoder has taken {device.decoder_bytes >> 20:,} MiB for itself"
    if device.areas_given_back:
        yield f"  it gave back {device.areas_given_back} of its areas, as allocations on the device failed"


def _joined(graph: Graph, plan: Graph) -> Iterator[tuple[str, str]]:
    names = {operator.name for operator in graph.operators}
    for operator in plan.operators:
        if operator.name not in names:
            yield operator.name.replace("+", ", "), operator.name


class _Epoch(Iterator[dict[str, Any]]):
    """One pass; the loader keeps count, so that its state is right after every batch."""

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader = loader
        self._number = number
        self._left: int | None = None
        """Batches to come; None before the first was asked for."""
        self._asked_at: float | None = None

    def __next__(self) -> dict[str, Any]:
        loader = self._loader
        current = loader._pass == self._number
        if self._left == 0:
            if current:
                loader.set_epoch(loader._epoch + 1)
            raise StopIteration
        if not current:
            raise StateError(
                "this iterator ended before its epoch did: the loader was closed, or put to another epoch by iter(), "
                "set_epoch() or load_state_dict(). A loader is iterated once at a time"
            )
        try:
            arrival = self._next(loader._running())
        except StalledError:
            raise
        except BaseException:  # an interrupt may have left half a message behind
            loader._end()
            raise
        step = self._count(arrival.seq)
        if arrival.failure is not None:
            raise_failure(arrival.failure)
        batch: dict[str, Any] = empty_batch(loader._plan) if arrival.value is None else arrival.value
        return self._finished(loader, batch, step, arrival) if loader._tails else batch

    def _finished(self, loader: Loader, batch: dict[str, Any], step: Step, arrival: Arrival) -> dict[str, Any]:
        """What is behind the copy is applied on the stream of whoever asks."""
        tail, opened = loader._placing.tail, loader._tails[arrival.device]
        assert tail is not None
        positions = [step.first + row for row in range(step.rows) if row not in arrival.missing]
        return opened.apply(batch, tail.draw(loader.options.seed, loader._epoch, positions))

    def _next(self, feed: Feed) -> Arrival:
        if self._left is None:
            self._begin(feed)
        if isinstance(feed, ProcessFeed) and self._loader._placing.recipe is not None:
            self._share(feed)
        return feed.next(self._loader.options.timeout_s)

    def _share(self, feed: ProcessFeed) -> None:
        """A step of the training is over, as far as this process knows."""
        now, sharing = time.perf_counter(), self._loader._sharing
        if self._asked_at is not None:
            sharing.stepped(now - self._asked_at)
        self._asked_at = now
        feed.between = sharing.mode == "between"

    def _begin(self, feed: Feed) -> None:
        loader = self._loader
        self._skip = frozenset(loader._ahead)
        self._done = set(loader._ahead)
        self._upcoming = loader._order.steps(loader._consumed)
        self._steps: deque[Step] = deque()
        self._numbered: dict[int, Step] = {}
        self._next_seq = feed.begin(loader._epoch, loader._consumed, self._skip)
        self._left = loader._order.count(loader._consumed) - len(self._skip)
        loader._begun = True

    def _count(self, seq: int) -> Step:
        """The step of a batch. The consumed part of the epoch is contiguous; steps that were delivered ahead of it are
        kept apart."""
        loader = self._loader
        assert self._left is not None
        self._left -= 1
        while seq >= self._next_seq:
            step = next(self._upcoming)
            self._steps.append(step)
            if step.first not in self._skip:
                self._numbered[self._next_seq] = step
                self._next_seq += 1
        delivered = self._numbered.pop(seq)
        self._done.add(delivered.first)
        while self._steps and self._steps[0].first in self._done:
            step = self._steps.popleft()
            self._done.discard(step.first)
            loader._consumed = step.end
        loader._ahead = sorted(self._done)
        return delivered
