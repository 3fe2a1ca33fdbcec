"""Batches as the scheduler holds them: rows that wait, pieces that are to be redone, what is filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["ENDS", "BatchSpec", "End", "Key", "Open", "Piece"]

End = Literal["small", "large"]
"""The end of a batch's sorted rows that a lane takes from."""
ENDS: tuple[End, End] = ("small", "large")

Key = int | End
"""Who may take rows: a lane, by its number, or all lanes of an end."""


@dataclass(frozen=True)
class BatchSpec:
    """What is to be prepared: `payload` is the lane's business. `sizes` order the rows where they are known.

    `seq` rises from batch to batch: it is the planned order."""

    seq: int
    rows: int
    payload: Any = None
    sizes: Sequence[int] | None = None
    whole: bool = False
    """All rows must be prepared by one lane at once (opaque collation, ragged fields): one of the small end, unless the
    batch is pinned."""
    lane: int | None = None
    large: Sequence[bool] | None = None
    """The batch is exact: each row is tied to lanes of the large end, or to those of the small one."""


@dataclass(frozen=True)
class Piece:
    """Rows of one batch, to be prepared by one lane in one go: a tiny-batch."""

    seq: int
    rows: tuple[int, ...]
    whole: bool
    alone: bool = False
    """The only piece of its task."""
    crashed: bool = False
    end: End | None = None
    """The rows are tied to lanes of this end."""


class Open:
    """A batch in the window."""

    def __init__(self, spec: BatchSpec) -> None:
        assert spec.lane is None or spec.large is None, "a batch is pinned to a lane, or its rows are tied to ends"
        self.spec = spec
        self.whole = spec.whole
        self.apart = spec.lane is None and (spec.whole or spec.large is not None)
        """Each end has rows of its own."""
        self.fresh: dict[Key, deque[int]] = _fresh(spec)
        """Rows that were not assigned yet, the smallest first, by who may take them."""
        self.redo: dict[Key | None, deque[Piece]] = {None: deque(), "small": deque(), "large": deque()}
        """Pieces that came back: of anyone's rows, of those that are tied to an end."""
        self.unfilled = set(range(spec.rows))
        self.blame: dict[frozenset[int], int] = {}
        self.running = 0
        """Pieces that are on lanes."""
        self.cancelled = False
        self.returned = False
        """Rows came back that lanes of the large end cannot take."""
        self.disturbed = False
        """Something was redone: how the batch ended says nothing about the balance between the ends."""
        self.stranded: End | None = None
        """The end without lanes that rows were said to wait for."""
        self.threshold = 0
        """What the threshold was when the last row was taken."""

    @property
    def takers(self) -> tuple[Key, ...]:
        """Who may take rows."""
        return tuple(self.fresh)

    @property
    def shared(self) -> bool:
        """Both ends take tiny-batches of the same rows."""
        return self.spec.lane is None and not self.apart and not self.whole

    def everything(self) -> Piece:
        """The whole batch."""
        return Piece(self.spec.seq, tuple(range(self.spec.rows)), True, end="small" if self.spec.lane is None else None)

    def has_work(self, key: Key, keep: int = 0) -> bool:
        """Who has this key could take something, if it leaves `keep` of the fresh rows."""
        return bool(self.redo[None] or self.redo.get(key)) or len(self.fresh[key]) > keep

    def next_alone(self, key: Key) -> bool:
        """What `take` gives next must be the only piece of its task."""
        redo = self.redo.get(key) or self.redo[None]
        return bool(redo) and redo[0].alone

    def take(self, key: Key, end: End, grain: int, keep: int, share: int) -> Piece:
        """The next tiny-batch of at most `grain` rows, `share` of fresh ones (all when the batch is done whole)."""
        redo = self.redo.get(key) or self.redo[None]
        if redo:
            return _cut(redo, grain)
        rows = self.fresh[key]
        count = len(rows) if self.whole else min(grain, share, len(rows) - keep)
        take = rows.popleft if end == "small" else rows.pop
        tied = end if self.apart else None
        return Piece(self.spec.seq, tuple(take() for _ in range(count)), self.whole, end=tied)

    def clear(self) -> None:
        """Nothing of the batch waits."""
        for rows in self.fresh.values():
            rows.clear()
        for pieces in self.redo.values():
            pieces.clear()
        self.stranded = None

    def tied(self, ends: set[End]) -> End | None:
        """One of these ends, where rows that wait are tied to it."""
        return next((end for end in ENDS if end in ends and (self.redo[end] or (self.apart and self.fresh[end]))), None)


def _fresh(spec: BatchSpec) -> dict[Key, deque[int]]:
    order = sorted(range(spec.rows), key=spec.sizes.__getitem__) if spec.sizes is not None else range(spec.rows)
    rows = deque(order)
    if spec.lane is not None:
        return {spec.lane: rows}
    if spec.whole:
        return {"small": rows, "large": deque()}
    if spec.large is None:
        return {"small": rows, "large": rows}
    return {
        "small": deque(row for row in order if not spec.large[row]),
        "large": deque(row for row in order if spec.large[row]),
    }


def _cut(redo: deque[Piece], grain: int) -> Piece:
    """A piece that came back from a lane of coarser grain is cut."""
    piece = redo.popleft()
    if piece.whole or len(piece.rows) <= grain:
        return piece
    redo.appendleft(replace(piece, rows=piece.rows[grain:]))
    return replace(piece, rows=piece.rows[:grain])
