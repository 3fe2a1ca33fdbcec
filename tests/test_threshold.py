"""The last-minute threshold: how it is searched, what it holds back, and what that is good for."""

from __future__ import annotations

import random
import statistics

import pytest

from penstock.lanes.null import Pace, steady
from penstock.schedule import Assign, BatchSpec, Instruction, Scheduler, Threshold
from simulation import Kind, Simulation


def judged(threshold: Threshold, ends: str, step: int = 4, most: int = 100) -> list[int]:
    """What the threshold is after each of these batches, of which the small end or the large one was done last."""
    values = []
    for end in ends:
        threshold.judge(small_last=end == "s", step=step, most=most)
        values.append(threshold.rows)
    return values


def test_it_starts_at_zero_and_follows_the_busier_end() -> None:
    threshold = Threshold()
    assert threshold.rows == 0
    assert judged(threshold, "sssl") == [4, 8, 12, 8]


def test_it_stays_between_zero_and_the_rows_of_a_batch() -> None:
    assert judged(Threshold(), "lls") == [0, 0, 4]
    assert judged(Threshold(), "sss", most=10) == [4, 8, 10]


def test_a_small_batch_does_not_lower_what_larger_ones_need() -> None:
    threshold = Threshold()
    judged(threshold, "sssss")
    assert judged(threshold, "s", most=3) == [20]


def test_it_freezes_when_it_oscillates() -> None:
    threshold = Threshold()
    judged(threshold, "ssss" + "lsls")
    assert threshold.frozen
    assert threshold.rows == 16, "the upper of the two values between which it went"
    assert judged(threshold, "sssslll") == [16] * 7


def test_odd_batches_on_the_way_do_not_end_the_search() -> None:
    threshold = Threshold()
    assert judged(threshold, "sssl" * 6)[-1] == 48
    assert not threshold.frozen


def test_the_search_goes_on_from_where_it_was() -> None:
    threshold = Threshold()
    judged(threshold, "ssss" + "lsls")
    found = threshold.rows
    threshold.search()
    assert judged(threshold, "s") == [found + 4]


@pytest.mark.parametrize("balance", [0, 30, 80])
def test_it_ends_near_the_balance_though_batches_differ(balance: int) -> None:
    found = []
    for seed in range(40):
        rng = random.Random(seed)
        threshold = Threshold()
        for _ in range(400):
            threshold.judge(small_last=threshold.rows < balance + rng.gauss(0, 12), step=4, most=128)
        assert threshold.frozen or balance == 0
        found.append(threshold.rows)
    assert abs(statistics.median(found) - balance) <= 12


# what it holds back


def assigned(instructions: list[Instruction]) -> list[Assign]:
    return [instruction for instruction in instructions if isinstance(instruction, Assign)]


def rows_of(instructions: list[Instruction], lane: int) -> list[tuple[int, int]]:
    """Batch and number of rows of each piece that the lane was assigned."""
    return [
        (piece.seq, len(piece.rows)) for task in assigned(instructions) if task.lane == lane for piece in task.pieces
    ]


SMALL, LARGE = 0, 1


def both(threshold: int, *, small_depth: int = 4, large_depth: int = 1) -> Scheduler:
    """A lane of each end, of grain 2 and 4."""
    scheduler = Scheduler()
    scheduler.grain = 2
    scheduler.lane_joined(LARGE, depth=large_depth, large_end=True, grain=4)
    scheduler.lane_joined(SMALL, depth=small_depth)
    scheduler.threshold.rows = threshold
    return scheduler


def test_the_last_rows_are_left_to_the_large_end() -> None:
    scheduler = both(5)
    work = scheduler.batch_opened(BatchSpec(0, 12))
    assert rows_of(work, LARGE) == [(0, 4)]
    assert rows_of(work, SMALL) == [(0, 2), (0, 1)], "8 rows were left, 5 of which are not for the small end"
    (task,) = [task for task in assigned(work) if task.lane == LARGE]
    assert rows_of(scheduler.piece_done(LARGE, task.task, 0), LARGE) == [(0, 4)]


def test_lanes_of_the_small_end_go_on_with_the_next_batch() -> None:
    scheduler = both(5)
    first = scheduler.batch_opened(BatchSpec(0, 12))
    assert rows_of(first, SMALL) == [(0, 2), (0, 1)]
    assert rows_of(scheduler.batch_opened(BatchSpec(1, 4)), SMALL) == [(1, 2), (1, 2)]


def test_a_small_end_that_rests_leaves_all_that_the_large_end_can_take() -> None:
    scheduler = both(0)
    scheduler.small_end_rests(True)
    work = scheduler.batch_opened(BatchSpec(0, 12))
    assert rows_of(work, SMALL) == []
    (task, *_) = assigned(work)
    returned = scheduler.piece_done(LARGE, task.task, 0, returned=task.pieces[0].rows[:1])
    assert rows_of(returned, SMALL) == [(0, 1)], "what the large end cannot take"
    assert rows_of(scheduler.small_end_rests(False), SMALL) != []


def test_a_small_end_cannot_rest_alone() -> None:
    scheduler = both(0)
    scheduler.small_end_rests(True)
    scheduler.batch_opened(BatchSpec(0, 12))
    assert rows_of(scheduler.lane_lost(LARGE, for_good=True), SMALL) != []


def test_only_the_batch_that_the_large_end_takes_from_next_is_held() -> None:
    scheduler = both(100, small_depth=100)
    for seq in range(4):
        work = scheduler.batch_opened(BatchSpec(seq, 8))
        assert rows_of(work, SMALL) == ([(seq, 2)] * 4 if seq else [])


def test_rows_are_held_again_when_an_older_batch_was_in_between() -> None:
    scheduler = both(0, small_depth=1)
    scheduler.lane_joined(2, depth=1)
    tasks = {task.lane: task.task for task in assigned(scheduler.batch_opened(BatchSpec(0, 8)))}
    scheduler.threshold.rows = 6
    scheduler.batch_opened(BatchSpec(1, 8))
    (task,) = assigned(scheduler.piece_done(SMALL, tasks[SMALL], 0))
    assert task.pieces[0].seq == 1
    assert scheduler.piece_done(SMALL, task.task, 0) == []
    work = scheduler.lane_lost(2, blame=0)
    assert rows_of(work, SMALL) == [(0, 2)]
    assert scheduler.piece_done(SMALL, assigned(work)[0].task, 0) == [], "the last 6 rows of batch 1 are held as before"
    assert rows_of(scheduler.piece_done(LARGE, tasks[LARGE], 0), LARGE) == [(1, 4)]
    scheduler.threshold.rows = 0
    assert rows_of(scheduler.lane_joined(2), 2) == [(1, 1)], "the last two are shared with the other lane"


def test_without_lanes_of_the_large_end_nothing_is_held() -> None:
    scheduler = Scheduler()
    scheduler.threshold.rows = 100
    scheduler.grain = 2
    scheduler.lane_joined(SMALL, depth=9)
    assert rows_of(scheduler.batch_opened(BatchSpec(0, 8)), SMALL) == [(0, 2)] * 4


@pytest.mark.parametrize("how", ["lost", "lost for good", "retired", "without capacity"])
def test_nothing_is_held_once_no_lane_of_the_large_end_takes_tasks(how: str) -> None:
    scheduler = both(100, small_depth=9)
    (task,) = assigned(scheduler.batch_opened(BatchSpec(0, 12)))
    assert task.lane == LARGE
    if how == "retired":
        work = scheduler.lane_retired(LARGE)
    elif how == "without capacity":
        scheduler.lane_depth(LARGE, 0)
        work = scheduler.piece_done(LARGE, task.task, 0)
    else:
        work = scheduler.lane_lost(LARGE, blame=0, for_good=how == "lost for good")
    assert sum(rows for _, rows in rows_of(work, SMALL)) == (12 if "lost" in how else 8)


def test_nothing_is_held_of_a_batch_of_which_rows_were_returned() -> None:
    scheduler = both(100, small_depth=9, large_depth=2)
    task, _ = assigned(scheduler.batch_opened(BatchSpec(0, 16)))
    work = scheduler.piece_done(LARGE, task.task, 0, returned=task.pieces[0].rows[:1])
    assert rows_of(work, SMALL)[0] == (0, 1), "the one that was returned"
    assert sum(rows for _, rows in rows_of(work, SMALL) + rows_of(work, LARGE)) == 9


# when it is searched


def frozen() -> Scheduler:
    scheduler = both(8)
    scheduler.threshold.frozen = True
    return scheduler


def test_it_is_searched_again_when_capacity_changes() -> None:
    changes = {
        "a lane more": lambda scheduler: scheduler.lane_joined(2),
        "a lane less": lambda scheduler: scheduler.lane_retired(SMALL),
        "a lane lost for good": lambda scheduler: scheduler.lane_lost(SMALL, for_good=True),
        "another depth": lambda scheduler: scheduler.lane_depth(LARGE, 2),
        "on request": lambda scheduler: scheduler.threshold.search(),
    }
    for change in changes.values():
        scheduler = frozen()
        change(scheduler)
        assert not scheduler.threshold.frozen
        assert scheduler.threshold.rows == 8


def test_a_lane_that_is_replaced_and_a_depth_that_stays_change_nothing() -> None:
    scheduler = frozen()
    scheduler.lane_lost(SMALL)
    scheduler.lane_joined(SMALL, depth=4)
    scheduler.lane_depth(LARGE, 1)
    assert scheduler.threshold.frozen


def finish(scheduler: Scheduler, seq: int, last: int, **spec: object) -> None:
    """A batch of which this lane is done last."""
    work = assigned(scheduler.batch_opened(BatchSpec(seq, 8, **spec)))  # type: ignore[arg-type]
    while work:
        task = work.pop(next((i for i, task in enumerate(work) if task.lane != last), 0))
        for index in range(len(task.pieces)):
            work += assigned(scheduler.piece_done(task.lane, task.task, index))
    assert not scheduler.window


def test_batches_that_say_nothing_of_the_balance_do_not_count() -> None:
    scheduler = both(0)
    for seq, spec in enumerate([{"whole": True}, {"lane": SMALL}, {"large": [True, False] * 4}]):
        finish(scheduler, seq, SMALL, **spec)
    assert scheduler.threshold.rows == 0
    finish(scheduler, 3, SMALL)
    assert scheduler.threshold.rows == 2
    finish(scheduler, 4, LARGE)
    assert scheduler.threshold.rows == 0


def test_a_batch_with_rows_done_again_does_not_count() -> None:
    scheduler = both(0, small_depth=1)
    work = assigned(scheduler.batch_opened(BatchSpec(0, 4)))
    large = next(task for task in work if task.lane == LARGE)
    work = assigned(scheduler.piece_done(LARGE, large.task, 0, returned=large.pieces[0].rows))
    while scheduler.window:
        task = scheduler._lanes[SMALL].tasks
        scheduler.piece_done(SMALL, next(iter(task)), 0)
    assert scheduler.threshold.rows == 0


def test_the_search_can_be_left_out() -> None:
    scheduler = Scheduler(leave_last=False)
    scheduler.grain = 2
    scheduler.lane_joined(LARGE, depth=1, large_end=True)
    scheduler.lane_joined(SMALL, depth=1)
    for seq in range(5):
        finish(scheduler, seq, SMALL)
    assert scheduler.threshold.rows == 0


# what it is good for


def uneven(pace: Pace, rng: random.Random, part: float) -> Pace:
    """The same pace on average; each piece takes up to that part more or less."""
    return lambda request: pace(request) * rng.uniform(1 - part, 1 + part)


def machine(name: str, part: float) -> tuple[list[Kind], int, int]:
    """Eight lanes of the small end and one of the large one; rows of a batch, rows of a tiny-batch."""
    rng = random.Random(0)
    small, large, grain, rows = {
        "heavy augmentation": (steady(0.021), Kind(steady(0.0005, 0.002), True, grain=16), 1, 128),
        "heavy, cut coarsely": (steady(0.021), Kind(steady(0.0005, 0.002), True, grain=16), 4, 128),
        "photographs": (steady(0.002), Kind(steady(0.0001, 0.001), True, grain=32), 5, 256),
    }[name]
    uneven_large = Kind(uneven(large.pace, rng, part), True, grain=large.grain)
    return [*[Kind(uneven(small, rng, part))] * 8, uneven_large], rows, grain


def measured(name: str, part: float, window: int, leave_last: bool, batches: int = 240) -> tuple[float, float]:
    """Of the second half of the batches: seconds from the first piece to the last, and rows per second."""
    kinds, rows, grain = machine(name, part)
    specs = (BatchSpec(seq, rows) for seq in range(batches))
    simulation = Simulation(kinds, specs, window, grain, leave_last)
    simulation.run()
    half = batches // 2
    spans = [last - first for first, last in simulation.spans.values()]
    seconds = simulation.delivered[-window] - simulation.delivered[half]
    return statistics.mean(spans[half:]), (batches - window - half) * rows / seconds


@pytest.mark.parametrize("part", [0.0, 0.3])
@pytest.mark.parametrize("name", ["heavy augmentation", "heavy, cut coarsely", "photographs"])
def test_it_shortens_the_tail_of_a_batch(name: str, part: float) -> None:
    tail_without, rate_without = measured(name, part, 1, False)
    tail, rate = measured(name, part, 1, True)
    assert tail < 0.9 * tail_without
    assert rate > 1.1 * rate_without


@pytest.mark.parametrize("window", [2, 8])
@pytest.mark.parametrize("part", [0.0, 0.3])
@pytest.mark.parametrize("name", ["heavy augmentation", "heavy, cut coarsely", "photographs"])
def test_it_costs_nothing_where_lanes_can_go_on_with_the_next_batch(name: str, part: float, window: int) -> None:
    tail_without, rate_without = measured(name, part, window, False)
    tail, rate = measured(name, part, window, True)
    assert tail < 1.02 * tail_without
    assert rate > 0.98 * rate_without


def test_it_follows_when_lanes_come() -> None:
    """Lanes that take 50 times as long over a row as the one of the large end: with more of them less is left to it."""
    small, large = Kind(steady(0.005), depth=1), Kind(steady(0.0001), True, depth=1, grain=8)
    simulation = Simulation([small] * 2 + [large], (BatchSpec(seq, 64) for seq in range(400)), grain=1)
    simulation.run(1.0)
    assert simulation.scheduler.threshold.frozen
    before = simulation.scheduler.threshold.rows
    for _ in range(14):
        simulation.add(small)
    simulation.run(0.02)
    assert not simulation.scheduler.threshold.frozen
    simulation.run()
    assert simulation.scheduler.threshold.frozen
    assert simulation.scheduler.threshold.rows != before
    assert len(simulation.delivered) == 400
