"""What a process needs to use a cache: plain data, beside which three descriptors travel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache.arena import Arena, Shelf
from penstock.cache.finding import hold
from penstock.cache.tally import Row, Tally

__all__ = ["Access", "Opened"]


@dataclass
class Opened:
    """A cache as one process has it open."""

    arena: Arena
    tally: Tally
    row: Row
    shelf: Shelf | None
    """None where the arena has no room for the data set's index, or the process none to map it."""


@dataclass(frozen=True)
class Access:
    """The samples of one data set, for the processes of one loader."""

    key: bytes
    samples: int
    readers: int
    """The numbers of processes that read are below this; the tally has one row more, for the one that watches."""

    @property
    def rows(self) -> int:
        return self.readers + 1

    def open(self, descriptors: Sequence[int], number: int) -> Opened:
        """Open it as reader of this number. Takes the descriptors: the arena's two, and the tally's."""
        control, data, counts = descriptors
        arena = Arena(control, data)
        hold(arena)
        tally = Tally(counts, self.rows)
        os.close(counts)
        row = tally.row(number)
        try:
            shelf = arena.shelf(self.key, self.samples, row)
        except OSError:  # a limit of what this process may map
            shelf = None
        return Opened(arena, tally, row, shelf)
