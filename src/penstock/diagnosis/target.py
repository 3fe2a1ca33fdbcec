"""The loader that is diagnosed, behind one interface: its batches as the script gets them, chosen batches over and
over, its samples one by one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

import penstock.dataloader
from penstock.batch import Collator
from penstock.diagnosis.children import Task
from penstock.graph import Graph, Reader, Sample
from penstock.kernels import native
from penstock.loader import Loader
from penstock.pipe import Pipe
from penstock.read import Dataset
from penstock.work import Memory, Request

__all__ = ["Batches", "Target", "target_of"]

Batches = Iterator[Any]
_OriginalIter = Callable[[Any], Batches]


class Target(ABC):
    """A loader that can be diagnosed."""

    name: str
    """Kind and data set, for people."""
    workers: int
    batch_samples: int
    dataset_samples: int | None
    prefetch_batches: int
    overlapped: bool = False
    fetches_apart: bool
    """Samples can be fetched without being prepared."""
    stream: bool = False
    """Samples come in turn and have no ids."""

    @abstractmethod
    def own(self) -> Batches:
        """The next epoch, as the script gets it."""

    @abstractmethod
    def choose(self, batches: int) -> None:
        """Choose what `chosen` yields: so many batches, if an epoch has as many."""

    @abstractmethod
    def chosen(self, workers: int | None = None) -> contextlib.AbstractContextManager[Batches]:
        """The chosen batches over and over, from so many workers (the loader's own number)."""

    @abstractmethod
    def ids(self, most: int) -> list[int]:
        """Samples to look at: in no order, none twice."""

    @abstractmethod
    def fetcher(self) -> Callable[[int], object]:
        """In a child: what fetches a sample by its id, and prepares it where that cannot be had apart."""

    @abstractmethod
    def task(self) -> Task[int]:
        """In a child, where samples are fetched apart: what fetches a sample and says how many bytes it got."""

    @abstractmethod
    def dataset_bytes(self, sample_bytes: float | None) -> float | None:
        """Of all samples, counted where that is known, else from the mean."""

    @abstractmethod
    def parts(self) -> Parts | None:
        """How a sample is prepared, part by part; None where it cannot be told."""


class Parts(ABC):
    """A sample's preparation, in a child."""

    @abstractmethod
    def prepare(self, ids: Sequence[int], timed: Timed) -> None:
        """Prepare a batch of these, each part under its name."""


Timed = Callable[[str], contextlib.AbstractContextManager[None]]


def target_of(loader: object, original: _OriginalIter | None = None) -> Target | None:
    """The loader as a target; None for what is no loader. `original` iterates it where `__iter__` is replaced."""
    if isinstance(loader, Loader):
        return _PenstockTarget(loader, original or Loader.__iter__)
    if isinstance(loader, torch.utils.data.DataLoader):
        return _TorchTarget(loader, original or torch.utils.data.DataLoader.__iter__)
    return None


class _Repeated:
    """A sampler of the same indices over and over."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._indices)


class _TorchTarget(Target):
    def __init__(self, loader: torch.utils.data.DataLoader[Any], original: _OriginalIter) -> None:
        self._loader = loader
        self._original = original
        self.stream = loader._dataset_kind == torch.utils.data._DatasetKind.Iterable
        self._indices: list[Any] = []
        self.name = f"{_kind(loader)} over {type(loader.dataset).__name__}"
        self.workers = loader.num_workers
        self.batch_samples = loader.batch_size or 1
        self.dataset_samples = self._samples()
        self.prefetch_batches = self.workers * (loader.prefetch_factor or 0)
        self.fetches_apart = callable(getattr(loader.dataset, "fetch", None))

    def own(self) -> Batches:
        return iter(self._original(self._loader))

    def choose(self, batches: int) -> None:
        if self.stream:
            return
        self._indices = list(itertools.islice(iter(self._loader._index_sampler), batches))
        if self._loader.batch_sampler is not None and self._indices:
            self.batch_samples = max(map(len, self._indices))  # the last of an epoch may be smaller

    @contextlib.contextmanager
    def chosen(self, workers: int | None = None) -> Iterator[Batches]:
        batches = self._endless(self._copy(workers))
        try:
            yield batches
        finally:
            batches.close()  # the workers end with it

    def _endless(self, loader: Any) -> Generator[Any, None, None]:
        """A stream ends, and is begun again."""
        while True:
            yield from self._original(loader)

    def _copy(self, workers: int | None) -> Any:
        """The loader with another sampler and number of workers; torch does not let these be set."""
        loader = copy.copy(self._loader)
        state = loader.__dict__
        state.update(_iterator=None, persistent_workers=False)
        if not self.stream:
            state["sampler" if self._loader.batch_sampler is None else "batch_sampler"] = _Repeated(self._indices)
        if workers is not None and workers != self.workers:
            factor = self._loader.prefetch_factor or 2
            state.update(num_workers=workers, prefetch_factor=factor if workers else None)
            state.update(timeout=self._loader.timeout if workers else 0)
        return loader

    def ids(self, most: int) -> list[int]:
        if self.stream:
            return list(range(most))
        known = [index for indices in self._indices for index in (indices if _is_list(indices) else [indices])]
        distinct = list(dict.fromkeys(known))
        random.Random(0).shuffle(distinct)
        return distinct[:most]

    def fetcher(self) -> Callable[[int], object]:
        dataset: Any = self._loader.dataset
        if self.stream:
            stream = iter(dataset)
            return lambda id: next(stream)
        fetch: Callable[[int], object] = dataset.fetch if self.fetches_apart else dataset.__getitem__
        return fetch

    def task(self) -> Task[int]:
        fetch = self._loader.dataset.fetch  # type: ignore[attr-defined]
        return lambda id: _nbytes(fetch(id))

    def dataset_bytes(self, sample_bytes: float | None) -> float | None:
        known = sample_bytes is not None and self.dataset_samples is not None
        return sample_bytes * self.dataset_samples if known else None  # type: ignore[operator]

    def parts(self) -> Parts | None:
        return None if self.stream else _TorchParts(self._loader, self.fetches_apart)

    def _samples(self) -> int | None:
        """Of an epoch over all ranks."""
        loader = self._loader
        try:
            if self.stream:
                return len(loader.dataset)  # type: ignore[arg-type]
            sampler: Any = loader.sampler if loader.batch_size is not None else loader._index_sampler
            if isinstance(sampler, DistributedSampler):
                return len(sampler.dataset)  # type: ignore[arg-type]
            return len(sampler) if loader.batch_size is not None else len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None


class _TorchParts(Parts):
    """A data set's own transforms, one by one, where it has a list of them; the rest of it is reading and decoding."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any], fetches: bool) -> None:
        self._dataset: Any = loader.dataset
        self._collate = loader.collate_fn if loader.batch_sampler is not None else None
        self._fetches = fetches

    def prepare(self, ids: Sequence[int], timed: Timed) -> None:
        with _timed_transforms(self._dataset, timed):
            samples = []
            for id in ids:
                with timed("the data set itself: reading, decoding"):
                    samples.append(self._dataset[id])
            if self._collate is not None:
                with timed("collate"):
                    self._collate(samples)


@contextlib.contextmanager
def _timed_transforms(dataset: Any, timed: Timed) -> Iterator[None]:
    """In a child, for good: nothing of it is put back."""
    while dataset is not None:
        for name in ("transform", "transforms", "target_transform"):
            transform = getattr(dataset, name, None)
            chain = getattr(transform, "transforms", None)
            if isinstance(chain, list) and not any(isinstance(step, _TimedCall) for step in chain):
                transform.transforms = [_TimedCall(step, timed) for step in chain]  # type: ignore[union-attr]
            elif callable(transform) and not isinstance(transform, _TimedCall) and name != "transforms":
                with contextlib.suppress(AttributeError):
                    setattr(dataset, name, transform if chain is not None else _TimedCall(transform, timed))
        dataset = getattr(dataset, "dataset", None)
    yield


class _TimedCall:
    def __init__(self, call: Callable[..., Any], timed: Timed) -> None:
        self._call = call
        self._timed = timed
        self._name = getattr(call, "__name__", type(call).__name__)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with self._timed(self._name):
            return self._call(*arguments, **keywords)


class _PenstockTarget(Target):
    fetches_apart = True

    def __init__(self, loader: Loader, original: _OriginalIter) -> None:
        self._loader = loader
        self._original = original
        self._graph: Graph = loader._graph
        self._chosen = 0
        assert self._graph.batch is not None
        source = self._graph.source
        self.name = f"penstock.Loader over {type(source).__name__.lower()}"
        self.workers = loader.options.worker_count
        self.batch_samples = self._graph.batch.size
        self.dataset_samples = len(source)
        self.prefetch_batches = 2 * self.workers if loader.options.prefetch == "auto" else loader.options.prefetch
        self.fetches_apart = not isinstance(source, Dataset) or hasattr(source.dataset, "fetch")

    def own(self) -> Batches:
        return iter(self._original(self._loader))

    def choose(self, batches: int) -> None:
        self._chosen = min(batches, len(self._loader))

    @contextlib.contextmanager
    def chosen(self, workers: int | None = None) -> Iterator[Batches]:
        loader = self._loader
        if workers is not None and workers != self.workers:
            options = dataclasses.asdict(dataclasses.replace(loader.options, workers=workers, metrics_port=None))
            with Loader(Pipe(self._graph), **options) as other:
                yield self._repeated(other)
            return
        epoch = loader._epoch
        try:
            yield self._repeated(loader)
        finally:
            loader.set_epoch(epoch)

    def _repeated(self, loader: Loader) -> Batches:
        """The first batches of one epoch, again and again."""
        epoch = loader._epoch
        while True:
            loader.set_epoch(epoch)
            yield from itertools.islice(self._original(loader), self._chosen)

    def ids(self, most: int) -> list[int]:
        count = min(len(self._graph.source), self._chosen * self.batch_samples)
        option = self._loader.options
        first = range(count)
        order = native.order(option.seed, self._loader._epoch, len(self._graph.source), list(first))
        ids = list(order) if option.shuffle else list(first)
        random.Random(0).shuffle(ids)
        return ids[:most]

    def fetcher(self) -> Callable[[int], object]:
        source = self._graph.source
        if isinstance(source, Dataset) and hasattr(source.dataset, "fetch"):
            fetch: Callable[[int], object] = source.dataset.fetch
            return fetch
        return source.open().read

    def task(self) -> Task[int]:
        fetch = self.fetcher()
        return lambda id: _nbytes(fetch(id))

    def dataset_bytes(self, sample_bytes: float | None) -> float | None:
        sizes = self._graph.source.sizes()
        if sizes is not None:
            return float(sum(sizes))
        return None if sample_bytes is None else sample_bytes * len(self._graph.source)

    def parts(self) -> Parts | None:
        return _PenstockParts(self._loader)


class _PenstockParts(Parts):
    def __init__(self, loader: Loader) -> None:
        self._plan = loader._plan
        self._seed = loader.options.seed
        self._reader: Reader | None = None
        self._collator = Collator(self._plan)

    def prepare(self, ids: Sequence[int], timed: Timed) -> None:
        if self._reader is None:
            self._reader = self._plan.source.open()
        draws = native.units(self._seed, 0, 0, list(range(len(ids))), self._plan.units)
        samples: list[Sample] = []
        for id, units in zip(ids, draws, strict=True):
            with timed("read"):
                sample = {**self._reader.read(id), "id": id}
            samples.append(self._applied(sample, units, timed))
        rows = list(range(len(samples)))
        with timed("batch"):
            self._collator.store(samples, rows, Request(0, tuple(rows), len(rows), True, False, None), _Heap())

    def _applied(self, sample: Sample, units: Sequence[float], timed: Timed) -> Sample:
        start = 0
        for operator in self._plan.operators:
            with timed(operator.name):
                sample = operator.apply(sample, units[start : start + operator.units])
            start += operator.units
        return sample


class _Heap(Memory):
    def reserve(self, nbytes: int, whole: bool) -> memoryview:
        return memoryview(bytearray(nbytes))


def _kind(loader: object) -> str:
    if isinstance(loader, penstock.dataloader.DataLoader):
        return "penstock.DataLoader"
    return f"{type(loader).__module__.removesuffix('.dataloader')}.{type(loader).__name__}"


def _is_list(indices: object) -> bool:
    return isinstance(indices, Sequence) and not isinstance(indices, str | bytes)


def _nbytes(value: Any) -> int:
    """Of what a fetch gave: bytes, arrays, and collections of them."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value) if not isinstance(value, memoryview) else value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))
