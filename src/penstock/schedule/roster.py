"""The lanes: what each has to do, which of them could take more, and whether an end is without lanes for good."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.schedule.batches import End, Piece
from penstock.schedule.queues import Idle

__all__ = ["Lane", "Roster"]


@dataclass
class Lane:
    """A lane that is there."""

    depth: int
    end: End
    grain: int | None
    retired: bool = False
    tasks: dict[int, list[Piece]] = field(default_factory=dict)
    """In the order in which the lane runs them: the first is running, or about to be."""

    @property
    def active(self) -> bool:
        """It takes tasks, now or when it has done what it has."""
        return self.depth > 0 and not self.retired

    @property
    def has_room(self) -> bool:
        return self.active and len(self.tasks) < self.depth


class Roster(dict[int, Lane]):
    """Lanes by number. Call `place` after a lane has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[End] = set()
        """Ends that had lanes, and will have none."""
        self._expected: dict[int, End] = {}
        """Lanes that are there, or will be replaced; without the retired."""
        self._ends: Counter[End] = Counter()
        """How many of these there are of each end."""
        self._active_large: set[int] = set()
        self._idle: dict[End, Idle] = {"small": Idle(), "large": Idle()}

    @property
    def has_large(self) -> bool:
        """A lane of the large end takes tasks."""
        return bool(self._active_large)

    def count(self, end: End) -> int:
        """Lanes of an end that are there, or will be replaced."""
        return self._ends[end]

    def expect(self, number: int, end: End) -> bool:
        """The lane is there; true if that is news, not the replacement of one that was lost."""
        if self._expected.get(number) == end:
            return False
        self.leave(number)
        self._expected[number] = end
        self._ends[end] += 1
        self.gone.discard(end)
        return True

    def leave(self, number: int) -> bool:
        """No lane will take tasks under this number; true if that is news."""
        end = self._expected.pop(number, None)
        if end is None:
            return False
        self._ends[end] -= 1
        if not self._ends[end]:
            self.gone.add(end)
        return True

    def place(self, number: int) -> None:
        """Put a lane where its number of tasks belongs."""
        for idle in self._idle.values():
            idle.drop(number)
        self._active_large.discard(number)
        lane = self.get(number)
        if lane is not None and lane.active and lane.end == "large":
            self._active_large.add(number)
        if lane is not None and lane.has_room:
            self._idle[lane.end].put(number, len(lane.tasks))

    def idlest(self, end: End) -> tuple[int, int] | None:
        """How few tasks a lane of this end has, and its number."""
        return self._idle[end].least()
