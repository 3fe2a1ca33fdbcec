"""A loader's side of the cache: opens it for the loader's processes, and explains it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.cache.access import Access
from penstock.cache.budget import CacheSize, budget_bytes
from penstock.cache.finding import find_arena
from penstock.cache.keeping import Keeping
from penstock.cache.pixels import pixel_key
from penstock.cache.reader import encoded_key, why_not_cached
from penstock.cache.tally import Tally
from penstock.graph import Source

__all__ = ["LoaderCache"]


class LoaderCache:
    """The cache of one loader, as its option `cache` asks for it."""

    def __init__(self, asked: CacheSize, source: Source, keeping: Keeping) -> None:
        self._asked = asked
        self._source = source
        self._keeping = keeping
        self._why_none = why_not_cached(source)

    def open(self, batch_memory: int, processes: int, readers: int, *, served: bool) -> tuple[Access | None, list[int]]:
        """What the loader's processes need, and the descriptors: the arena's, the tally's, and with `served` that of a
        socket on which a coordinator lets others find the arena. None and nothing where there is no cache.

        `processes` read it at first; their numbers are below `readers`."""
        if self._asked is None or self._why_none is not None:
            return None, []
        try:
            arena, server = find_arena(budget_bytes(self._asked, batch_memory, processes))
        except OSError as error:
            self._why_none = f"the kernel refused its memory: {error.strerror}"
            warnings.warn(f"there is no cache, for {self._why_none}; all is read from storage", RuntimeWarning, 5)
            return None, []
        keeping = self._keeping
        pixels = pixel_key(self._source, keeping.stem) if keeping.stem is not None else b""
        access = Access(encoded_key(self._source), len(self._source), readers, keeping.form, pixels)
        descriptors = [*map(os.dup, arena.descriptors), Tally.create(access.rows)]
        arena.close()
        with server:
            if served:
                descriptors.append(server.detach())
        return access, descriptors

    def explanation(self, state: Mapping[str, Any] | None) -> Iterator[str]:
        """What it is to hold, and how it does by the counters of `stats()`; None before it is open."""
        if self._why_none is not None:
            yield f"cache: none, for {self._why_none}"
            return
        yield f"cache: {self._asked!r} of memory, shared by this user's loaders on this host"
        yield from self._keeping.explanation()
        if state is None:
            yield "  it is opened with the first batch"
            return
        yield (
            f"  holds {state['samples']:,} of {len(self._source):,} samples in {state['bytes']:,} bytes; "
            f"all that it holds takes {state['held_bytes']:,} of {state['budget_bytes']:,} bytes"
        )
        yield from self._keeping.state(state)
        if not state["indexed"]:
            yield "  has no room for the index of this data set, of which it holds nothing"
        if state["stopped"] == "memory":
            yield "  grows no more, for there is no memory for more"
        if state["given_back_bytes"]:
            back = f"{state['given_back_bytes']:,} bytes, {state['given_back_samples']:,} samples"
            yield f"  gave back {back}, when memory became short, and grows no more"
