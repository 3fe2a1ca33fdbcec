"""Lanes that prepare nothing, in time that does not pass: for tests, and for simulations of a thousand lanes.

    clock = Clock()
    lanes = NullLanes(clock, events, [steady(0.001)] * 8)
    lanes.start()
    while clock.step():
        ...

Each lane takes as long over a piece as its pace says, one piece after another, and reports like any lane. Which of the
lanes stand for what is the user's business.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.lanes import Events, Slot
from penstock.work import Request, Result

__all__ = ["Clock", "NullLanes", "Pace", "steady"]

Pace = Callable[[Request], float]
"""How many seconds a lane takes over a piece."""


def steady(row_s: float, piece_s: float = 0.0) -> Pace:
    """So long for every row, and for every piece besides."""
    return lambda request: piece_s + row_s * len(request.rows)


class Clock:
    """Time that moves from one thing that is due to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it then. Of calls that are due at the same time the one asked for first comes first."""
        heapq.heappush(self._due, (self.now + seconds, next(self._count), call))

    def step(self) -> bool:
        """Move on to the next thing that is due; false when there is none."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True


@dataclass
class _Lane:
    number: int
    pace: Pace
    queue: deque[tuple[int, int, Request]] = field(default_factory=deque)
    """Task, number of the piece in it, and what is to be prepared; the first is being worked on."""


class NullLanes:
    """Implements `penstock.lanes.Lanes`. `start_s` is how long a lane takes to get ready."""

    def __init__(self, clock: Clock, events: Events, paces: Sequence[Pace], *, start_s: float = 0.0) -> None:
        self._clock = clock
        self._events = events
        self._paces = list(paces)
        self._start_s = start_s
        self._lanes: dict[int, _Lane] = {}

    def start(self) -> None:
        for number in range(len(self._paces)):
            self._start_lane(number)

    def add(self, pace: Pace) -> int:
        """One more lane, under a new number."""
        self._paces.append(pace)
        self._start_lane(len(self._paces) - 1)
        return len(self._paces) - 1

    def end(self, lane: int) -> None:
        """A lane that has nothing to do goes, and is not replaced."""
        assert not self._lanes[lane].queue, "a lane ends when it has done what it was given"
        del self._lanes[lane]

    def run(self, lane: int, task: int, pieces: Sequence[tuple[Request, Slot | None]]) -> None:
        queue = self._lanes[lane].queue
        idle = not queue
        queue.extend((task, index, request) for index, (request, _) in enumerate(pieces))
        if idle:
            self._begin(self._lanes[lane])

    def forget_region(self, generation: int) -> None:
        """Null lanes hold no memory."""

    def kill(self, lane: int) -> None:
        """It is lost at once, without blame; the one that takes its place needs time to start."""
        del self._lanes[lane]
        self._events.lane_lost(lane, 0)
        self._start_lane(lane)

    def close(self) -> None:
        self._lanes.clear()

    def _start_lane(self, number: int) -> None:
        lane = self._lanes[number] = _Lane(number, self._paces[number])
        self._clock.after(self._start_s, lambda: self._ready(lane))

    def _ready(self, lane: _Lane) -> None:
        if self._lanes.get(lane.number) is lane:
            self._events.lane_ready(lane.number, 0)

    def _begin(self, lane: _Lane) -> None:
        seconds = lane.pace(lane.queue[0][2])
        self._clock.after(seconds, lambda: self._done(lane, seconds))

    def _done(self, lane: _Lane, seconds: float) -> None:
        if self._lanes.get(lane.number) is not lane:
            return
        task, index, request = lane.queue.popleft()
        if lane.queue:
            self._begin(lane)
        result = Result(layout=b"", missing=request.rows)
        self._events.lane_done(lane.number, task, [(index, result, -1)], seconds, len(request.rows))
