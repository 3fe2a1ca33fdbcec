"""Samples become a batch: their fields become columns in a slot, one row each.

Python and numpy numbers become int64, float64 or bool columns, arrays and tensors columns of their dtype, anything else
a list of objects. A numpy array in the field `image` is HWC and is shown as CHW; a torch tensor is taken as it is.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GraphError, SampleError
from penstock.graph import Field, Graph, Sample
from penstock.layout import Column, Hole, Layout, Loose, lay_out, storable
from penstock.work import Memory, Request, Result

__all__ = ["Collator", "fixed_layout", "row_views"]

_UNSIGNED = {"bfloat16": "uint16"}
"""dtypes that numpy lacks, and what stands in for them when bytes are copied."""


def fixed_layout(graph: Graph, rows: int) -> Layout | None:
    """The layout of a batch where the pipeline alone determines it, else None."""
    fields = dict(graph.spec)
    fields["id"] = Field("value", (), "int64")
    if not all(field.fixed and storable(field.dtype or "") for field in fields.values()):
        return None
    columns = [
        Column(tuple(map(int, field.shape or ())), str(field.dtype), image=field.kind == "image")  # type: ignore[arg-type]
        for field in fields.values()
    ]
    return lay_out({name: Hole(i) for i, name in enumerate(fields)}, columns, rows)


def row_views(layout: Layout, buffer: memoryview) -> list[NDArray[Any]]:
    """The columns as numpy arrays over a batch's memory."""
    views = []
    for column in layout.columns:
        shape = column.shape if column.single else (layout.rows, *column.shape)
        dtype = np.dtype(_UNSIGNED.get(column.dtype, column.dtype))
        views.append(np.frombuffer(buffer, dtype, math.prod(shape), column.offset).reshape(shape))
    return views


class Collator:
    """Writes samples into a batch's memory. Keeps the layouts it has met."""

    def __init__(self, graph: Graph) -> None:
        assert graph.batch is not None
        self._ragged = graph.batch.ragged
        image = graph.spec.get("image")
        self._images = image is None or image.kind in ("image", "any")
        """Pixels, unless the pipeline says that the field `image` holds something else."""
        self._fixed = {"id", *(name for name, field in graph.spec.items() if field.fixed)}
        self._known: dict[Any, Layout] = {}

    def store(
        self, samples: list[Sample], rows: list[int], request: Request, memory: Memory, skip: str | None = None
    ) -> Result:
        """Write samples to their rows, all fields but `skip`. Refuses when they do not fit a part of a batch."""
        missing = tuple(sorted(set(request.rows) - set(rows)))
        if not samples:
            return Result(missing=missing)
        items = [self._arrays(sample, samples[0]) for sample in samples]
        if self._ragged == "pad":
            items = self._padded(items)
        listed = self._listed(items[0]) if self._ragged == "list" else ()
        signatures = [_signature(item, listed) for item in items]
        if any(signature != signatures[0] for signature in signatures):
            if not request.whole:
                return Result(refused=True)
            raise _unequal(samples, signatures, self._ragged)
        layout = self._listing(items, listed, request.total) if listed else self._layout(signatures[0], request.total)
        buffer = memory.reserve(layout.nbytes, request.whole)
        if buffer is None:
            return Result(refused=True, nbytes=layout.nbytes)
        _write(layout, buffer, items, rows, listed, skip)
        names = [name for name, value in items[0].items() if isinstance(value, _Object)]
        loose = _loose(names, items, rows) if names else b""
        return Result(layout=layout.packed, loose=loose, nbytes=layout.nbytes, missing=missing)

    def _arrays(self, sample: Sample, first: Sample) -> dict[str, Any]:
        """The values as they are stored, in the first sample's order of fields where they are the same ones."""
        names = first if sample.keys() == first.keys() else sample
        return {name: _value(sample[name], name == "image" and self._images) for name in names}

    def _layout(self, signature: tuple[Any, ...], total: int) -> Layout:
        layout = self._known.get((signature, total))
        if layout is None:
            tree: dict[str, Any] = {}
            columns: list[Column] = []
            for name, *kind in signature:
                tree[name] = Hole(len(columns)) if kind else Loose(name)
                columns += [Column(kind[0], kind[1], image=kind[2])] if kind else []
            layout = self._known[signature, total] = lay_out(tree, columns, total)
            if len(self._known) > 64:
                self._known.pop(next(iter(self._known)))
        return layout

    def _listed(self, item: dict[str, Any]) -> tuple[str, ...]:
        return tuple(n for n, v in item.items() if n not in self._fixed and isinstance(v, _Array) and v.array.ndim > 0)

    def _listing(self, items: list[dict[str, Any]], listed: Sequence[str], total: int) -> Layout:
        tree: dict[str, Any] = {}
        columns: list[Column] = []
        for name, value in items[0].items():
            if isinstance(value, _Object):
                tree[name] = Loose(name)
                continue
            arrays = [item[name] for item in items] if name in listed else [value]
            holes = [Hole(len(columns) + i) for i in range(len(arrays))]
            tree[name] = holes if name in listed else holes[0]
            columns += [Column(a.array.shape, a.dtype, image=a.image, single=name in listed) for a in arrays]
        return lay_out(tree, columns, total)

    def _padded(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        padded = [dict(item) for item in items]
        for name in items[0]:
            values = [item.get(name) for item in items]
            arrays = [v.array for v in values if isinstance(v, _Array)]
            same_rank = len(arrays) == len(items) and len({array.ndim for array in arrays}) == 1
            if name in self._fixed or not same_rank or arrays[0].ndim == 0:
                continue
            shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
            for item, array in zip(padded, arrays, strict=True):
                full = np.zeros(shape, array.dtype)
                full[tuple(map(slice, array.shape))] = array
                item[name] = _Array(full, item[name].dtype, item[name].image)
                item[f"{name}_shape"] = _Array(np.asarray(array.shape, np.int64), "int64", False)
        return padded


class _Array:
    """A value that becomes rows of a column."""

    __slots__ = ("array", "dtype", "image")

    def __init__(self, array: NDArray[Any], dtype: str, image: bool) -> None:
        self.array = array
        self.dtype = dtype
        self.image = image


class _Object:
    """A value that travels pickled."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_INT = np.dtype(np.int64)
_FLOAT = np.dtype(np.float64)


def _value(value: Any, image: bool) -> _Array | _Object:
    if type(value) is int:
        return _Array(np.array(value, _INT), "int64", False) if -(2**63) <= value < 2**63 else _Object(value)
    if isinstance(value, np.ndarray | np.generic):
        dtype = value.dtype.name
        array = np.asarray(value)
        return _Array(array, dtype, image and array.ndim == 3) if storable(dtype) else _Object(value)
    if isinstance(value, bool):
        return _Array(np.array(value), "bool", False)
    if isinstance(value, float):
        return _Array(np.array(value, _FLOAT), "float64", False)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor(torch, value)
    return _Object(value)


def _tensor(torch: Any, value: Any) -> _Array | _Object:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or value.device.type != "cpu" or not storable(dtype):
        return _Object(value)
    plain = value.detach().resolve_conj().resolve_neg()
    if dtype in _UNSIGNED:
        plain = plain.contiguous().view(torch.uint16)
    return _Array(plain.numpy(), dtype, False)


def _signature(item: dict[str, Any], listed: Sequence[str]) -> tuple[Any, ...]:
    """What must be equal for samples to be stacked; of listed fields, that they are arrays at all."""
    return tuple(
        (name,)
        if not isinstance(v, _Array)
        else (name, None, None, None)
        if name in listed and v.array.ndim > 0
        else (name, v.array.shape, v.dtype, v.image)
        for name, v in item.items()
    )


def _loose(names: Sequence[str], items: list[dict[str, Any]], rows: list[int]) -> bytes:
    try:
        return pickle.dumps((rows, {name: [item[name].value for item in items] for name in names}))
    except Exception as error:  # what a user's object does when pickled is anyone's guess
        kinds = ", ".join(f"{name!r} ({type(items[0][name].value).__name__})" for name in names)
        raise GraphError(
            f"the objects in {kinds} must be pickled on their way from the workers, and cannot be: {error}; "
            "have a map return arrays, numbers or plain objects instead"
        ) from error


def _write(
    layout: Layout,
    buffer: memoryview,
    items: list[dict[str, Any]],
    rows: list[int],
    listed: Sequence[str],
    skip: str | None,
) -> None:
    views = iter(row_views(layout, buffer))
    for name, first in items[0].items():
        if isinstance(first, _Object):
            continue
        if name in listed:
            for item in items:
                next(views)[...] = item[name].array
            continue
        view = next(views)
        for item, row in zip(items, rows, strict=True) if name != skip else ():
            view[row] = item[name].array


def _unequal(samples: list[Sample], signatures: list[tuple[Any, ...]], ragged: str) -> Exception:
    """What to say of samples that cannot be stacked."""
    other = next(i for i, signature in enumerate(signatures) if signature != signatures[0])
    first, second = ({name: kind for name, *kind in signatures[i]} for i in (0, other))
    ids = samples[0]["id"], samples[other]["id"]
    if first.keys() != second.keys():
        odd = ", ".join(sorted(first.keys() ^ second.keys()))
        return GraphError(f"samples {ids[0]} and {ids[1]} differ in their fields ({odd}); every sample needs the same")
    name = next(name for name in first if first[name] != second[name])
    return SampleError(
        f"field {name!r} is {_shown(second[name])} but {_shown(first[name])} in sample {ids[0]} of the same batch; "
        f"{_remedy(first[name], second[name], ragged)}",
        id=ids[1],
        operator="batch",
    )


def _shown(kind: list[Any]) -> str:
    if not kind:
        return "an object"
    shape, dtype, _ = kind
    return "an array" if shape is None else f"{dtype}{list(shape)}"


def _remedy(first: list[Any], second: list[Any], ragged: str) -> str:
    if not first or not second or first[1] != second[1]:
        return "give every sample the same type, with a map where the source does not"
    if ragged == "error":
        return "resize or crop to one size, or use batch(..., ragged='pad') or ragged='list'"
    return "ragged fields may differ in their sizes, not in their number of dimensions"
