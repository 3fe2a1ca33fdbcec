"""Null lanes, and the scheduler on them: how lanes of both ends prepare batches together."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.lanes import Answer, Lanes
from penstock.lanes.null import Clock, NullLanes, Pace, steady
from penstock.schedule import BatchSpec, Dismiss, Piece, Stranded
from penstock.work import Failure, Request
from simulation import Kind, Simulation


@dataclass
class Heard:
    """Writes down what lanes report, and when."""

    clock: Clock
    said: list[tuple[object, ...]] = field(default_factory=list)

    def lane_ready(self, lane: int, pid: int) -> None:
        self.said.append((self.clock.now, "ready", lane))

    def lane_done(self, lane: int, task: int, answers: Sequence[Answer], seconds: float, rows: int) -> None:
        for index, result, _ in answers:
            assert len(result.missing) == rows
            self.said.append((self.clock.now, "done", lane, task, index, seconds))

    def lane_lost(self, lane: int, blame: int) -> None:
        self.said.append((self.clock.now, "lost", lane, blame))

    def lanes_failed(self, error: Failure) -> None:
        raise AssertionError(error.text)

    def what(self) -> list[tuple[object, ...]]:
        """Everything that was said since, until nothing more happens."""
        while self.clock.step():
            pass
        said, self.said = self.said, []
        return said


def request(*rows: int) -> Request:
    return Request(0, rows, 10, False, False, None)


def two(start_s: float = 1.0) -> tuple[NullLanes, Heard]:
    heard = Heard(Clock())
    lanes = NullLanes(heard.clock, heard, [steady(1.0), steady(2.0, 0.5)], start_s=start_s)
    lanes.start()
    return lanes, heard


def test_null_lanes_are_lanes() -> None:
    methods = {name: value for name, value in vars(Lanes).items() if inspect.isfunction(value) and name[0] != "_"}
    assert len(methods) >= 5
    for name, method in methods.items():
        assert inspect.signature(getattr(NullLanes, name)) == inspect.signature(method)


def test_pieces_take_their_time_one_after_another() -> None:
    lanes, heard = two()
    assert heard.what() == [(1.0, "ready", 0), (1.0, "ready", 1)]
    lanes.run(0, 7, [(request(0, 1), None), (request(2), None)])
    lanes.run(0, 8, [(request(3), None)])
    lanes.run(1, 9, [(request(4), None)])
    assert heard.what() == [
        (3.0, "done", 0, 7, 0, 2.0),
        (3.5, "done", 1, 9, 0, 2.5),
        (4.0, "done", 0, 7, 1, 1.0),
        (5.0, "done", 0, 8, 0, 1.0),
    ]


def test_a_lane_that_is_killed_does_nothing_more_and_is_replaced() -> None:
    lanes, heard = two()
    heard.what()
    lanes.run(1, 7, [(request(0), None)])
    lanes.kill(1)
    assert heard.what() == [(1.0, "lost", 1, 0), (2.0, "ready", 1)]
    lanes.run(1, 8, [(request(0), None)])
    assert heard.what() == [(6.0, "done", 1, 8, 0, 2.5)]


def test_lanes_are_added_and_end() -> None:
    lanes, heard = two()
    heard.what()
    assert lanes.add(steady(3.0)) == 2
    assert heard.what() == [(2.0, "ready", 2)]
    lanes.run(2, 7, [(request(0), None)])
    assert heard.what() == [(5.0, "done", 2, 7, 0, 3.0)]
    lanes.end(2)
    lanes.run(0, 8, [(request(1), None)])
    lanes.close()
    assert heard.what() == []


# both ends together


def batches(count: int, rows: int) -> Iterator[BatchSpec]:
    return (BatchSpec(seq, rows) for seq in range(count))


def sized(count: int, rows: int) -> Iterator[BatchSpec]:
    """Samples of very different sizes."""
    rng = random.Random(0)
    sizes = [[rng.randrange(1, 1000) for _ in range(rows)] for _ in range(count)]
    return (BatchSpec(seq, rows, payload=sizes[seq], sizes=sizes[seq]) for seq in range(count))


def by_size(byte_s: float, piece_s: float) -> Pace:
    """So long for every piece, and for every unit of its rows' sizes."""
    return lambda request: piece_s + byte_s * sum(request.payload[row] for row in request.rows)


SMALL = Kind(steady(0.002))
LARGE = Kind(steady(0.0001, 0.0008), True, grain=64)
RATE = {"small": 1 / 0.002, "large": 64 / (64 * 0.0001 + 0.0008)}


def test_together_they_are_as_fast_as_each_for_itself() -> None:
    simulation = Simulation([SMALL] * 8 + [LARGE], batches(200, 256), window=8, grain=5)
    simulation.run()
    rate = 200 * 256 / simulation.delivered[-1]
    assert rate > 0.95 * (8 * RATE["small"] + RATE["large"])
    shares = Counter(simulation.filled.values())
    assert abs(shares[8] / (200 * 256) - RATE["large"] / (8 * RATE["small"] + RATE["large"])) < 0.03


def test_lanes_that_large_samples_suit_get_them() -> None:
    """The large end costs little by size and much by piece; the small end the other way round."""
    kinds = [*[Kind(by_size(4e-6, 0.0))] * 8, Kind(by_size(1e-8, 0.008), True, grain=32)]
    simulation = Simulation(kinds, sized(100, 256), window=4, grain=5)
    simulation.run()
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for (seq, row), lane in simulation.filled.items():
        sizes[lane == 8].append(simulation.specs[seq].payload[row])
    mean = {large: sum(found) / len(found) for large, found in sizes.items()}
    assert mean[True] > 1.5 * mean[False]
    unsorted = Simulation(kinds, (replace(spec, sizes=None) for spec in sized(100, 256)), window=4, grain=5)
    unsorted.run()
    assert simulation.delivered[-1] < 0.9 * unsorted.delivered[-1]


def test_rows_that_the_large_end_cannot_take_are_done_by_the_small_one() -> None:
    def progressive(piece: Piece) -> list[int]:
        return [row for row in piece.rows if row % 7 == 0]

    simulation = Simulation([SMALL] * 4 + [LARGE], batches(40, 128), window=2, returned=progressive)
    simulation.run()
    assert len(simulation.delivered) == 40
    assert len(simulation.filled) == 40 * 128
    assert all(lane < 4 for (_, row), lane in simulation.filled.items() if row % 7 == 0)
    assert any(lane == 4 for lane in simulation.filled.values())


def test_if_the_large_end_can_take_nothing_the_small_one_does_everything() -> None:
    simulation = Simulation([SMALL] * 4 + [LARGE], batches(20, 128), returned=lambda piece: piece.rows)
    simulation.scheduler.threshold.rows = 100
    simulation.run()
    assert len(simulation.delivered) == 20
    assert set(simulation.filled.values()) == {0, 1, 2, 3}


def test_a_lane_that_is_lost_again_and_again_loses_nothing() -> None:
    simulation = Simulation([SMALL] * 4 + [LARGE], batches(100, 128), window=3)
    simulation.scheduler.threshold.rows = 64
    while len(simulation.delivered) < 100:
        simulation.run(0.05)
        simulation.lanes.kill(4)
    assert len(simulation.filled) == 100 * 128


# exact batches


def exact(seed: int) -> Simulation:
    """Rows are tied to ends by their number; how long pieces take is up to chance."""
    rng = random.Random(seed)
    small, large = SMALL.pace, LARGE.pace
    kinds = [
        *[Kind(lambda request: small(request) * rng.uniform(0.1, 2))] * 4,
        Kind(lambda request: large(request) * rng.uniform(0.1, 2), True, grain=32),
    ]
    specs = (BatchSpec(seq, 96, large=[(row * seq) % 3 > 0 for row in range(96)]) for seq in range(50))
    return Simulation(kinds, specs, window=4, returned=lambda piece: [row for row in piece.rows if row % 5 == 0])


def test_exact_batches_repeat() -> None:
    kinds = []
    for seed in range(3):
        simulation = exact(seed)
        while len(simulation.delivered) < 50:
            simulation.run(0.05)
            simulation.lanes.kill(seed)
        kinds.append({place: lane == 4 for place, lane in simulation.filled.items()})
    assert kinds[0] == kinds[1] == kinds[2]
    expected = {(seq, row): (row * seq) % 3 > 0 and row % 5 > 0 for seq in range(50) for row in range(96)}
    assert kinds[0] == expected


def test_exact_batches_whose_lanes_are_gone_are_named() -> None:
    simulation = exact(0)
    simulation.run(0.1)
    simulation.act(simulation.scheduler.lane_retired(4))
    simulation.run()
    delivered = len(simulation.delivered)
    dismissed, *named = simulation.others
    assert dismissed == Dismiss(4)
    tied = [seq for seq in range(delivered, delivered + simulation.window) if seq % 3]
    assert named == [Stranded(seq, "large") for seq in tied]
    simulation.add(simulation.kinds[4])
    simulation.run()
    assert len(simulation.delivered) == 50
    assert simulation.others == [dismissed, *named]


# lanes that come and go


def test_lanes_come_and_go_while_batches_are_prepared() -> None:
    simulation = Simulation([SMALL] * 4, batches(10**6, 64), window=16)

    def rate() -> float:
        before, start = len(simulation.filled), simulation.clock.now
        simulation.run(1.0)
        return (len(simulation.filled) - before) / (simulation.clock.now - start)

    assert 0.97 < rate() / (4 * RATE["small"]) < 1.03
    added = [simulation.add(SMALL) for _ in range(4)]
    assert 0.97 < rate() / (8 * RATE["small"]) < 1.03
    for lane in added:
        simulation.act(simulation.scheduler.lane_retired(lane))
    rate()
    assert sorted(simulation.others, key=repr) == [Dismiss(lane) for lane in added]
    for lane in added:
        simulation.lanes.end(lane)
    assert 0.97 < rate() / (4 * RATE["small"]) < 1.03
    waits = [later - earlier for earlier, later in itertools.pairwise(simulation.delivered)]
    assert max(waits) < 5 * 64 / (4 * RATE["small"]), "no pause"


def test_a_retired_lane_finishes_what_it_has() -> None:
    simulation = Simulation([SMALL] * 2 + [LARGE], batches(10**6, 256), window=4)
    simulation.run(0.1)
    running = list(simulation.scheduler._lanes[2].tasks)
    assert running
    places = {
        (piece.seq, row)
        for pieces in simulation.scheduler._lanes[2].tasks.values()
        for piece in pieces
        for row in piece.rows
    }
    simulation.act(simulation.scheduler.lane_retired(2))
    assert simulation.others == []
    simulation.run(0.1)
    assert simulation.others == [Dismiss(2)]
    assert {place for place in places if simulation.filled[place] == 2} == places


def test_a_thousand_lanes_of_both_ends_are_cheap() -> None:
    """Measured on one core: 1 s; the bound is for slow machines."""
    started = time.process_time()
    kinds = [SMALL] * 990 + [LARGE] * 10
    simulation = Simulation(kinds, batches(400, 512), window=100)
    simulation.run()
    assert len(simulation.filled) == 400 * 512
    assert time.process_time() - started < 20
