"""Where work runs. A set of lanes takes tasks and reports events; the scheduler never learns what a lane is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.work import Failure, Request, Result

__all__ = ["MOST_WORKERS", "Answer", "Events", "Lanes", "Slot", "called"]

MOST_WORKERS = 4096
"""Lanes with smaller numbers are workers; those of devices, and the workers that stage for these, come after them."""

Slot = tuple[int, int]
"""A slot's generation and index."""

Answer = tuple[int, Result, int]
"""Number of the piece in its task, how it went, and a descriptor of memory of its own (-1 without)."""


def called(lane: int, pid: int) -> str:
    """What a lane is, for people; a GPU lane has no process of its own."""
    if lane < MOST_WORKERS:
        return f"worker {lane}"
    return f"stager {lane - MOST_WORKERS}" if pid else "GPU lane"


class Events(Protocol):
    """What lanes report to the coordinator."""

    def lane_ready(self, lane: int, pid: int) -> None:
        """The lane takes tasks from now on."""

    def lane_done(self, lane: int, task: int, answers: Sequence[Answer], seconds: float, rows: int) -> None:
        """Pieces of a task are done, `rows` rows in `seconds` of work."""

    def lane_lost(self, lane: int, blame: int) -> None:
        """The lane is dead for certain: nothing it ran can still write to a slot."""

    def lanes_failed(self, error: Failure) -> None:
        """Lanes cannot be had; the loader must stop."""


class Lanes(Protocol):
    """A set of lanes of one kind, numbered from 0."""

    def start(self) -> None:
        """Bring up all lanes; each reports when it is ready."""

    def run(self, lane: int, task: int, pieces: Sequence[tuple[Request, Slot | None]]) -> None:
        """Have a lane run a task."""

    def forget_region(self, generation: int) -> None:
        """No slot of this region will be used again."""

    def kill(self, lane: int) -> None:
        """End a lane that hangs; once it is dead it is reported lost, and a new one takes its place."""

    def close(self) -> None:
        """End all lanes, now. Returns when they are gone."""
