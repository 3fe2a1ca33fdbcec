"""The coordinator's side of a GPU lane: has tiny-batches staged by CPU processes, then decoded and cut on the GPU.

A task goes through stages: *stagers*, worker processes of their own, read and decide; the training process, which holds
the GPU, does the rest. What does not fit into one stage slot is staged in several. Rows that the lane cannot take (no
baseline JPEG, damaged, too large) come back with the piece's result, for the CPU lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.lanes import Answer, Events, Slot
from penstock.work import Request, Result

__all__ = ["GpuLane"]

_ATTEMPTS = 2
"""How often rows are staged when stagers die of it; then they are for the CPU lanes, which find the culprit."""


@dataclass
class _Task:
    """A piece on its way through the lane."""

    task: int
    index: int
    request: Request
    slot: Slot
    pending: int = 0
    """Parts of it that are being staged, or on the GPU."""
    result: Result | None = None
    returned: list[int] = field(default_factory=list)


@dataclass
class _Part:
    """Rows of a piece that share a stage slot."""

    of: _Task
    rows: tuple[int, ...]
    attempts: int = 0
    stage: Slot | None = None


class GpuLane:
    """A device's part of lane number `number`. `stage` has a stager prepare a request; `submit` passes a part in its
    stage slot, for a batch's slot under its layout, to the training process."""

    def __init__(
        self,
        number: int,
        events: Events,
        slots: Sequence[Slot],
        stage: Callable[[int, int, Request, Slot], None],
        submit: Callable[[int, Slot, Slot, bytes], None],
    ) -> None:
        self._number = number
        self._events = events
        self._stage = stage
        self._submit = submit
        self._slots = deque(slots)
        self._stagers: deque[int] = deque()
        """Those that are idle."""
        self._staging: dict[int, tuple[int, _Part]] = {}
        """Stager to what it does."""
        self._waiting: deque[_Part] = deque()
        self._flying: dict[int, _Part] = {}
        self._next = 0
        self.lost = False
        """The device can do no more: what comes is returned."""

    # what the coordinator calls

    def run(self, task: int, index: int, request: Request, slot: Slot) -> None:
        """Have the lane run a piece of a task."""
        part = _Part(_Task(task, index, request, slot, pending=1), request.rows)
        if self.lost:
            self._return(part)
        else:
            self._waiting.append(part)
        self._proceed()

    def stager_ready(self, stager: int) -> None:
        """A stager takes requests from now on."""
        self._stagers.append(stager)
        self._proceed()

    def stager_done(self, stager: int, result: Result) -> None:
        """A stager has prepared what it was given, or the beginning of it."""
        number, part = self._staging.pop(stager)
        self._stagers.append(stager)
        part.of.returned += result.returned
        if result.layout is not None:
            part.of.result = result
        if result.left:
            part.of.pending += 1
            self._waiting.appendleft(_Part(part.of, result.left))
        if self.lost:
            part.of.returned += part.rows
        if self.lost or result.layout is None:
            self._land(part)
        else:
            assert part.stage is not None
            self._flying[number] = part
            self._submit(number, part.stage, part.of.slot, result.layout)
        self._proceed()

    def stager_lost(self, stager: int) -> None:
        """A stager is dead: what it did is done again, by another or by the CPU lanes."""
        if stager in self._stagers:
            self._stagers.remove(stager)
        if stager not in self._staging:
            return
        _, part = self._staging.pop(stager)
        if part.attempts < _ATTEMPTS and not self.lost:
            self._free(part)
            self._waiting.appendleft(part)
        else:
            self._return(part)
        self._proceed()

    def landed(self, number: int, failed: Sequence[int], seconds: float) -> None:
        """The GPU is done with a part; `failed` are rows of the batch that it could not decode."""
        part = self._flying.pop(number)
        part.of.returned += failed
        self._land(part, seconds)
        self._proceed()

    def lose(self) -> None:
        """The GPU can do no more, and does nothing now: all that was begun is returned."""
        self.lost = True
        for part in [*self._waiting, *self._flying.values()]:
            self._return(part)
        self._waiting.clear()
        self._flying.clear()

    # inside

    def _proceed(self) -> None:
        while self._waiting and self._stagers and self._slots:
            part = self._waiting.popleft()
            part.stage = self._slots.popleft()
            part.attempts += 1
            stager = self._stagers.popleft()
            number = self._next
            self._next += 1
            self._staging[stager] = (number, part)
            self._stage(stager, number, replace(part.of.request, rows=part.rows, stage=part.stage), part.of.slot)

    def _return(self, part: _Part) -> None:
        part.of.returned += part.rows
        self._land(part)

    def _free(self, part: _Part) -> None:
        if part.stage is not None:
            self._slots.append(part.stage)
            part.stage = None

    def _land(self, part: _Part, seconds: float = 0.0) -> None:
        self._free(part)
        whole = part.of
        whole.pending -= 1
        if whole.pending:
            return
        rows = tuple(sorted(set(whole.returned)))
        result = replace(whole.result, returned=rows, left=()) if whole.result else Result(returned=rows)
        answer: Answer = (whole.index, result, -1)
        self._events.lane_done(self._number, whole.task, [answer], seconds, len(whole.request.rows) - len(rows))

    def stats(self) -> dict[str, Any]:
        """What is where."""
        return {"staging": len(self._staging), "flying": len(self._flying), "waiting": len(self._waiting)}
