"""Watches over the arena on behalf of one loader: gives memory back when it becomes short, and says how the cache does.

One process of each loader does this, its coordinator or, without workers, the training process. Where several loaders
share an arena each watches, since each may be in another container; a lock keeps two from giving back for one want.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from penstock.cache.access import Opened
from penstock.cache.arena import reserve_bytes
from penstock.cache.choice import settled
from penstock.limits import Room, memory_room, memory_stall_s

__all__ = ["WATCH_S", "Keeper", "Pressure"]

WATCH_S = 0.25
"""Between two looks. The reserve has to last as long: at most 4 GB are allocated in a second."""
_STALLED = 0.1
"""Share of the time that some task waited for memory, from which on memory counts as short."""
_PART = 16
"""So much of what is held is given back for each look at which tasks waited."""


class Pressure:
    """Decides, from looks at the memory, how much of it to give back."""

    def __init__(self) -> None:
        self._at, self._stalled_s = 0.0, 0.0

    def due(self, room: Room, stalled_s: float, now: float, held: int) -> int:
        """Bytes to give back now. `stalled_s`: seconds so far in which some task waited for memory."""
        share = (stalled_s - self._stalled_s) / (now - self._at) if self._at else 0.0
        self._at, self._stalled_s = now, stalled_s
        reserve = reserve_bytes(room.total)
        if room.free < reserve // 2:
            return min(held, reserve - room.free)
        # tasks also wait in other containers, which nothing that is given back here would help
        return held // _PART if share > _STALLED and room.free < 2 * reserve else 0


class Keeper:
    """Call `watch` every WATCH_S."""

    def __init__(self, opened: Opened) -> None:
        self.arena = opened.arena
        self._opened = opened
        self._pressure = Pressure()
        self._said: set[str] = set()
        self._sweep = False

    def watch(self) -> Iterator[str]:
        """Look at the memory, and yield what the user should be warned of, each kind once."""
        if self._sweep:
            self.arena.sweep()
        held = self.arena.state().held
        due = self._pressure.due(memory_room(), memory_stall_s(), time.monotonic(), held)
        self._sweep = bool(due)
        if due:
            # unless another loader has given back meanwhile
            self.arena.give_back(lambda: due if self.arena.state().held >= held else 0)
        yield from self._warnings()

    def _warnings(self) -> Iterator[str]:
        state = self.arena.state()
        if state.stopped == "memory" and "memory" not in self._said:
            self._said.add("memory")
            why = f"the kernel refused it: {os.strerror(state.error)}" if state.error else "too little is left free"
            yield (
                f"the cache stops at {state.held:,} of {state.budget:,} bytes: there is no memory for more ({why}); "
                "what is not in it is read from storage in every epoch"
            )
        if state.given_back and "given back" not in self._said:
            self._said.add("given back")
            yield (
                f"memory became short: the cache gave back {state.given_back:,} bytes, {state.samples_given_back:,} "
                "samples, which are read from storage from now on; loader.stats() counts what else it gives back"
            )

    def snapshot(self) -> dict[str, Any]:
        """For `stats()`: what this loader read, and how the arena is doing."""
        state, counts = self.arena.state(), self._opened.tally.total()
        samples, nbytes = self._opened.shelf.held if self._opened.shelf is not None else (0, 0)
        pixels, pixel_bytes = self._opened.pixels.held if self._opened.pixels is not None else (0, 0)
        chosen = settled(self._opened.choice) if self._opened.choice is not None else None
        return {
            "hits": counts.hits,
            "misses": counts.misses,
            "hit_bytes": counts.hit_bytes,
            "read_bytes": counts.read_bytes,
            "stored": counts.stored,
            "spoiled": counts.spoiled,
            "indexed": self._opened.shelf is not None,
            "samples": samples,
            "bytes": nbytes,
            "decoded_samples": pixels,
            "decoded_bytes": pixel_bytes,
            "settled": asdict(chosen) if chosen is not None else None,
            "budget_bytes": state.budget,
            "held_bytes": state.held,
            "stopped": state.stopped,
            "given_back_bytes": state.given_back,
            "given_back_samples": state.samples_given_back,
        }
