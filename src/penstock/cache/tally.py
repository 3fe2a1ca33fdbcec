"""What the readers of one loader did with its cache: a row of counters for each process, in shared memory.

Rows are written by one process each and read by the coordinator, so that nothing that was counted is lost with a worker
that is killed.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, fields

from penstock.slots import anonymous

__all__ = ["ROW_BYTES", "Counts", "Row", "Tally"]

ROW_BYTES = 64
"""A cache line, or writers would slow each other down."""


@dataclass(frozen=True)
class Counts:
    """Of the samples that were asked for. The order is that of the words of a row; native/arena.c knows the first."""

    hits: int = 0
    hit_bytes: int = 0
    """Encoded bytes that came from the cache."""
    misses: int = 0
    read_bytes: int = 0
    """Bytes that were requested from storage."""
    stored: int = 0
    spoiled: int = 0
    """Samples that were found damaged or older than what is stored now, and were read from storage."""


_NAMES = tuple(field.name for field in fields(Counts))


class Tally:
    """So many rows; closed when nobody holds it. `descriptor` stays the caller's."""

    def __init__(self, descriptor: int, rows: int) -> None:
        self._map = mmap.mmap(descriptor, rows * ROW_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._rows = rows

    @staticmethod
    def create(rows: int) -> int:
        """The descriptor of a tally in which all is 0."""
        return anonymous(rows * ROW_BYTES)

    def row(self, number: int) -> Row:
        """The row of one process."""
        first = number * ROW_BYTES // 8
        return Row(self._words[first : first + len(_NAMES)])

    def total(self) -> Counts:
        """All rows added up."""
        width = ROW_BYTES // 8
        return Counts(*(sum(self._words[column::width]) for column in range(len(_NAMES))))


class Row:
    """One process's counters; nobody else writes to them."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words
        self.address = ctypes.addressof(ctypes.c_uint64.from_buffer(words))

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        for name, amount in amounts.items():
            self._words[_NAMES.index(name)] += amount
