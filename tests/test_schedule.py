"""The scheduler's laws, checked against a model of what lanes were told and what they answered."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.schedule import Assign, BatchSpec, Deliver, Dismiss, End, Instruction, Piece, Scheduler

LIMIT = 3


@dataclass
class Batch:
    """What must be true of a batch."""

    spec: BatchSpec
    whole: bool
    fresh: set[int] = field(default_factory=set)
    """Rows that were never assigned since the batch was begun."""
    redo: set[int] = field(default_factory=set)
    filled: Counter[int] = field(default_factory=Counter)
    blame: Counter[frozenset[int]] = field(default_factory=Counter)
    returned: set[int] = field(default_factory=set)
    """Rows that a lane of the large end gave back."""
    cancelled: bool = False
    stranded: End | None = None
    """What was said of it."""

    def __post_init__(self) -> None:
        self.fresh = set(range(self.spec.rows))

    def begin_whole(self) -> None:
        self.fresh, self.redo, self.filled = set(range(self.spec.rows)), set(), Counter()

    @property
    def complete(self) -> bool:
        return len(self.filled) == self.spec.rows

    @property
    def waiting(self) -> set[int]:
        return self.fresh | self.redo

    def tie(self, row: int) -> End | None:
        """The end whose lanes alone may take the row now."""
        if self.whole:
            return "small" if self.spec.lane is None else None
        if row in self.returned:
            return "small"
        return None if self.spec.large is None else "large" if self.spec.large[row] else "small"

    def waits_for(self, end: End) -> bool:
        """Rows wait that lanes of this end may take."""
        return self.spec.lane is None and any(self.tie(row) in (None, end) for row in self.waiting)


class Laws(RuleBasedStateMachine):
    """Random events; every instruction is held against the module's text."""

    order = "plan"

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(order=self.order, blame_limit=LIMIT)
        self.lanes: dict[int, dict[int, list[Piece | None]]] = {}
        self.depth: dict[int, int] = {}
        self.end: dict[int, End] = {}
        self.grain: dict[int, int | None] = {}
        self.retired: set[int] = set()
        self.expected: dict[int, End] = {}
        """Lanes that are there, or to be replaced."""
        self.gone: set[End] = set()
        self.batches: dict[int, Batch] = {}
        self.seq = 0
        self.told = True
        """The scheduler was asked for instructions since capacity last changed."""

    def running(self) -> list[tuple[int, int, int, Piece]]:
        return [
            (lane, task, index, piece)
            for lane, tasks in self.lanes.items()
            for task, pieces in tasks.items()
            for index, piece in enumerate(pieces)
            if piece is not None
        ]

    def on_lanes(self, seq: int) -> list[int]:
        return [row for *_, piece in self.running() if piece.seq == seq for row in piece.rows]

    def alive(self) -> list[Batch]:
        return [batch for batch in self.batches.values() if not batch.cancelled]

    def has_room(self, lane: int) -> bool:
        return lane not in self.retired and len(self.lanes[lane]) < self.depth[lane]

    def keep(self, batch: Batch) -> int:
        """Fresh rows that lanes of the small end must leave."""
        active = any(self.end[n] == "large" and self.depth[n] and n not in self.retired for n in self.lanes)
        oldest = next((other for other in self.alive() if other.waits_for("large")), None)
        shared = batch.spec.large is None and not batch.whole
        if active and shared and self.scheduler.rests:
            return batch.spec.rows
        shared = shared and not batch.returned
        return self.scheduler.threshold.rows if active and shared and batch is oldest else 0

    def obey(self, instructions: list[Instruction]) -> None:
        self.told = True
        for instruction in instructions:
            if isinstance(instruction, Deliver):
                self.delivered(instruction)
            elif isinstance(instruction, Assign):
                self.assigned(instruction)
            elif isinstance(instruction, Dismiss):
                self.retired.remove(instruction.lane)
                assert not self.lanes.pop(instruction.lane)
            else:
                batch = self.batches[instruction.seq]
                assert any(batch.tie(row) == instruction.end for row in batch.waiting)
                assert instruction.end in self.gone
                assert instruction.end != batch.stranded
                batch.stranded = instruction.end

    def delivered(self, deliver: Deliver) -> None:
        batch = self.batches.pop(deliver.seq)
        assert not batch.cancelled
        assert batch.filled == Counter(range(batch.spec.rows)), "every row exactly once"
        if self.order == "plan":
            assert all(seq > deliver.seq for seq, other in self.batches.items() if not other.cancelled)

    def assigned(self, assign: Assign) -> None:
        tasks = self.lanes[assign.lane]
        assert assign.task not in tasks
        assert self.has_room(assign.lane)
        assert assign.pieces
        for piece in assign.pieces:
            self.check_piece(assign, piece)
            tasks.setdefault(assign.task, []).append(piece)
        rows = [len(piece.rows) for piece in assign.pieces]
        grain = self.grain[assign.lane] or self.scheduler.grain
        assert sum(rows[:-1]) < grain, "no more batches once the grain is reached"
        assert sum(rows) <= grain or assign.pieces[-1].whole

    def check_piece(self, assign: Assign, piece: Piece) -> None:
        batch = self.batches[piece.seq]
        rows = set(piece.rows)
        assert rows
        assert len(rows) == len(piece.rows)
        assert not batch.cancelled
        assert batch.spec.lane in (None, assign.lane)
        assert {batch.tie(row) for row in rows} == {piece.end}
        assert piece.end in (None, self.end[assign.lane])
        assert piece.whole == batch.whole
        assert rows <= batch.fresh | batch.redo, "waiting: neither on another lane nor filled"
        assert not piece.whole or rows == set(range(batch.spec.rows))
        blame = batch.blame[frozenset(rows)]
        assert piece.crashed == (blame >= LIMIT)
        if any(row in key for key in batch.blame for row in rows) and blame:
            assert len(assign.pieces) == 1, "what is blamed runs alone"
            assert piece.whole or len(rows) == 1
        if rows <= batch.fresh and not piece.whole:
            self.check_end(self.end[assign.lane], batch, rows)
            self.check_share(assign.lane, batch, rows)
        batch.fresh -= rows
        batch.redo -= rows

    def check_end(self, end: End, batch: Batch, rows: set[int]) -> None:
        sizes = batch.spec.sizes or range(batch.spec.rows)
        left = batch.fresh - rows
        mine, others = [sizes[row] for row in rows], [sizes[row] for row in left if batch.tie(row) in (None, end)]
        if others and end == "large":
            assert min(mine) >= max(others)
        elif others:
            assert max(mine) <= min(others)
        if end == "small" and batch.spec.lane is None:
            assert len(left) >= self.keep(batch), "the last rows are left to the large end"

    def check_share(self, lane: int, batch: Batch, rows: set[int]) -> None:
        if batch is not self.alive()[0] or self.end[lane] == "large" or self.grain[lane] or batch.spec.lane is not None:
            return
        mine = sum(batch.tie(row) in (None, "small") for row in batch.fresh)
        lanes = list(self.expected.values()).count("small")
        assert len(rows) <= max(math.ceil(mine / lanes), math.ceil(self.scheduler.grain / 2)), "no more than its share"

    # events

    @rule(
        rows=st.integers(0, 9),
        sizes=st.none() | st.lists(st.integers(0, 5), min_size=9, max_size=9),
        whole=st.sampled_from((False, False, True)),
        lane=st.none() | st.none() | st.none() | st.integers(0, 3),
        large=st.none() | st.none() | st.none() | st.lists(st.booleans(), min_size=9, max_size=9),
        gap=st.integers(1, 3),
    )
    def open(
        self,
        rows: int,
        sizes: list[int] | None,
        whole: bool,
        lane: int | None,
        large: list[bool] | None,
        gap: int,
    ) -> None:
        tied = large[:rows] if large and lane is None else None
        spec = BatchSpec(self.seq, rows, None, sizes and sizes[:rows], whole, lane, tied)
        self.batches[self.seq] = Batch(spec, whole)
        self.seq += gap
        self.obey(self.scheduler.batch_opened(spec))

    @rule(
        lane=st.integers(0, 3), depth=st.integers(1, 3), large_end=st.booleans(), grain=st.none() | st.integers(1, 12)
    )
    def join(self, lane: int, depth: int, large_end: bool, grain: int | None) -> None:
        if lane in self.lanes:
            return
        end: End = "large" if large_end else "small"
        self.lanes[lane], self.depth[lane], self.end[lane], self.grain[lane] = {}, depth, end, grain
        if self.expected.get(lane) != end:
            self.forget(lane)
            self.expected[lane] = end
            self.gone.discard(end)
        self.obey(self.scheduler.lane_joined(lane, depth=depth, large_end=large_end, grain=grain))

    def stranded_ends(self, batch: Batch) -> set[End]:
        return {end for row in batch.waiting if (end := batch.tie(row)) in self.gone}

    def forget(self, lane: int) -> None:
        end = self.expected.pop(lane, None)
        if end is not None and end not in self.expected.values():
            self.gone.add(end)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), blame=st.integers(0, 3), for_good=st.booleans())
    def lose(self, data: st.DataObject, blame: int, for_good: bool) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        self.retired.discard(lane)
        if for_good:
            self.forget(lane)
        for position, pieces in enumerate(self.lanes.pop(lane).values()):
            for piece in pieces:
                if piece is not None:
                    self.back(piece, blame if position == 0 else 0)
        self.obey(self.scheduler.lane_lost(lane, blame=blame, for_good=for_good))

    @precondition(lambda self: set(self.lanes) - self.retired)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(set(self.lanes) - self.retired)))
        self.retired.add(lane)
        self.forget(lane)
        self.obey(self.scheduler.lane_retired(lane))

    def back(self, piece: Piece, blame: int) -> None:
        batch = self.batches[piece.seq]
        if batch.whole and not piece.whole:
            self.begin_when_quiet(piece.seq)
            return
        batch.redo |= set(piece.rows)
        if blame:
            for rows in [piece.rows] if piece.whole else [(row,) for row in piece.rows]:
                batch.blame[frozenset(rows)] += blame

    def begin_when_quiet(self, seq: int) -> None:
        if not self.on_lanes(seq):
            self.batches[seq].begin_whole()

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        lane, task, index, piece = data.draw(st.sampled_from(self.running()))
        batch = self.batches[piece.seq]
        self.ended(lane, task, index)
        if batch.whole and not piece.whole:
            self.begin_when_quiet(piece.seq)
        else:
            batch.filled.update(piece.rows)
        self.obey(self.scheduler.piece_done(lane, task, index))

    @rule(data=st.data(), pieces=st.integers(2, 6))
    def go_on(self, data: st.DataObject, pieces: int) -> None:
        """What happens most."""
        for _ in range(pieces):
            if self.running():
                self.done(data)

    def returnable(self) -> list[tuple[int, int, int, Piece]]:
        return [
            place
            for place in self.running()
            if self.end[place[0]] == "large" and self.batches[place[3].seq].spec.lane is None
        ]

    @precondition(lambda self: self.returnable())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lane, task, index, piece = data.draw(st.sampled_from(self.returnable()))
        returned = data.draw(st.sets(st.sampled_from(piece.rows), min_size=1))
        batch = self.batches[piece.seq]
        self.ended(lane, task, index)
        batch.returned |= returned
        if batch.whole and not piece.whole:
            self.begin_when_quiet(piece.seq)
        else:
            batch.redo |= returned
            batch.filled.update(set(piece.rows) - returned)
        self.obey(self.scheduler.piece_done(lane, task, index, returned=returned))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        lane, task, index, piece = data.draw(st.sampled_from(self.running()))
        batch = self.batches[piece.seq]
        self.ended(lane, task, index)
        batch.whole, batch.fresh, batch.redo, batch.filled = True, set(), set(), Counter()
        batch.stranded = None
        self.begin_when_quiet(piece.seq)
        self.obey(self.scheduler.piece_refused(lane, task, index))

    def ended(self, lane: int, task: int, index: int) -> None:
        pieces = self.lanes[lane][task]
        pieces[index] = None
        if not any(pieces):
            del self.lanes[lane][task]

    @rule(never=st.integers(0, 4))
    def cancel(self, never: int) -> None:
        if never:
            return
        for batch in self.batches.values():
            batch.cancelled = True
        self.scheduler.cancel()

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), depth=st.integers(0, 3))
    def deepen(self, data: st.DataObject, depth: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        self.depth[lane] = depth
        self.told = False
        self.scheduler.lane_depth(lane, depth)

    @rule(grain=st.integers(1, 12))
    def regrain(self, grain: int) -> None:
        self.scheduler.grain = grain

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), grain=st.integers(1, 12))
    def regrain_lane(self, data: st.DataObject, grain: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        self.grain[lane] = grain
        self.scheduler.lane_grain(lane, grain)

    @rule(rows=st.integers(0, 9))
    def leave_last(self, rows: int) -> None:
        """The search would take many batches to get there."""
        self.scheduler.threshold.rows = rows
        self.told = False

    @rule(rests=st.booleans())
    def rest(self, rests: bool) -> None:
        self.obey(self.scheduler.small_end_rests(rests))

    # what is always so

    @invariant()
    def books_agree(self) -> None:
        busy = {piece.seq for *_, piece in self.running()}
        for seq in [seq for seq, batch in self.batches.items() if batch.cancelled and seq not in busy]:
            del self.batches[seq]
        assert self.scheduler.busy == busy
        assert self.scheduler.window == sum(not batch.cancelled for batch in self.batches.values())
        for lane, task, index, piece in self.running():
            assert self.scheduler.piece(lane, task, index) == piece
        for seq in busy:
            lanes = {lane for lane, _, _, piece in self.running() if piece.seq == seq}
            assert set(self.scheduler.working_on(seq)) == lanes

    @invariant()
    def each_row_is_in_one_place(self) -> None:
        for seq, batch in self.batches.items():
            on_lanes = Counter(self.on_lanes(seq))
            assert all(count == 1 for count in on_lanes.values())
            if not batch.cancelled and not (batch.whole and not batch.fresh | batch.redo | set(batch.filled)):
                everything = on_lanes + Counter(batch.fresh) + Counter(batch.redo) + batch.filled
                assert everything == Counter(range(batch.spec.rows))

    @invariant()
    def nothing_waits_that_could_go(self) -> None:
        alive = self.alive()
        if self.order == "ready":
            assert not any(batch.complete for batch in alive)
        elif alive:
            assert not min(alive, key=lambda batch: batch.spec.seq).complete
        room = {lane for lane in self.lanes if self.has_room(lane)}
        for batch in alive if self.told else []:
            if batch.spec.lane is not None:
                assert not batch.waiting or batch.spec.lane not in room
                continue
            if batch.waits_for("large"):
                assert not any(self.end[lane] == "large" for lane in room)
            if batch.waits_for("small") and (batch.redo or len(batch.fresh) > self.keep(batch)):
                assert not any(self.end[lane] == "small" for lane in room)

    @invariant()
    def none_is_kept_that_has_done_its_work(self) -> None:
        assert all(self.lanes[lane] for lane in self.retired)

    @invariant()
    def what_cannot_go_on_is_named(self) -> None:
        for batch in self.alive():
            ends = self.stranded_ends(batch)
            assert bool(ends) == (batch.stranded in ends)
            batch.stranded = batch.stranded if ends else None

    def teardown(self) -> None:
        """Whatever happened: lanes that work bring every batch to its end."""
        for lane in self.lanes:
            self.depth[lane] = 2
            self.scheduler.lane_depth(lane, 2)
        self.rest(False)
        while absent := [lane for lane in range(6) if lane not in self.lanes]:
            for lane in absent:
                self.join(lane, 2, lane == 5, None)
            self.finish()
        self.books_agree()
        assert not self.batches

    def finish(self) -> None:
        while running := self.running():
            lane, task, index, piece = running[0]
            batch = self.batches[piece.seq]
            self.ended(lane, task, index)
            if batch.whole and not piece.whole:
                self.begin_when_quiet(piece.seq)
            else:
                batch.filled.update(piece.rows)
            self.obey(self.scheduler.piece_done(lane, task, index))


class ReadyLaws(Laws):
    order = "ready"


class TogetherLaws(Laws):
    """From the start there are lanes of both ends, and the last rows are left to the large one."""

    def __init__(self) -> None:
        super().__init__()
        self.leave_last(4)
        self.join(0, 2, False, 1)
        self.join(1, 1, True, 2)


TestPlan = Laws.TestCase
TestReady = ReadyLaws.TestCase
TestTogether = TogetherLaws.TestCase
TestPlan.settings = TestReady.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTogether.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


def assigned(instructions: list[Instruction]) -> list[Assign]:
    return [instruction for instruction in instructions if isinstance(instruction, Assign)]


def test_the_sample_that_kills_its_lane_is_found_and_no_other_is_accused() -> None:
    """Pieces of a task are answered for together, so the first unanswered one need not be the one that kills."""
    scheduler = Scheduler(blame_limit=12)
    scheduler.grain = 8
    scheduler.lane_joined(0, depth=2)
    work: list[Assign] = []
    for seq in range(8):
        work += assigned(scheduler.batch_opened(BatchSpec(seq, 4, whole=seq % 2 == 0)))
    killer, crashed, deaths = (5, 2), [], 0
    while work:
        assign = work.pop(0)
        deadly = any(p.seq == killer[0] and killer[1] in p.rows and not p.crashed for p in assign.pieces)
        crashed += [piece for piece in assign.pieces if piece.crashed]
        if deadly:
            deaths += 1
            scheduler.lane_lost(0, blame=4)
            work = assigned(scheduler.lane_joined(0, depth=2))
            continue
        for index in range(len(assign.pieces)):
            work += assigned(scheduler.piece_done(0, assign.task, index))
    assert scheduler.window == 0
    assert [(piece.seq, piece.rows) for piece in crashed] == [(killer[0], (killer[1],))]
    assert deaths == 3


def test_a_lost_lane_with_several_pieces_of_a_cancelled_batch() -> None:
    scheduler = Scheduler()
    scheduler.lane_joined(0, depth=2)
    assert len(assigned(scheduler.batch_opened(BatchSpec(0, 4)))) == 2
    scheduler.cancel()
    assert scheduler.busy == {0}
    assert scheduler.lane_lost(0) == []
    assert scheduler.busy == set()
    assert scheduler.window == 0


def test_blame_for_a_row_does_not_count_against_its_whole_batch() -> None:
    scheduler = Scheduler(blame_limit=12)
    (task,) = [*assigned(scheduler.lane_joined(0, depth=1)), *assigned(scheduler.batch_opened(BatchSpec(0, 2)))]
    scheduler.lane_lost(0, blame=8)
    (task,) = assigned(scheduler.lane_joined(0, depth=1))
    while not task.pieces[0].alone:
        (task,) = assigned(scheduler.piece_done(0, task.task, 0))
    (task,) = assigned(scheduler.piece_refused(0, task.task, 0))
    assert task.pieces[0].whole
    scheduler.lane_lost(0, blame=8)
    (task,) = assigned(scheduler.lane_joined(0, depth=1))
    assert not task.pieces[0].crashed
    scheduler.lane_lost(0, blame=8)
    (task,) = assigned(scheduler.lane_joined(0, depth=1))
    assert task.pieces[0].crashed


def test_a_lane_that_was_lost_has_no_tasks_left_to_answer_for() -> None:
    scheduler = Scheduler()
    scheduler.lane_joined(0)
    old, *_ = assigned(scheduler.batch_opened(BatchSpec(0, 4)))
    scheduler.lane_lost(0)
    new = assigned(scheduler.lane_joined(0))
    assert old.task not in [assign.task for assign in new]
    with pytest.raises(KeyError):
        scheduler.piece_done(0, old.task, 0)


def test_a_lane_that_is_retired_while_it_is_being_replaced_is_dismissed_at_once() -> None:
    scheduler = Scheduler()
    scheduler.lane_joined(0)
    scheduler.lane_lost(0)
    assert scheduler.lane_retired(0) == [Dismiss(0)]


def test_a_large_piece_that_comes_back_is_cut_for_lanes_of_smaller_grain() -> None:
    scheduler = Scheduler()
    scheduler.grain = 2
    scheduler.lane_joined(0, depth=1, large_end=True, grain=8)
    scheduler.batch_opened(BatchSpec(0, 8))
    scheduler.lane_lost(0, blame=0)
    pieces = [piece for task in assigned(scheduler.lane_joined(1, depth=9)) for piece in task.pieces]
    assert [len(piece.rows) for piece in pieces] == [2, 2, 2, 2]


def test_lanes_share_what_is_left_of_the_batch_that_is_waited_for() -> None:
    scheduler = Scheduler()
    scheduler.grain = 20
    for lane in range(4):
        scheduler.lane_joined(lane, depth=3)
    sizes = [
        [len(piece.rows) for task in assigned(scheduler.batch_opened(BatchSpec(seq, 64))) for piece in task.pieces]
        for seq in range(2)
    ]
    assert sizes == [[16, 12, 10, 10, 10, 6], [20, 20, 20, 4]]


def test_losing_an_unknown_lane_is_nothing() -> None:
    assert Scheduler().lane_lost(7) == []


@pytest.mark.parametrize("grain", [1, 16])
def test_a_thousand_lanes(grain: int) -> None:
    """Measured on one core: 0.5 s for 20,000 rows one by one; the bound is for slow machines."""
    rng = random.Random(0)
    scheduler = Scheduler()
    scheduler.grain = grain
    started = time.process_time()
    running: list[tuple[int, int]] = []
    delivered = 0
    for lane in range(1000):
        scheduler.lane_joined(lane, large_end=lane % 4 == 0)
    instructions: list[Instruction] = []
    opened = 0
    while delivered < 400:
        while opened < 400 and scheduler.window < 100:
            sizes = [rng.randrange(1000) for _ in range(50)]
            instructions += scheduler.batch_opened(BatchSpec(opened, 50, sizes=sizes))
            opened += 1
        for instruction in instructions:
            if isinstance(instruction, Deliver):
                delivered += 1
            else:
                running += [(instruction.lane, instruction.task)] * len(instruction.pieces)
        index = rng.randrange(len(running)) if running else 0
        instructions = []
        if running:
            running[index], running[-1] = running[-1], running[index]
            lane, task = running.pop()
            left = scheduler._lanes[lane].tasks[task]
            instructions = scheduler.piece_done(lane, task, next(i for i, piece in enumerate(left) if piece.rows))
    assert time.process_time() - started < 5
