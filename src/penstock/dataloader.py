"""torch.utils.data.DataLoader's arguments and behaviour on Penstock's workers: change one name.

Samplers, batch samplers, `generator` and the checks of arguments are torch's own, run in the training process, so the
order of indices is torch's. Fetching and collation happen in workers that are replaced when they die. Samples of
map-style datasets find `random`, numpy and torch seeded from their position, so that what they draw does not depend on
the number of workers; `seeding="torch"` gives torch's rule instead.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from itertools import cycle
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from penstock.coordinator import Config
from penstock.errors import OptionError, StalledError
from penstock.feed import ProcessFeed, raise_failure
from penstock.lower import lowered
from penstock.options import available_memory_bytes
from penstock.seeding import preserved
from penstock.torchwork import MapWork, Seeding, SpawnedWork, StreamWork
from penstock.work import Work

__all__ = ["DataLoader"]

_RESERVE = 3
_MANY = 64
_LIGHT_S = 0.001
"""Where batches come faster than this, many are asked for ahead, unless `prefetch_factor` was given."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """`torch.utils.data.DataLoader`, run by Penstock.

    `seeding`: "sample" seeds the generators for every sample of a map-style dataset from its position; "torch" seeds
    each worker once, and hands batches to workers in turn, as torch does. `lower=True` replaces a dataset that Penstock
    understands by native operators (see `lower`); `explain()` says what became of it. `memory_bytes` bounds the memory
    of batches that are prepared ahead.
    """

    def __init__(
        self,
        dataset: Any,
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


def _spawns(loader: DataLoader) -> bool:
    context = loader.multiprocessing_context
    return context is not None and context.get_start_method() != "fork"


def _row_count(loader: DataLoader, indices: Any) -> int:
    return len(indices) if loader._auto_collation else 1


class _Inline(_SingleProcessDataLoaderIter):
    """Without workers, but with the seeds that samples find in workers."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self._loader = loader
        self._position = 0

    def _next_data(self) -> Any:
        indices = self._next_index()  # type: ignore[no-untyped-call]
        position, count = self._position, _row_count(self._loader, indices)
        self._position += count
        with preserved():
            data = self._loader.collate_fn(_map_work(self._loader, int(self._base_seed)).fetch(indices, position))
        if self._pin_memory:
            data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data


def _map_work(loader: DataLoader, base_seed: int) -> MapWork:
    return MapWork(
        loader.dataset,
        loader._auto_collation,
        loader.collate_fn,
        loader.worker_init_fn,
        loader.num_workers,
        base_seed,
        loader.seeding,
    )


class _Workers(_BaseDataLoaderIter):
    """What map-style and iterable datasets share: a feed, batches asked for ahead, persistent workers."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self._loader = loader
        self._window = loader.num_workers * max(1, loader.prefetch_factor or 1)
        self._adapts = not loader._prefetch_given
        self._outstanding = 0
        self._arrived_at = 0.0
        self._feed = _start(loader, self._work(), pinned=self._pins())
        self._lane_of: dict[int, int | None] = {}
        self._ask()

    def _work(self) -> Work:
        raise NotImplementedError

    def _pins(self) -> bool:
        """Batches belong to workers."""
        raise NotImplementedError

    def _next_batch(self) -> tuple[int, Any, int | None] | None:
        """Rows, payload and lane of one more batch to ask for; None when there is none."""
        raise NotImplementedError

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._feed.begin(0, 0, frozenset())
        self._lane_of.clear()
        self._outstanding = 0
        self._ask()

    def stats(self) -> dict[str, Any]:
        """The counters of the workers."""
        return self._feed.stats()

    def _ask(self) -> None:
        batches = []
        while self._outstanding < self._window and (batch := self._next_batch()) is not None:
            batches.append(batch)
            self._outstanding += 1
        if batches:
            first = self._feed.submit(batches)
            self._lane_of.update((first + i, lane) for i, (_, _, lane) in enumerate(batches))

    def _next_data(self) -> Any:
        while True:
            if not self._outstanding:
                if not self._persistent_workers:
                    self._feed.close()
                raise StopIteration
            timeout = self._timeout
            try:
                arrival = self._feed.next(timeout or None)
            except StalledError as error:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds. {error}") from error
            self._outstanding -= 1
            self._adapt()
            lane = self._lane_of.pop(arrival.seq)
            if arrival.ended:
                self._lane_ended(lane)
            self._ask()
            if arrival.failure is not None:
                raise_failure(arrival.failure)
            if arrival.ended:
                continue
            if self._pin_memory:
                return _utils.pin_memory.pin_memory(arrival.value, self._pin_memory_device)  # type: ignore[no-untyped-call]
            return arrival.value

    def _lane_ended(self, lane: int | None) -> None:
        """A worker's stream came to its end."""

    def _adapt(self) -> None:
        """Ask for more ahead where batches are light."""
        now = time.perf_counter()
        if self._adapts and self._window < _MANY and self._feed.small and now - self._arrived_at < _LIGHT_S:
            self._window = min(_MANY, 2 * self._window)
        self._arrived_at = now


class _Mapped(_Workers):
    """Batches of a map-style dataset."""

    def __init__(self, loader: DataLoader) -> None:
        self._position = 0
        self._turns = cycle(range(loader.num_workers))
        super().__init__(loader)

    def _work(self) -> Work:
        return _map_work(self._loader, int(self._base_seed))

    def _pins(self) -> bool:
        return self._loader.seeding == "torch"

    def _next_batch(self) -> tuple[int, Any, int | None] | None:
        try:
            indices = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return None
        position, rows = self._position, _row_count(self._loader, indices)
        self._position += rows
        lane = next(self._turns) if self._pins() else None
        return rows, (position, pickle.dumps(indices, protocol=5)), lane


class _Streamed(_Workers):
    """Batches of an iterable dataset: from each worker in turn, until all have come to their end."""

    def __init__(self, loader: DataLoader) -> None:
        self._epoch = -1
        self._begin(loader)
        super().__init__(loader)

    def _begin(self, loader: DataLoader) -> None:
        self._epoch += 1
        self._lanes = list(range(loader.num_workers))
        self._turn = 0
        self._asked = [0] * loader.num_workers

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._begin(loader)
        super()._reset(loader, first_iter)

    def _work(self) -> Work:
        loader = self._loader
        return StreamWork(
            self._dataset,
            loader._auto_collation,
            loader.collate_fn,
            loader.worker_init_fn,
            loader.num_workers,
            int(self._base_seed),
            loader.drop_last,
        )

    def _pins(self) -> bool:
        return True

    def _next_batch(self) -> tuple[int, Any, int | None] | None:
        if not self._lanes:
            return None
        indices = self._next_index()  # type: ignore[no-untyped-call]
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn = (self._turn + 1) % len(self._lanes)
        number = self._asked[lane]
        self._asked[lane] += 1
        rows = _row_count(self._loader, indices)
        return rows, (self._epoch, number, rows), lane

    def _lane_ended(self, lane: int | None) -> None:
        """The turn passes on to the worker after it."""
        if lane in self._lanes:
            index = self._lanes.index(lane)
            self._lanes.remove(lane)
            self._turn -= index < self._turn
            self._turn %= max(1, len(self._lanes))


def _start(loader: DataLoader, work: Work, pinned: bool) -> ProcessFeed:
    cuttable = isinstance(work, MapWork) and work.cuttable and not pinned
    window = loader.num_workers * max(1, loader.prefetch_factor or 1)
    config = Config(
        name=loader.name or type(loader.dataset).__name__,
        parent=os.getpid(),
        workers=loader.num_workers,
        work=pickle.dumps(SpawnedWork.of(work)) if _spawns(loader) else None,
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
