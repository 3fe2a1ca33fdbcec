"""What a process needs to use a cache: plain data, beside which three descriptors travel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache.arena import KEY_BYTES, Arena, Shelf
from penstock.cache.finding import hold
from penstock.cache.forms import CacheForm
from penstock.cache.tally import ROW_BYTES, Row, Tally

__all__ = ["Access", "Opened"]


@dataclass
class Opened:
    """A cache as one process has it open."""

    arena: Arena
    tally: Tally
    row: Row
    shelf: Shelf | None
    """Of encoded samples. None where the arena has no room for the data set's index, or the process none to map it."""
    pixels: Shelf | None = None
    """Of decoded samples; None too where there are to be none."""
    choice: Shelf | None = None
    """Where the share of decoded samples is settled; None where it is given."""

    def room(self) -> int:
        """Bytes that the samples of this data set may take: what is free of the budget, and what they take already."""
        state = self.arena.state()
        taken = sum(shelf.held[1] for shelf in (self.shelf, self.pixels) if shelf is not None)
        return state.budget - state.held + taken


@dataclass(frozen=True)
class Access:
    """The samples of one data set, for the processes of one loader."""

    key: bytes
    samples: int
    readers: int
    """The numbers of processes that read are below this; the tally has one row more, for the one that watches."""
    form: CacheForm = "encoded"
    pixel_key: bytes = b""
    """Names the decoded samples, where there are to be any."""

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
        opened = Opened(arena, tally, row, _shelf(arena, self.key, self.samples, row))
        if self.form == "auto":
            key = hashlib.blake2b(self.pixel_key, digest_size=KEY_BYTES).digest()
            opened.choice = _shelf(arena, key, 1, Row(memoryview(bytearray(ROW_BYTES)).cast("Q")))
        if self.form == "decoded" or opened.choice is not None:
            opened.pixels = _shelf(arena, self.pixel_key, self.samples, row)
        return opened


def _shelf(arena: Arena, key: bytes, samples: int, row: Row) -> Shelf | None:
    try:
        return arena.shelf(key, samples, row)
    except OSError:  # a limit of what this process may map
        return None
