"""The pool of batch memory: one contiguous region of equal slots, in memory that has no name and dies with its users.

The region is a memfd, mapped by the training process and by every worker. Slots go round: free, being written, full,
with the user, free again. The coordinator keeps the books; this module holds what each process needs to see the memory.
A region is never resized: where batches outgrow it, a new one takes its place and the old one goes as its slots return.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import OptionError

__all__ = ["Books", "Pools", "Region", "anonymous", "slot_bytes"]

_PAGE = 1 << 16


def slot_bytes(nbytes: int) -> int:
    """The size of a slot for batches of that many bytes."""
    return max(1, -(-nbytes // _PAGE)) * _PAGE


def anonymous(nbytes: int) -> int:
    """A descriptor of memory without a name; it is freed when the last process lets go of it."""
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


class Region:
    """A region as one process sees it: `slot(i)` is writable memory."""

    def __init__(self, fd: int, slots: int, capacity: int, *, forkable: bool) -> None:
        self.capacity = capacity
        self._map = mmap.mmap(fd, slots * capacity)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory: small ones will do
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if not forkable:
            self._map.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._map)

    def slot(self, index: int) -> memoryview:
        """The memory of one slot."""
        return self._view[index * self.capacity : (index + 1) * self.capacity]


@dataclass
class _Generation:
    fd: int
    slots: int
    capacity: int
    free: deque[int]


class Books:
    """Which slots are free. A slot is named by (generation, index); several books may number theirs together."""

    def __init__(self, budget_bytes: int, numbers: Iterator[int] | None = None) -> None:
        self._budget = budget_bytes
        self._numbers = itertools.count() if numbers is None else numbers
        self._generations: dict[int, _Generation] = {}
        self._current = -1
        self._kept: set[int] = set()

    @property
    def current(self) -> int:
        """The generation that slots are taken from; -1 before there is one."""
        return self._current

    @property
    def capacity(self) -> int:
        """Bytes in a slot; 0 before there is a region."""
        return self._generations[self._current].capacity if self._current >= 0 else 0

    @property
    def slots(self) -> int:
        """Slots in the current region."""
        return self._generations[self._current].slots if self._current >= 0 else 0

    @property
    def free(self) -> int:
        """Slots that can be taken now."""
        return len(self._generations[self._current].free) if self._current >= 0 else 0

    def grow(self, nbytes: int, wanted: int) -> int:
        """Begin a region for batches of `nbytes`, of `wanted` slots or as many as fit the budget. Its descriptor."""
        capacity = slot_bytes(nbytes)
        slots = min(wanted, self._budget // capacity)
        if slots < 2:
            raise OptionError(
                f"a batch takes {nbytes:,} bytes, and two of them do not fit into memory_bytes={self._budget:,}; "
                f"give at least {2 * capacity:,} or use smaller batches"
            )
        self._current = self._begin(slots, capacity)
        return self._generations[self._current].fd

    def keep(self, nbytes: int, slots: int) -> int:
        """Begin a region beside those for batches, whose slots are not taken from here. Its generation."""
        generation = self._begin(slots, slot_bytes(nbytes))
        self._kept.add(generation)
        return generation

    def _begin(self, slots: int, capacity: int) -> int:
        number = next(self._numbers)
        fd = anonymous(slots * capacity)
        self._generations[number] = _Generation(fd, slots, capacity, deque(range(slots)))
        return number

    def region(self, generation: int) -> tuple[int, int, int]:
        """Descriptor, slots and capacity of a region that is in use."""
        held = self._generations[generation]
        return held.fd, held.slots, held.capacity

    @property
    def generations(self) -> list[int]:
        """Regions in use, oldest first."""
        return list(self._generations)

    def take(self) -> tuple[int, int] | None:
        """A free slot of the current region."""
        if self._current < 0 or not self._generations[self._current].free:
            return None
        return self._current, self._generations[self._current].free.popleft()

    def give(self, slot: tuple[int, int]) -> int | None:
        """Take a slot back; returns the generation that has become useless with it, if one has."""
        generation, index = slot
        self._generations[generation].free.append(index)
        return generation if self.release(generation) else None

    def release(self, generation: int) -> bool:
        """Let go of a region that is no longer taken from, once all its slots are back; True if that was now."""
        held = self._generations[generation]
        if generation == self._current or generation in self._kept or len(held.free) < held.slots:
            return False
        os.close(held.fd)
        del self._generations[generation]
        return True


class Pools:
    """The books of every device that batches go to, in turn; without devices there is one of the host."""

    def __init__(self, budget_bytes: int, parts: int) -> None:
        numbers = itertools.count()
        self.parts = [Books(budget_bytes // parts, numbers) for _ in range(parts)]

    @property
    def capacity(self) -> int:
        """Bytes in a slot; 0 before there are any."""
        return self.parts[0].capacity

    @property
    def slots(self) -> int:
        """Slots in use or free."""
        return sum(books.slots for books in self.parts)

    @property
    def free(self) -> int:
        """Slots that can be taken now."""
        return sum(books.free for books in self.parts)

    def part(self, generation: int) -> int:
        """Whose a region is."""
        return next(part for part, books in enumerate(self.parts) if generation in books.generations)

    def region(self, generation: int) -> tuple[int, int, int]:
        """Descriptor, slots and capacity of a region that is in use."""
        return self.parts[self.part(generation)].region(generation)

    def grow(self, nbytes: int, wanted: int) -> list[int]:
        """Begin a region for each part, of `wanted` slots together or as many as fit the budget. Their generations."""
        for books in self.parts:
            books.grow(nbytes, -(-wanted // len(self.parts)))
        return [books.current for books in self.parts]
