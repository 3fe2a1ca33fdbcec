"""How a batch lies in memory: a few columns, each an array with one row per sample, and the structure around them.

Workers that prepare parts of one batch each derive the layout from their own first sample. Equal samples give equal
layouts, so the parts meet in one slot without a word between the workers; the coordinator compares them.
"""

from __future__ import annotations

import io
import marshal
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

__all__ = ["Column", "Hole", "Layout", "Loose", "lay_out", "restore", "storable"]

_ALIGN = 64


@dataclass(frozen=True)
class Column:
    """One array of the batch; `dtype` is torch's and numpy's common name, `shape` that of one row."""

    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    image: bool = False
    """Rows are HWC and are shown as CHW (the batch is then in torch's channels_last format, without a copy)."""
    single: bool = False
    """One array, not one row per sample: an item of a list."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, or of the one array."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Hole:
    """Stands in the structure for the column of this number."""

    column: int


@dataclass(frozen=True)
class Loose:
    """Stands in the structure for a list of objects, one per row, that travel pickled beside the columns."""

    name: str


@dataclass(frozen=True)
class Layout:
    """Where everything is, for a batch of `rows` samples. `structure` is a pickled tree with holes."""

    rows: int
    columns: tuple[Column, ...]
    structure: bytes
    nbytes: int

    @cached_property
    def packed(self) -> bytes:
        """The layout for travel. Equal layouts give equal bytes, so whoever passes them on need not look inside."""
        columns = [(c.shape, c.dtype, c.offset, c.image, c.single) for c in self.columns]
        return marshal.dumps((self.rows, columns, self.structure, self.nbytes), 2)

    @staticmethod
    @lru_cache(maxsize=256)
    def unpack(packed: bytes) -> Layout:
        """The layout that was packed."""
        rows, columns, structure, nbytes = marshal.loads(packed)
        return Layout(rows, tuple(Column(*column) for column in columns), structure, nbytes)


_ITEMSIZE = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def storable(dtype: str) -> bool:
    """A column can have this dtype; anything else travels as objects."""
    return dtype in _ITEMSIZE


def lay_out(tree: Any, arrays: Sequence[Column], rows: int) -> Layout:
    """A layout for `rows` samples: `tree` holds `Hole(i)` for array i. The offsets given are ignored and set here."""
    columns = []
    offset = 0
    for array in arrays:
        columns.append(replace(array, offset=offset))
        nbytes = array.row_bytes * (1 if array.single else rows)
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return Layout(rows, tuple(columns), _pickled(tree), offset)


def _pickled(tree: Any) -> bytes:
    """Equal trees give equal bytes: without a memo, it does not matter which of their parts are one object."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.fast = True
    pickler.dump(tree)
    return stream.getvalue()


def restore(layout: Layout, columns: Sequence[Any], loose: Mapping[str, list[Any]]) -> Any:
    """The batch: the structure with its holes filled."""
    return _fill(pickle.loads(layout.structure), columns, loose)


def _fill(tree: Any, columns: Sequence[Any], loose: Mapping[str, list[Any]]) -> Any:
    if isinstance(tree, Hole):
        return columns[tree.column]
    if isinstance(tree, Loose):
        return loose[tree.name]
    if isinstance(tree, Mapping):
        filled = {key: _fill(value, columns, loose) for key, value in tree.items()}
        return filled if type(tree) is dict else type(tree)(filled)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_fill(value, columns, loose) for value in tree))
    return type(tree)(_fill(value, columns, loose) for value in tree)
