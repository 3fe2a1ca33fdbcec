"""What the scheduler says is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.batches import End, Piece

__all__ = ["Assign", "Deliver", "Dismiss", "Instruction", "Stranded"]


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


@dataclass(frozen=True)
class Dismiss:
    """The lane was retired, and nothing is left on it."""

    lane: int


@dataclass(frozen=True)
class Stranded:
    """Rows of the batch are tied to an end whose lanes are all gone for good. It goes on should one join again."""

    seq: int
    end: End


Instruction = Assign | Deliver | Dismiss | Stranded
