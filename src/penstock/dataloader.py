"""torch.utils.data.DataLoader's arguments and behaviour on Penstock's workers: change one name.

Samplers, batch samplers, `generator` and the checks of arguments are torch's own, run in the training process, so the
order of indices is torch's. Fetching and collation happen in workers that are replaced when they die. Samples of
map-style datasets find `random`, numpy and torch seeded from their position, so that what they draw does not depend on
the number of workers; `seeding="torch"` gives torch's rule instead.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe, _utils
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)

from penstock.coordinator import Config
from penstock.errors import OptionError, StalledError
from penstock.feed import Arrival, ProcessFeed, raise_failure
from penstock.lowering import lowered
from penstock.options import available_memory_bytes
from penstock.seeding import preserved
from penstock.torchwork import MapWork, Seeding, SpawnedWork, StreamWork, dumps
from penstock.work import Work

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)

_RESERVE = 3
_MANY = 64
_LIGHT_S = 0.001
"""Where batches come faster than this, many are asked for ahead, unless `prefetch_factor` was given."""


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """`torch.utils.data.DataLoader`, run by Penstock.

    `seeding`: "sample" seeds the generators for every sample of a map-style dataset from its position; "torch" seeds
    each worker once, and hands batches to workers in turn, as torch does. `lower=True` replaces a dataset that Penstock
    understands by native operators (see `lower`); `explain()` says what became of it. `memory_bytes` bounds the memory
    of batches that are prepared ahead.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[_T_co],
        *args: Any,
        seeding: Seeding = "sample",
        lower: bool = False,
        memory_bytes: int | None = None,
        metrics_port: int | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> None:
        if seeding not in ("sample", "torch"):
            raise OptionError(f"seeding must be 'sample' or 'torch', not {seeding!r}")
        self.seeding = seeding
        self.lower = lower
        self.memory_bytes = memory_bytes
        self.metrics_port = metrics_port
        self.name = name
        self._lowering = lowered(dataset) if lower else None
        self._prefetch_given = kwargs.get("prefetch_factor") is not None
        super().__init__(self._lowering.dataset if self._lowering else dataset, *args, **kwargs)

    def _get_iterator(self) -> Any:
        mapped = self._dataset_kind == torch.utils.data._DatasetKind.Map
        if self.num_workers == 0:
            return _Inline(self) if mapped and self.seeding == "sample" else _SingleProcessDataLoaderIter(self)
        self.check_worker_number_rationality()
        return _Mapped(self) if mapped else _Streamed(self)

    def stats(self) -> dict[str, Any]:
        """The counters of the iterator that persistent workers serve."""
        if not isinstance(self._iterator, _Workers):
            raise OptionError("counters live with the workers: use persistent_workers=True, or the iterator's stats()")
        return self._iterator.stats()

    def explain(self) -> str:
        """What was decided, and why."""
        lines = list(self._lowering.explanation) if self._lowering else ["the dataset runs as it is; lower=False"]
        if self.num_workers == 0:
            lines.append("samples are fetched in the training process")
        else:
            how = "a fresh interpreter" if _spawns(self) else "this process, whose memory they share"
            lines.append(f"workers: {self.num_workers}, forked from {how}")
        if self._dataset_kind == torch.utils.data._DatasetKind.Iterable:
            lines.append("every worker iterates the dataset; it is for the dataset to share itself out, as with torch")
        elif self.seeding == "sample":
            lines.append("generators are seeded for every sample from its position")
        else:
            lines.append("generators are seeded once in every worker, and batches go to workers in turn, as with torch")
        return "\n".join(lines)


def _spawns(loader: DataLoader[Any]) -> bool:
    context = loader.multiprocessing_context or multiprocessing
    return bool(context.get_start_method() != "fork")


def _row_count(iterator: _BaseDataLoaderIter, indices: Any) -> int:
    """An empty batch has a row too: what comes of it is for the dataset and the collation to say."""
    return max(1, len(indices)) if iterator._auto_collation else 1


def _map_work(loader: DataLoader[Any], base_seed: int, start: Any) -> MapWork:
    return MapWork(
        loader.dataset,
        loader._auto_collation,
        loader.collate_fn,
        start,
        loader.num_workers,
        base_seed,
        loader.seeding,
    )


class _Inline(_SingleProcessDataLoaderIter):
    """Without workers, but with the seeds that samples find in workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._work = _map_work(loader, int(self._base_seed), None)
        self._position = 0

    def _next_data(self) -> Any:
        indices = self._next_index()  # type: ignore[no-untyped-call]
        position = self._position
        self._position += _row_count(self, indices)
        with preserved():
            data = self._collate_fn(self._work.fetch(indices, position))
        if self._pin_memory:
            data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data


class _Turns:
    """Which worker the next batch goes to where that matters: each in turn, as with torch."""

    def __init__(self, workers: int, in_order: bool) -> None:
        self._in_order = in_order
        self._active = [True] * workers
        self._asked = [0] * workers
        self._next = 0

    def take(self, window: int) -> int | None:
        """Passes over workers that have come to their end and, where order does not matter, those that lag behind."""
        workers = len(self._active)
        share = -(-window // max(1, sum(self._active)))
        for lane in [(self._next + i) % workers for i in range(workers)]:
            if self._active[lane] and (self._in_order or self._asked[lane] < share):
                self._next = (lane + 1) % workers
                self._asked[lane] += 1
                return lane
        return None

    def arrived(self, lane: int, ended: bool) -> None:
        self._asked[lane] -= 1
        if ended:
            self._active[lane] = False


class _Workers(_BaseDataLoaderIter):
    """What map-style and iterable datasets share: a feed, batches asked for ahead, persistent workers.

    It does not hold the loader, which holds it: workers end when the loader goes.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        if not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._in_order = loader.in_order
        self._ahead = loader.num_workers * loader.prefetch_factor
        self._adapts = not loader._prefetch_given
        self._epoch = 0
        self._start_epoch()
        start = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            start = functools.partial(_sharding_worker_init_fn, start, self._world_size, self._rank)
        self._feed = _start(loader, self._work(loader, start), pinned=self._pinned)
        self._seed_shared = self._shared_seed
        super()._reset(loader, first_iter=True)  # torch, too, draws and asks the sampler for an iterator once more
        self._ask()

    _pinned: bool
    """Batches belong to workers."""

    def _work(self, loader: DataLoader[Any], start: Any) -> Work:
        raise NotImplementedError

    def _payload(self, indices: Any, lane: int | None) -> Any:
        """What is sent of a batch."""
        raise NotImplementedError

    def _start_epoch(self) -> None:
        self._window = self._ahead
        self._outstanding = 0
        self._arrived_at = 0.0
        self._lane_of: dict[int, int | None] = {}
        self._turns = _Turns(self._num_workers, self._in_order)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._seed_shared = self._shared_seed
        self._epoch += 1
        self._start_epoch()
        self._feed.begin(0, 0, frozenset())
        self._ask()

    def stats(self) -> dict[str, Any]:
        """The counters of the workers."""
        return self._feed.stats()

    def _ask(self) -> None:
        """Fill the window."""
        batches: list[tuple[int, Any, int | None]] = []
        try:
            while self._outstanding + len(batches) < self._window:
                lane = self._turns.take(self._window) if self._pinned else None
                if self._pinned and lane is None:
                    break
                indices = self._next_index()  # type: ignore[no-untyped-call]
                batches.append((_row_count(self, indices), self._payload(indices, lane), lane))
        except StopIteration:
            pass
        finally:  # what a sampler gave before it failed is not lost
            if batches:
                first = self._feed.submit(batches)
                self._outstanding += len(batches)
                self._lane_of.update((first + i, lane) for i, (_, _, lane) in enumerate(batches))

    def _next_data(self) -> Any:
        while self._outstanding:
            arrival = self._take()
            self._ask()
            if arrival.failure is not None:
                raise_failure(arrival.failure)
            if arrival.ended:
                continue
            if self._pin_memory:
                return _utils.pin_memory.pin_memory(arrival.value, self._pin_memory_device)  # type: ignore[no-untyped-call]
            return arrival.value
        if not self._persistent_workers:
            self._feed.close()
        raise StopIteration

    def _take(self) -> Arrival:
        try:
            arrival = self._feed.next(self._timeout or None)
        except StalledError as error:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds. {error}") from error
        self._outstanding -= 1
        lane = self._lane_of.pop(arrival.seq)
        if lane is not None:
            self._turns.arrived(lane, arrival.ended)
        self._adapt()
        return arrival

    def _adapt(self) -> None:
        """Ask for more ahead where batches are light."""
        now = time.perf_counter()
        if self._adapts and self._window < _MANY and self._feed.small and now - self._arrived_at < _LIGHT_S:
            self._window = min(_MANY, 2 * self._window)
        self._arrived_at = now


class _Mapped(_Workers):
    """Batches of a map-style dataset."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._pinned = loader.seeding == "torch"
        super().__init__(loader)

    def _work(self, loader: DataLoader[Any], start: Any) -> Work:
        return _map_work(loader, int(self._base_seed), start)

    def _start_epoch(self) -> None:
        super()._start_epoch()
        self._position = self._epoch << 40  # whatever was asked for ahead in the epoch before, and never taken

    def _payload(self, indices: Any, lane: int | None) -> Any:
        position = self._position
        self._position += _row_count(self, indices)
        return position, dumps(indices)


class _Streamed(_Workers):
    """Batches of an iterable dataset: from each worker in turn, until all have come to their end."""

    _pinned = True

    def _work(self, loader: DataLoader[Any], start: Any) -> Work:
        return StreamWork(
            self._dataset,
            loader._auto_collation,
            loader.collate_fn,
            start,
            loader.num_workers,
            int(self._base_seed),
            loader.seeding,
            loader.drop_last,
        )

    def _start_epoch(self) -> None:
        super()._start_epoch()
        self._numbers = [0] * self._num_workers

    def _payload(self, indices: Any, lane: int | None) -> Any:
        assert lane is not None
        number = self._numbers[lane]
        self._numbers[lane] += 1
        return self._epoch, number, _row_count(self, indices), self._seed_shared


def _start(loader: DataLoader[Any], work: Work, pinned: bool) -> ProcessFeed:
    cuttable = isinstance(work, MapWork) and work.cuttable and not pinned
    window = loader.num_workers * max(1, loader.prefetch_factor or 1)
    config = Config(
        name=loader.name or type(loader.dataset).__name__,
        parent=os.getpid(),
        workers=loader.num_workers,
        work=dumps(SpawnedWork.of(work)) if _spawns(loader) else None,
        sys_path=tuple(sys.path),
        order=None,
        seed=0,
        shuffle=False,
        sizes=0,
        delivery="plan" if loader.in_order else "ready",
        cut="known" if cuttable else "never",
        window=window if loader._prefetch_given else None,
        reserve=_RESERVE,
        memory_bytes=loader.memory_bytes or min(2 << 30, available_memory_bytes() // 4),
        batch_bytes=0,
        metrics_port=loader.metrics_port,
    )
    return ProcessFeed(config, work, None)
