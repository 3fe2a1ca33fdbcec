"""Runs torch datasets in workers: map-style ones sample by sample, iterable ones as streams, batches of any kind.

A batch is pickled with its tensors and arrays left out of the stream: they lie in the batch's slot, where
collation puts stacked tensors in the first place.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing.spawn
import pickle
import random
import site
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, Subset, _utils

from penstock.batch import row_views
from penstock.layout import Column, Hole, lay_out, storable
from penstock.seeding import seed_all
from penstock.work import SMALL_BYTES, Failure, Memory, Request, Result, Work

__all__ = ["MapWork", "Seeding", "SpawnedWork", "StreamWork", "fetch_seeded", "sample_key"]

Seeding = Literal["sample", "torch"]

_ALIGN = 64


def sample_key(base_seed: int, position: int) -> int:
    """The key of what is at a position of the training: SplitMix64 of both, so that neighbours are unrelated."""
    x = (base_seed + position * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def fetch_seeded(dataset: Any, keys: Sequence[Any], base_seed: int, positions: Iterable[int]) -> list[Any]:
    """The samples, each with the generators seeded from its position."""
    samples = []
    for key, position in zip(keys, positions, strict=True):
        seed_all(sample_key(base_seed, position))
        samples.append(dataset[key])
    return samples


@dataclass
class _TorchWork(Work):
    """What all torch datasets share: the worker's identity, torch's seeds, the user's start function."""

    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    workers: int
    base_seed: int
    seeding: Seeding

    def open(self, worker: int) -> None:
        self._worker = worker
        self._seed(self.base_seed)
        info = _utils.worker.WorkerInfo(
            id=worker, num_workers=self.workers, seed=self.base_seed + worker, dataset=self.dataset
        )
        _utils.worker._worker_info = info
        self._arena = _Arena()
        self._start_failure: Failure | None = None
        """Why the user's start function failed: every batch of this worker says so, as torch's first batch does."""
        try:
            if self.worker_init_fn is not None:
                self.worker_init_fn(worker)
        except Exception:  # the border between the user's code and the lane
            self._start_failure = self._failure()

    def _seed(self, base_seed: int) -> None:
        """Torch's rule for the worker of this number."""
        random.seed(base_seed + self._worker)
        torch.manual_seed(base_seed + self._worker)
        np.random.seed(_utils.worker._generate_state(base_seed, self._worker))  # type: ignore[no-untyped-call]

    def run(self, request: Request, memory: Memory) -> Result:
        if self._start_failure is not None:
            return self._not_started(request)
        try:
            if request.crashed:
                return self._crashed(request)
            return self._run(request, memory)
        except Exception:  # the border between the user's code and the lane
            return Result(failure=self._failure(), failed_row=request.rows[0])
        finally:
            self._arena.leave()

    @abstractmethod
    def _run(self, request: Request, memory: Memory) -> Result:
        """As `run`; may raise."""

    def _not_started(self, request: Request) -> Result:
        return Result(failure=self._start_failure, failed_row=request.rows[0])

    def _crashed(self, request: Request) -> Result:
        raise RuntimeError(f"DataLoader worker died every time it prepared {self.describe(request)}")

    def _failure(self) -> Failure:
        wrapped: Any = ExceptionWrapper(where=f"in DataLoader worker process {self._worker}")  # type: ignore[no-untyped-call]
        try:
            pickle.dumps(wrapped.exc_type)
        except Exception:  # a local class, say: raise what torch raises where a class cannot be used
            wrapped.exc_msg = f"{wrapped.exc_type.__qualname__}, which cannot be pickled.\n{wrapped.exc_msg}"
            wrapped.exc_type = RuntimeError
        return Failure(pickle.dumps(wrapped), str(wrapped.exc_msg))

    def _whole(self, memory: Memory, make: Callable[[], Any]) -> Result:
        """A batch that `make` makes, stacked in its slot where it can be."""
        if self.collate_fn is torch.utils.data.default_collate:  # another might keep the tensors that it is given
            self._arena.enter(memory.slot)
        return encode(make(), memory, self._arena)


@dataclass
class MapWork(_TorchWork):
    """A map-style dataset. The payload of a batch is (position of its first sample, pickled keys)."""

    @property
    def cuttable(self) -> bool:
        """Parts of a batch may be prepared apart: collation is torch's, and samples are fetched one by one."""
        return (
            self.auto_collation
            and self.collate_fn is torch.utils.data.default_collate
            and not _fetches_batches(self.dataset)
        )

    def describe(self, request: Request) -> str:
        keys = pickle.loads(request.payload[1])
        if not self.auto_collation:
            return f"index {keys!r}"
        suspects = list(keys)
        suspects = suspects if request.whole else [suspects[row] for row in request.rows]
        return f"index {suspects[0]!r}" if len(suspects) == 1 else f"one of the indices {suspects!r}"

    def _run(self, request: Request, memory: Memory) -> Result:
        position, pickled = request.payload
        keys = pickle.loads(pickled)
        if request.whole:
            return self._whole(memory, lambda: self.collate_fn(self.fetch(keys, position)))
        keys = list(keys)
        samples = self._samples([keys[row] for row in request.rows], [position + row for row in request.rows])
        try:
            collated = self.collate_fn(samples)
        except Exception:  # for the batch as a whole it may go well, and if not it is for that to say why
            return Result(refused=True)
        return encode_rows(collated, request, memory)

    def fetch(self, keys: Any, position: int) -> Any:
        """A batch's samples, or the one item where batching is off."""
        if not self.auto_collation:
            return self._samples([keys], [position])[0]
        if _fetches_batches(self.dataset):
            if self.seeding == "sample":
                seed_all(sample_key(self.base_seed, position))
            return self.dataset.__getitems__(keys)
        return self._samples(keys, range(position, position + len(keys)))

    def _samples(self, keys: Sequence[Any], positions: Iterable[int]) -> list[Any]:
        if self.seeding == "torch":
            return [self.dataset[key] for key in keys]
        return fetch_seeded(self.dataset, keys, self.base_seed, positions)


@dataclass
class StreamWork(_TorchWork):
    """An iterable dataset: every worker iterates its own. The payload is (epoch, number in this worker, batch size,
    the seed that the workers of a datapipe share).

    A worker that replaces a lost one iterates again from the start and throws away what was handed out before. For that
    to be the same again, later epochs of persistent workers are seeded anew, unless torch's own numbers are asked for.
    """

    drop_last: bool

    def open(self, worker: int) -> None:
        super().open(worker)
        self._epoch, self._done, self._ended = -1, 0, False

    def _run(self, request: Request, memory: Memory) -> Result:
        epoch, number, size, shared_seed = request.payload
        wanted = [None] * size if self.auto_collation else None
        if self._epoch != epoch:
            self._begin(epoch, shared_seed)
        while self._done < number and not self._ended:
            with contextlib.suppress(Exception):  # it was told when this batch was handed out
                self._fetch(wanted)
        if not self._ended:
            with contextlib.suppress(StopIteration):
                return self._whole(memory, lambda: self._fetch(wanted))
        self._ended = True
        return Result(ended=True)

    def _begin(self, epoch: int, shared_seed: int | None) -> None:
        self._epoch, self._done, self._ended = epoch, 0, True  # if what follows fails, there is nothing more to come
        if epoch and self.seeding == "sample":
            self._seed(sample_key(self.base_seed, epoch) >> 1)
        if isinstance(self.dataset, IterDataPipe):
            generator = torch.Generator().manual_seed(shared_seed or 0)
            torch.utils.data.graph_settings.apply_random_seed(self.dataset, generator)
        self._fetcher: Any = _utils.fetch._IterableDatasetFetcher(
            self.dataset, self.auto_collation, self.collate_fn, self.drop_last
        )
        self._ended = False

    def _fetch(self, wanted: list[None] | None) -> Any:
        try:
            return self._fetcher.fetch(wanted)
        except StopIteration:
            self._ended = True
            raise
        finally:
            self._done += 1

    def _not_started(self, request: Request) -> Result:
        told, self._epoch = self._epoch == request.payload[0], request.payload[0]
        return Result(ended=True) if told else super()._not_started(request)

    def _crashed(self, request: Request) -> Result:
        """No worker can get past it: what follows it is lost, as it is with torch."""
        self._epoch, self._done, self._ended = request.payload[0], 0, True
        return super()._crashed(request)

    def describe(self, request: Request) -> str:
        return f"batch {request.payload[1]} of worker {self._worker}'s iterable dataset"


@dataclass
class SpawnedWork(Work):
    """Work for a fresh interpreter: prepares that as multiprocessing's spawn does, then unpickles the real work."""

    preparation: dict[str, Any]
    work: bytes

    @classmethod
    def of(cls, work: Work) -> SpawnedWork:
        """Raises whatever pickling the user's dataset raises."""
        preparation = multiprocessing.spawn.get_preparation_data("penstock")
        preparation["authkey"] = bytes(preparation["authkey"])  # else it refuses to be pickled but by multiprocessing
        return cls(preparation, dumps(work))

    def load(self) -> Work:
        path = list(sys.path)
        site.main()
        sys.path[:] = path
        multiprocessing.spawn.prepare(self.preparation)
        work: Work = pickle.loads(self.work)
        return work

    def open(self, worker: int) -> None:
        raise AssertionError("the template loads the real work")

    def run(self, request: Request, memory: Memory) -> Result:
        raise AssertionError("the template loads the real work")


def _fetches_batches(dataset: Any) -> bool:
    """The dataset wants whole batches of keys. torch's Subset always takes them, and asks its own dataset."""
    if type(dataset) is Subset:
        return _fetches_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


class _Arena:
    """Stacks tensors where they will travel: in the slot of the batch that is being prepared, one behind the other."""

    def __init__(self) -> None:
        collates = _utils.collate.default_collate_fn_map
        self._original = collates[torch.Tensor]
        if self._original is _utils.collate.collate_tensor_fn:  # else the user's own
            collates[torch.Tensor] = self.collate
        self.leave()

    def enter(self, slot: memoryview | None) -> None:
        self._slot = slot
        self.used = 0
        self._start = np.frombuffer(slot, np.uint8).ctypes.data if slot is not None and len(slot) else 0

    def leave(self) -> None:
        self.enter(None)

    def collate(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """In the place of torch's function for tensors, which makes a file in /dev/shm for each."""
        first = batch[0]
        kind = first.dtype
        if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
            stacked: torch.Tensor = self._original(batch, collate_fn_map=collate_fn_map)
            return stacked
        if any(tensor.dtype is not kind or tensor.requires_grad for tensor in batch):
            return torch.stack(batch, 0)
        shape = len(batch), *first.shape
        view = self._take(len(batch) * first.numel() * first.element_size())
        out = torch.empty(shape, dtype=kind) if view is None else torch.frombuffer(view, dtype=kind).view(shape)
        return torch.stack(batch, 0, out=out)  # in torch's workers, too, the result is contiguous, whatever its parts

    def _take(self, nbytes: int) -> memoryview | None:
        start = self.used
        if self._slot is None or not SMALL_BYTES < nbytes <= len(self._slot) - start:
            return None
        self.used = start + -(-nbytes // _ALIGN) * _ALIGN
        return self._slot[start : start + nbytes]

    def offset(self, raw: memoryview) -> int | None:
        """Where in the slot this memory is, if it is."""
        if not self._start or not len(raw):
            return None
        offset = int(np.frombuffer(raw, np.uint8).ctypes.data - self._start)
        return offset if 0 <= offset < self.used else None


class _Pickler(pickle.Pickler):
    """Leaves the memory of tensors out of the stream, as pickle itself does for numpy arrays."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray and not value.flags.writeable and value.size:
            return value.copy("K").__reduce_ex__(5)  # arrays come out of a DataLoader writable
        if issubclass(kind, torch.Tensor) and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__:
            return self._subclass(value)
        return NotImplemented

    def _subclass(self, value: torch.Tensor) -> Any:
        if value.requires_grad or hasattr(type(value), "__slots__"):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return _rebuild_subclass, (value.as_subclass(torch.Tensor), type(value), value.__dict__)

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        dtype = str(value.dtype).removeprefix("torch.")
        if not storable(dtype) or value.is_conj() or value.is_neg() or (value.requires_grad and not value.is_leaf):
            return NotImplemented
        if value.numel() == 0:
            return _rebuild_empty, (dtype, tuple(value.shape), value.requires_grad)
        plain = value.detach()
        stride = None if plain.is_contiguous() else plain.stride()
        if stride is not None:
            extent = 1 + sum((size - 1) * step for size, step in zip(plain.shape, stride, strict=True))
            if extent > plain.numel():
                plain, stride = plain.contiguous(), None
            else:
                plain = plain.as_strided((extent,), (1,))
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
        return _rebuild, (pickle.PickleBuffer(data), dtype, tuple(value.shape), stride, value.requires_grad)


def _rebuild(
    buffer: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(buffer, dtype=getattr(torch, dtype))
    tensor = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_subclass(plain: torch.Tensor, kind: type[torch.Tensor], state: dict[str, Any]) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        value = plain.as_subclass(kind)
    value.__dict__.update(state)
    return value


def _rebuild_empty(dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), requires_grad=requires_grad)


def dumps(value: Any) -> bytes:
    """As `pickle.dumps`, which takes 100 microseconds for a tensor."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class _Nested:
    """Unpickles to what is pickled in a buffer, which has further buffers."""

    def __init__(self, stream: bytes, buffers: list[pickle.PickleBuffer]) -> None:
        self._parts = (pickle.PickleBuffer(stream), *buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loads_nested, self._parts


def _loads_nested(stream: Any, *buffers: Any) -> Any:
    return pickle.loads(stream, buffers=buffers)


def encode(value: Any, memory: Memory, arena: _Arena) -> Result:
    """A batch of any kind: pickled, with its large parts in memory."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    tree = stream.getvalue()
    if len(tree) > SMALL_BYTES:  # strings, pictures, objects: too much for a message
        nested = _Nested(tree, buffers)
        buffers = []
        tree = pickle.dumps(nested, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    total = sum(len(raw) for raw in raws)
    if total <= SMALL_BYTES:
        return Result(tree=tree, inline=tuple(map(bytes, raws)), nbytes=total)
    placed = [arena.offset(raw) for raw in raws]
    spans = []
    end = arena.used
    for raw, offset in zip(raws, placed, strict=True):
        spans.append((end if offset is None else offset, len(raw)))
        end += -(-len(raw) // _ALIGN) * _ALIGN if offset is None else 0
    target = memory.reserve(end, whole=True)
    assert target is not None
    in_slot = memory.slot is not None and end <= len(memory.slot)
    for raw, offset, (start, size) in zip(raws, placed, spans, strict=True):
        if offset is None or not in_slot:
            target[start : start + size] = raw
    return Result(tree=tree, spans=tuple(spans), nbytes=end)


def encode_rows(value: Any, request: Request, memory: Memory) -> Result:
    """A part of a batch, collated by torch: its tensors become rows. Refused where it has anything but tensors."""
    tensors: list[torch.Tensor] = []
    tree = _with_holes(value, len(request.rows), tensors)
    if tree is None:
        return Result(refused=True)
    columns = [Column(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    layout = lay_out(tree, columns, request.total)
    buffer = memory.reserve(layout.nbytes, whole=False)
    if buffer is None:
        return Result(refused=True, nbytes=layout.nbytes)
    rows = list(request.rows)
    for view, tensor in zip(row_views(layout, buffer), tensors, strict=True):
        plain = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        view[rows] = plain.numpy()
    return Result(layout=layout.packed, nbytes=layout.nbytes)


def _with_holes(value: Any, rows: int, tensors: list[torch.Tensor]) -> Any:
    """The tree with holes for its tensors; None where it has other leaves, or containers of the user's."""
    if type(value) is torch.Tensor:
        plain = value.layout is torch.strided and not value.requires_grad and value.device.type == "cpu"
        if not plain or value.dim() == 0 or len(value) != rows or not storable(str(value.dtype)[6:]):
            return None
        tensors.append(value.contiguous())
        return Hole(len(tensors) - 1)
    if type(value) is dict:
        items = {key: _with_holes(item, rows, tensors) for key, item in value.items()}
        return None if None in items.values() else items
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [_with_holes(item, rows, tensors) for item in value]
        if any(part is None for part in parts):
            return None
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return None
