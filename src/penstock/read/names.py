"""A long list of strings as one buffer: a million paths are two objects, so forked workers share them untouched."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Names", "packed"]


def packed(values: ArrayLike) -> array[int]:
    """Integers as an `array`: as small as numpy's, picklable, and quicker where one is wanted at a time."""
    integers = array("q")
    integers.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
    return integers


class Names(Sequence[str]):
    """An immutable sequence of strings. File names that are not UTF-8 survive, as `os.fsdecode` spells them."""

    __slots__ = ("_ends", "blob")

    def __init__(self, names: Iterable[str] = ()) -> None:
        blob = bytearray()
        ends = array("q", [0])
        for name in names:
            blob += os.fsencode(name)
            ends.append(len(blob))
        self.blob = bytes(blob)
        self._ends = ends

    @classmethod
    def of_buffers(cls, blob: bytes, ends: array[int]) -> Names:
        """From the joined names and where each ends, with a leading 0; as `blob` and `ends` give them."""
        names = cls.__new__(cls)
        names.blob = blob
        names._ends = ends
        return names

    @property
    def ends(self) -> array[int]:
        """Where each name ends in `blob`, with a leading 0."""
        return self._ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        return os.fsdecode(self.blob[self._ends[index] : self._ends[index + 1]])

    def __reduce__(self) -> tuple[object, ...]:
        return Names.of_buffers, (self.blob, self._ends)
