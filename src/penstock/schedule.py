"""The scheduler: events in, instructions out. No clock, no I/O, no knowledge of what a lane is made of.

It holds the batches of the window, in order. Each batch is a list of rows sorted by size; lanes pull tiny-batches from
it, from the small end or from the large one, each by its own grain. Rows of a lost lane come back and are redone. A
batch is complete when every row was filled exactly once; complete batches are delivered in order, or as they come.

The following is how it is meant to behave. If the implementation differs, it is a bug.

- Every row of every batch is in exactly one of: waiting, running on one lane, filled.
- A row is assigned again only after the lane that ran it was lost, or said that the batch must be done whole.
- Rows that were running when lanes were lost collect blame and are then run alone, each in a task of its own, so that
  a later loss tells which of them is the cause. Rows whose blame reaches the limit are assigned as crashed: the lane
  reports them as bad samples instead of running them.
- A batch pinned to a lane is only ever assigned to that lane's number.
- An event costs the same with one lane and with a thousand, with one batch in the window and with a thousand.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Assign", "BatchSpec", "Deliver", "Instruction", "Piece", "Scheduler"]


@dataclass(frozen=True)
class BatchSpec:
    """What is to be prepared: `payload` is the lane's business. `sizes` order the rows where they are known.

    `seq` rises from batch to batch: it is the planned order."""

    seq: int
    rows: int
    payload: Any = None
    sizes: Sequence[int] | None = None
    whole: bool = False
    """All rows must be prepared by one lane at once (opaque collation, ragged fields)."""
    lane: int | None = None


@dataclass(frozen=True)
class Piece:
    """Rows of one batch, to be prepared by one lane in one go: a tiny-batch."""

    seq: int
    rows: tuple[int, ...]
    whole: bool
    alone: bool = False
    """The only piece of its task."""
    crashed: bool = False


@dataclass(frozen=True)
class Assign:
    """Lane: run these pieces."""

    lane: int
    task: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Deliver:
    """A batch is complete and its turn has come."""

    seq: int


Instruction = Assign | Deliver


@dataclass
class _Lane:
    depth: int
    large_end: bool
    tasks: dict[int, list[Piece]] = field(default_factory=dict)
    """In the order in which the lane runs them: the first is running, or about to be."""


class _Open:
    """A batch in the window."""

    def __init__(self, spec: BatchSpec) -> None:
        self.spec = spec
        self.whole = spec.whole
        order = sorted(range(spec.rows), key=spec.sizes.__getitem__) if spec.sizes is not None else range(spec.rows)
        self.waiting: deque[int] = deque(order)
        self.redo: deque[Piece] = deque()
        self.unfilled = set(range(spec.rows))
        self.blame: dict[frozenset[int], int] = {}
        self.running = 0
        """Pieces that are on lanes."""
        self.cancelled = False
        self.offered = False
        """It stands in one of the scheduler's lists of work."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.redo)

    @property
    def next_alone(self) -> bool:
        """What `take` gives next must be the only piece of its task."""
        return bool(self.redo) and self.redo[0].alone

    def take(self, grain: int, large_end: bool) -> Piece:
        """The next tiny-batch of at most `grain` rows (all of them when the batch is done whole)."""
        if self.redo:
            return self.redo.popleft()
        count = len(self.waiting) if self.whole else min(grain, len(self.waiting))
        take = self.waiting.pop if large_end else self.waiting.popleft
        return Piece(self.spec.seq, tuple(take() for _ in range(count)), self.whole)


class Scheduler:
    """Call an event method; it returns what is to be done now."""

    def __init__(self, *, order: Literal["plan", "ready"] = "plan", blame_limit: int = 12) -> None:
        self._order = order
        self._blame_limit = blame_limit
        self._lanes: dict[int, _Lane] = {}
        self._open: dict[int, _Open] = {}
        self._cancelled = 0
        """Cancelled batches that some lane still works on."""
        self._complete: set[int] = set()
        self._next_task = 0
        self._work: dict[int | None, list[int]] = {None: []}
        """Heaps of the batches that may have rows to assign: for any lane, and for the one they are pinned to."""
        self._idle: dict[int, dict[int, None]] = {}
        """Number of tasks to the lanes that have so many and could take one more."""
        self.grain = 1
        """Rows that a lane takes at a time; set from outside as the cost of a row becomes known."""

    # events

    def batch_opened(self, spec: BatchSpec) -> list[Instruction]:
        """A batch entered the window; it has memory to go to."""
        batch = self._open[spec.seq] = _Open(spec)
        if spec.rows == 0:
            self._complete.add(spec.seq)
        self._offer(batch)
        return self._proceed()

    def lane_joined(self, lane: int, *, depth: int = 2, large_end: bool = False) -> list[Instruction]:
        """A lane can take `depth` tasks, one running and the others queued before it."""
        assert lane not in self._lanes, "a lane joins again only after it was lost"
        self._lanes[lane] = _Lane(depth, large_end)
        self._place(lane)
        return self._proceed()

    def lane_depth(self, lane: int, depth: int) -> None:
        """A lane's capacity changed; this takes effect from the next task."""
        self._lanes[lane].depth = depth
        self._place(lane)

    def piece_done(self, lane: int, task: int, index: int) -> list[Instruction]:
        """Piece number `index` of a task was filled; the task ends with its last piece."""
        piece = self._lanes[lane].tasks[task][index]
        batch = self._open[piece.seq]
        self._end_piece(lane, task, index)
        if batch.whole and not piece.whole:
            self._restart_when_quiet(batch)
        else:
            batch.unfilled.difference_update(piece.rows)
            if not batch.unfilled and not batch.cancelled:
                self._complete.add(piece.seq)
        return self._proceed()

    def piece_refused(self, lane: int, task: int, index: int) -> list[Instruction]:
        """The lane found that this batch cannot be cut: it is begun again, whole, once no lane works on it."""
        piece = self._lanes[lane].tasks[task][index]
        batch = self._open[piece.seq]
        self._end_piece(lane, task, index)
        batch.whole = True
        batch.waiting.clear()
        batch.redo.clear()
        self._restart_when_quiet(batch)
        return self._proceed()

    def lane_lost(self, lane: int, *, blame: int = 1) -> list[Instruction]:
        """A lane is gone for certain: what it ran is done again. A replacement may join under the same number.

        `blame` falls on the rows of the task that was running, for they may be what killed it.
        """
        lost = self._lanes.pop(lane, None)
        if lost is None:
            return []
        self._place(lane)
        for position, pieces in enumerate(lost.tasks.values()):
            for piece in pieces:
                if piece.rows:
                    self._open[piece.seq].running -= 1
                    self._redo(piece, blame if position == 0 else 0)
        return self._proceed()

    def cancel(self) -> None:
        """Forget all batches. Tasks that run are waited for: `busy` says which batches' memory is still written to."""
        for seq in list(self._open):
            batch = self._open[seq]
            self._cancelled += not batch.cancelled
            batch.cancelled = True
            batch.waiting.clear()
            batch.redo.clear()
            batch.offered = False
            self._forget_when_quiet(batch)
        self._complete.clear()
        self._work = {None: []}

    # questions

    @property
    def window(self) -> int:
        """Batches opened and not yet delivered."""
        return len(self._open) - self._cancelled

    @property
    def busy(self) -> set[int]:
        """Batches that some lane works on."""
        return {seq for seq, batch in self._open.items() if batch.running}

    def piece(self, lane: int, task: int, index: int) -> Piece:
        """A piece of a task that was assigned."""
        return self._lanes[lane].tasks[task][index]

    def working_on(self, seq: int) -> list[int]:
        """The lanes that work on a batch."""
        return [
            number
            for number, lane in self._lanes.items()
            if any(piece.seq == seq and piece.rows for pieces in lane.tasks.values() for piece in pieces)
        ]

    def first_open(self) -> int | None:
        """The oldest batch that is not delivered."""
        return next((seq for seq, batch in self._open.items() if not batch.cancelled), None)

    # inside

    def _end_piece(self, lane: int, task: int, index: int) -> None:
        pieces = self._lanes[lane].tasks[task]
        piece = pieces[index]
        pieces[index] = Piece(piece.seq, (), piece.whole)
        if not any(p.rows for p in pieces):
            del self._lanes[lane].tasks[task]
            self._place(lane)
        batch = self._open[piece.seq]
        batch.running -= 1
        self._forget_when_quiet(batch)

    def _forget_when_quiet(self, batch: _Open) -> None:
        if batch.cancelled and not batch.running:
            self._cancelled -= 1
            del self._open[batch.spec.seq]

    def _restart_when_quiet(self, batch: _Open) -> None:
        if batch.whole and not batch.has_work and not batch.running and not batch.cancelled:
            rows = tuple(range(batch.spec.rows))
            batch.unfilled = set(rows)
            batch.redo.append(self._suspected(batch, rows, True) if batch.blame else Piece(batch.spec.seq, rows, True))
            self._offer(batch)

    def _redo(self, piece: Piece, blame: int) -> None:
        batch = self._open[piece.seq]
        if batch.cancelled:
            self._forget_when_quiet(batch)
        elif batch.whole and not piece.whole:
            self._restart_when_quiet(batch)
        elif blame == 0:
            batch.redo.append(piece)
        else:
            for rows in [piece.rows] if piece.whole else [(row,) for row in piece.rows]:
                batch.blame[frozenset(rows)] = batch.blame.get(frozenset(rows), 0) + blame
                batch.redo.append(self._suspected(batch, rows, piece.whole))
        self._offer(batch)

    def _suspected(self, batch: _Open, rows: tuple[int, ...], whole: bool) -> Piece:
        crashed = batch.blame.get(frozenset(rows), 0) >= self._blame_limit
        return Piece(batch.spec.seq, rows, whole, alone=True, crashed=crashed)

    def _proceed(self) -> list[Instruction]:
        return [*self._deliveries(), *self._assignments()]

    def _deliveries(self) -> Iterator[Instruction]:
        while self._complete:
            seq = self.first_open() if self._order == "plan" else min(self._complete)
            if seq not in self._complete:
                return
            del self._open[seq]
            self._complete.remove(seq)
            yield Deliver(seq)

    def _assignments(self) -> Iterator[Instruction]:
        for number in [number for number in self._work if number in self._lanes]:
            while self._has_room(number) and self._top(number) is not None:
                yield self._assign(number)
        while self._oldest(None) is not None and (idlest := self._idlest()) is not None:
            yield self._assign(idlest)

    def _assign(self, number: int) -> Assign:
        pieces = self._pull(number)
        task = self._next_task
        self._next_task += 1
        self._lanes[number].tasks[task] = list(pieces)
        for piece in pieces:
            self._open[piece.seq].running += 1
        self._place(number)
        return Assign(number, task, tuple(pieces))

    def _pull(self, number: int) -> list[Piece]:
        """One task: rows of the oldest batch that has any; more batches only while the grain is not reached."""
        pieces: list[Piece] = []
        rows = 0
        while rows < self.grain and (batch := self._oldest(number)) is not None:
            if pieces and batch.next_alone:
                break
            piece = batch.take(self.grain - rows, self._lanes[number].large_end)
            pieces.append(piece)
            rows += len(piece.rows)
            if piece.alone:
                break
        return pieces

    # lists of work and of idle lanes

    def _offer(self, batch: _Open) -> None:
        if batch.has_work and not batch.offered:
            batch.offered = True
            heapq.heappush(self._work.setdefault(batch.spec.lane, []), batch.spec.seq)

    def _oldest(self, number: int | None) -> _Open | None:
        """The oldest batch that has rows for this lane; with None, for any lane."""
        tops = [top for key in {None, number} if (top := self._top(key)) is not None]
        return min(tops, key=lambda batch: batch.spec.seq, default=None)

    def _top(self, key: int | None) -> _Open | None:
        heap = self._work.get(key, [])
        while heap:
            batch = self._open.get(heap[0])
            if batch is not None and batch.has_work:
                return batch
            heapq.heappop(heap)
            if batch is not None:
                batch.offered = False
        if key is not None:
            self._work.pop(key, None)
        return None

    def _place(self, number: int) -> None:
        """Put a lane where its number of tasks belongs."""
        for lanes in self._idle.values():
            lanes.pop(number, None)
        if number in self._lanes and self._has_room(number):
            self._idle.setdefault(len(self._lanes[number].tasks), {})[number] = None

    def _has_room(self, number: int) -> bool:
        return len(self._lanes[number].tasks) < self._lanes[number].depth

    def _idlest(self) -> int | None:
        return next((number for tasks in sorted(self._idle) for number in self._idle[tasks]), None)
