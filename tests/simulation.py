"""The scheduler on null lanes: a coordinator that only counts, in time that does not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.lanes import Answer
from penstock.lanes.null import Clock, NullLanes, Pace
from penstock.schedule import Assign, BatchSpec, Deliver, Instruction, Piece, Scheduler
from penstock.work import Failure, Request

__all__ = ["Kind", "Simulation"]


@dataclass(frozen=True)
class Kind:
    """How lanes of one pace take part."""

    pace: Pace
    large_end: bool = False
    depth: int = 2
    grain: int | None = None


@dataclass
class Simulation:
    """Implements `penstock.lanes.Events`. Runs batches through a scheduler, `window` of them at a time."""

    kinds: Sequence[Kind]
    batches: Iterator[BatchSpec]
    window: int = 1
    grain: int = 4
    leave_last: bool = True
    returned: Callable[[Piece], Sequence[int]] = lambda piece: ()
    """Rows that lanes of the large end return."""
    clock: Clock = field(default_factory=Clock)
    filled: dict[tuple[int, int], int] = field(default_factory=dict)
    """Batch and row to the lane that filled it."""
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When the first and the last piece of a batch were done."""
    delivered: list[float] = field(default_factory=list)
    """When each batch was."""
    others: list[Instruction] = field(default_factory=list)
    """What else the scheduler said."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(leave_last=self.leave_last)
        self.scheduler.grain = self.grain
        self.lanes = NullLanes(self.clock, self, [kind.pace for kind in self.kinds])
        self.specs: dict[int, BatchSpec] = {}
        self._all_kinds = list(self.kinds)

    def run(self, seconds: float = float("inf")) -> None:
        """All batches, or for that long."""
        if self.clock.now == 0.0:
            self.lanes.start()
        end = self.clock.now + seconds
        self._fill()
        while self.clock.now < end and self.clock.step():
            self._fill()

    def add(self, kind: Kind) -> int:
        """One more lane."""
        self._all_kinds.append(kind)
        return self.lanes.add(kind.pace)

    def _fill(self) -> None:
        while self.scheduler.window < self.window and (spec := next(self.batches, None)) is not None:
            self.specs[spec.seq] = spec
            self.act(self.scheduler.batch_opened(spec))

    def act(self, instructions: Sequence[Instruction]) -> None:
        """Do what the scheduler says."""
        for instruction in instructions:
            if isinstance(instruction, Assign):
                pieces = [(self._request(piece), None) for piece in instruction.pieces]
                self.lanes.run(instruction.lane, instruction.task, pieces)
            elif isinstance(instruction, Deliver):
                self.delivered.append(self.clock.now)
            else:
                self.others.append(instruction)

    def _request(self, piece: Piece) -> Request:
        spec = self.specs[piece.seq]
        return Request(piece.seq, piece.rows, spec.rows, piece.whole, piece.crashed, spec.payload)

    # events

    def lane_ready(self, lane: int, pid: int) -> None:
        kind = self._all_kinds[lane]
        self.act(self.scheduler.lane_joined(lane, depth=kind.depth, large_end=kind.large_end, grain=kind.grain))

    def lane_done(self, lane: int, task: int, answers: Sequence[Answer], seconds: float, rows: int) -> None:
        for index, _, _ in answers:
            piece = self.scheduler.piece(lane, task, index)
            returned = self.returned(piece) if self._all_kinds[lane].large_end else ()
            for row in set(piece.rows).difference(returned):
                assert (piece.seq, row) not in self.filled
                self.filled[piece.seq, row] = lane
            first, _ = self.spans.get(piece.seq, (self.clock.now, 0.0))
            self.spans[piece.seq] = first, self.clock.now
            self.act(self.scheduler.piece_done(lane, task, index, returned=returned))

    def lane_lost(self, lane: int, blame: int) -> None:
        self.act(self.scheduler.lane_lost(lane, blame=blame))

    def lanes_failed(self, error: Failure) -> None:
        raise AssertionError(error.text)
