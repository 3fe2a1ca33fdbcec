"""Who waits for whom: batches for lanes, lanes for tasks. No answer takes going through all of them."""

from __future__ import annotations

import heapq

from penstock.schedule.batches import Key

__all__ = ["Backlog", "Idle"]


class Backlog:
    """Batches that may have rows to assign, oldest first, for each end and for each lane that some are pinned to."""

    def __init__(self) -> None:
        self._heaps: dict[Key, list[int]] = {}
        self._listed: set[tuple[Key, int]] = set()

    @property
    def pins(self) -> list[int]:
        """Lanes that batches are pinned to."""
        return [key for key in self._heaps if isinstance(key, int)]

    def add(self, key: Key, seq: int) -> None:
        if (key, seq) not in self._listed:
            self._listed.add((key, seq))
            heapq.heappush(self._heaps.setdefault(key, []), seq)

    def first(self, key: Key) -> int | None:
        """The oldest."""
        return self._heaps[key][0] if key in self._heaps else None

    def drop_first(self, key: Key) -> None:
        self._listed.remove((key, heapq.heappop(self._heaps[key])))
        if not self._heaps[key]:
            del self._heaps[key]

    def clear(self) -> None:
        self._heaps.clear()
        self._listed.clear()


class Idle:
    """Lanes that could take a task, by how many they have."""

    def __init__(self) -> None:
        self._lanes: dict[int, dict[int, None]] = {}

    def put(self, lane: int, tasks: int) -> None:
        self.drop(lane)
        self._lanes.setdefault(tasks, {})[lane] = None

    def drop(self, lane: int) -> None:
        for lanes in self._lanes.values():
            lanes.pop(lane, None)

    def least(self) -> tuple[int, int] | None:
        """How few tasks a lane has, and its number."""
        return next(((tasks, lane) for tasks in sorted(self._lanes) for lane in self._lanes[tasks]), None)
