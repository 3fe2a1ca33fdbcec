"""Samples that lie in memory or in memory-mapped files: the rows of arrays of equal length."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GraphError
from penstock.graph import Field, Reader, Sample, Source, Spec

__all__ = ["Arrays"]


class Arrays(Source):
    """Row i of every array is sample i: `Arrays(image=pixels, label=labels)`.

    Takes numpy arrays, memory maps, torch tensors on the CPU and whatever else numpy reads; nothing is copied. `image`
    is uint8 RGB as [samples, height, width, channels], or [samples, height, width] for gray; `audio` is float32
    [samples, channels, time]; `boxes` is float32 [samples, n, 4]; other fields are anything.
    Samples are read-only views.
    """

    def __init__(self, **fields: Any) -> None:
        if not fields:
            raise GraphError("arrays: give at least one array, such as arrays(image=pixels, label=labels)")
        if "id" in fields:
            raise GraphError("arrays: 'id' is the sample's own number; give the field another name")
        self._arrays = {name: _array(name, value) for name, value in fields.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise GraphError(f"arrays: all need one row per sample, but their lengths are {lengths}")
        self._length = next(iter(lengths.values()))
        if not self._length:
            raise GraphError("arrays: the arrays have no rows")
        self.clean = all(_mapping(array) is not None for array in self._arrays.values())

    def __len__(self) -> int:
        return self._length

    def spec(self) -> Spec:
        """Exact shapes and types."""
        return {name: _field(name, array) for name, array in self._arrays.items()}

    def open(self) -> Reader:
        """Reads rows; memory maps stay shared by all processes."""
        return _ArraysReader(self._arrays)

    def place(self, id: int) -> str:
        """The row's number."""
        return f"row {id} of the arrays {', '.join(self._arrays)}"

    def fingerprint(self) -> str:
        """Of shapes, types and the content of a few rows: reading them all would not be cheap."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in self._arrays.items():
            digest.update(repr((name, array.shape, array.dtype.str)).encode())
            if not array.dtype.hasobject:
                rows = np.unique(np.linspace(0, self._length - 1, 16).astype(np.int64))
                digest.update(np.ascontiguousarray(array[rows]).tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        maps = {name: _mapping(array) for name, array in self._arrays.items()}
        held = {name: self._arrays[name] if of is None else None for name, of in maps.items()}
        return {**self.__dict__, "_arrays": held, "_maps": maps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        maps = state.pop("_maps")
        opened = {name: np.memmap(mode="r", **of) for name, of in maps.items() if of is not None}
        self.__dict__.update(state, _arrays={**state["_arrays"], **opened})


class _ArraysReader(Reader):
    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = {name: array.view(np.ndarray) for name, array in arrays.items()}
        self._length = min(len(array) for array in arrays.values())
        for view in self._arrays.values():
            view.flags.writeable = False

    def read(self, id: int) -> Sample:
        if not 0 <= id < self._length:
            raise KeyError(f"no sample {id}; there are {self._length}")
        return {name: array[id] for name, array in self._arrays.items()}


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        array: NDArray[Any] = value if isinstance(value, np.memmap) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphError(f"arrays: {name} ({type(value).__name__}) cannot be read as a numpy array: {error}") from error
    if array.ndim == 0:
        raise GraphError(f"arrays: {name} must have one row per sample, not be the single value {value!r}")
    if name == "image" and array.dtype == np.uint8:
        if array.ndim == 3:
            return array[..., np.newaxis]
        if array.ndim == 4 and array.shape[-1] > 4 >= array.shape[1]:
            raise GraphError(
                f"arrays: images must be [samples, height, width, channels]; found {array.shape}, which looks like "
                " channels first: use .transpose(0, 2, 3, 1), or .permute(0, 2, 3, 1) of a tensor"
            )
    return array


def _field(name: str, array: NDArray[Any]) -> Field:
    shape, dtype = array.shape[1:], array.dtype
    if dtype.hasobject:
        return Field("any")
    if name == "image" and dtype == np.uint8 and len(shape) == 3:
        return Field("image", shape, dtype.name)
    if name == "audio" and dtype == np.float32 and len(shape) == 2:
        return Field("audio", shape, dtype.name)
    if name == "boxes" and dtype == np.float32 and len(shape) == 2 and shape[1] == 4:
        return Field("boxes", shape, dtype.name)
    return Field("value", shape, dtype.name)


def _mapping(array: NDArray[Any]) -> dict[str, Any] | None:
    """How to map the same file again; None for arrays in memory and for maps that cannot be told by an offset."""
    if not isinstance(array, np.memmap) or array.filename is None or array.mode == "c":
        return None
    if not array.flags.c_contiguous:
        return None
    root: np.memmap[Any, Any] = array
    while isinstance(root.base, np.memmap):
        root = root.base
    offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return {"filename": os.path.abspath(array.filename), "dtype": array.dtype, "offset": offset, "shape": array.shape}
