"""Throughput arithmetic keeps its laws, and agrees with a simulation of what it describes."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_path import alternating, buffered, reading
from penstock.cost import (
    alternating_per_s,
    assisted_per_s,
    buffer_slack,
    buffered_per_s,
    cached_share_needed,
    curve,
    epochs_until_cheaper,
    fetch_per_s,
    saturating,
    shared_cores_per_s,
    variation,
)

rates = st.floats(1.0, 1e6)
shares = st.floats(0.0, 1.0)
CLOSE = 1 + 1e-6


@given(rates, rates)
def test_all_cached_fetches_at_memory_speed_and_nothing_cached_at_that_of_storage(
    memory: float, storage: float
) -> None:
    assert fetch_per_s(memory, storage, 1.0) == pytest.approx(memory)
    assert fetch_per_s(memory, storage, 0.0) == pytest.approx(storage)


def test_equation_2_to_the_digit() -> None:
    # D = 1000 samples, 35% cached: 350 at 7000/s take 50 ms, 650 at 500/s take 1300 ms
    assert fetch_per_s(7000.0, 500.0, 0.35) == pytest.approx(1000 / 1.35)


@given(rates, st.floats(1.0, 1e3), shares, shares)
def test_more_cache_never_fetches_slower(storage: float, faster: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert fetch_per_s(storage * faster, storage, low) <= fetch_per_s(storage * faster, storage, high) * CLOSE


@given(rates, st.floats(1.001, 1e3), rates)
def test_the_cache_needed_reaches_the_target_and_no_smaller_one_does(
    storage: float, faster: float, target: float
) -> None:
    memory = storage * faster
    share = cached_share_needed(memory, storage, target)
    if share is None:
        assert memory < target
    elif share == 0:
        assert storage >= target
    else:
        assert fetch_per_s(memory, storage, share) == pytest.approx(target, rel=1e-6)


@given(rates, rates, st.floats(0.1, 1e5))
def test_a_buffer_lets_through_no_more_than_the_slower_stage(one: float, other: float, slack: float) -> None:
    through = buffered_per_s(one, other, slack)
    assert 0 < through <= min(one, other) * CLOSE
    assert through == pytest.approx(buffered_per_s(other, one, slack))


@given(rates, rates, st.floats(0.1, 1e5), st.floats(1.0, 2.0))
def test_a_faster_stage_or_a_larger_buffer_never_slows_a_pipeline(
    one: float, other: float, slack: float, more: float
) -> None:
    through = buffered_per_s(one, other, slack)
    assert buffered_per_s(one * more, other, slack) * CLOSE >= through
    assert buffered_per_s(one, other, slack * more) * CLOSE >= through


@given(rates, st.floats(0.1, 1e3))
def test_a_pipeline_of_equal_stages_is_a_limit_not_a_jump(rate: float, slack: float) -> None:
    equal = buffered_per_s(rate, rate, slack)
    assert equal == pytest.approx(rate * slack / (slack + 1))
    for apart in (1e-12, 1e-9, 1e-6):
        assert buffered_per_s(rate, rate * (1 + apart), slack) == pytest.approx(equal, rel=1e-3)


def test_stages_that_never_vary_reach_the_slower_ones_rate() -> None:
    assert buffered_per_s(100.0, 100.0, buffer_slack(4, 2, 0.0, 0.0)) == pytest.approx(100.0, rel=1e-3)
    assert buffered_per_s(100.0, 300.0, 1e4) == pytest.approx(100.0)


@given(st.integers(1, 12), rates, rates, shares, st.floats(1.0, 3.0), st.integers(1, 12))
def test_workers_in_turn_are_no_faster_than_either_part_and_gain_from_each(
    workers: int, prep: float, storage: float, uncached: float, faster: float, cores: int
) -> None:
    def per_s(prep: float, storage: float, workers: int = workers, uncached: float = uncached) -> float:
        return alternating_per_s(
            workers, curve([(1, prep), (cores, prep * cores)]), curve([(1, storage), (4, 2 * storage)]), uncached
        )

    now = per_s(prep, storage)
    assert 0 < now <= prep * min(workers, cores) * CLOSE
    assert now * uncached <= 2 * storage * CLOSE
    assert per_s(prep * faster, storage) * CLOSE >= now
    assert per_s(prep, storage * faster) * CLOSE >= now
    assert per_s(prep, storage, workers + 1) * CLOSE >= now
    assert per_s(prep, storage, uncached=uncached / faster) * CLOSE >= now


@given(rates, rates, shares)
def test_one_worker_adds_the_times_of_reading_and_preparing(prep: float, storage: float, uncached: float) -> None:
    seconds = 1 / prep + uncached / storage
    assert alternating_per_s(1, curve([(1, prep)]), curve([(1, storage)]), uncached) == pytest.approx(
        1 / seconds, rel=1e-4
    )


def test_workers_in_turn_agree_with_a_simulation_where_stages_are_balanced() -> None:
    rng = random.Random(7)
    errors = []
    for _ in range(40):
        workers, cores, uncached = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 4)), rng.uniform(0.2, 1.0)
        uneven = rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)
        storage_s = 1 / (min(workers, cores) * uncached * rng.uniform(0.7, 1.5))
        delay_s = storage_s * rng.choice((0.0, 0.5, 1.0, 3.0))
        storage = curve([(n, reading(n, storage_s, delay_s, uneven[1], 3000)) for n in range(1, workers + 1)])
        prep = curve([(min(workers, cores), float(min(workers, cores)))])
        seen = alternating(workers, cores, 1.0, storage_s, delay_s, uncached, uneven, 6000)
        errors.append(abs(alternating_per_s(workers, prep, storage, uncached) / seen - 1))
    assert mean(errors) < 0.025
    assert sorted(errors)[-4] < 0.06


def test_a_bounded_buffer_agrees_with_a_simulation_of_torchs_loader_where_min_does_not() -> None:
    rng = random.Random(7)
    errors, of_min = [], []
    for _ in range(60):
        workers, ahead = rng.choice((1, 2, 3, 4, 8)), rng.choice((2, 4))
        uneven, step_s = (rng.uniform(0.05, 0.4), rng.uniform(0.0, 0.3)), rng.uniform(0.9, 1.1)
        alone = buffered(workers, workers * ahead, workers, 1e-9, (uneven[0], 0.0), 6000)
        seen = buffered(workers, workers * ahead, workers, step_s, uneven, 6000)
        slack = buffer_slack(workers * ahead, workers, *uneven)
        errors.append(abs(buffered_per_s(alone, 1 / step_s, slack) / seen - 1))
        of_min.append(abs(min(alone, 1 / step_s) / seen - 1))
    assert max(errors) < 0.04
    assert mean(errors) < mean(of_min) / 2


def test_variation_sees_through_workers_that_finish_together() -> None:
    assert variation([4.0, 0.0, 4.0, 0.0, 4.0, 0.0], 2) == 0.0
    rng = random.Random(1)
    assert variation([rng.gauss(10, 2) for _ in range(4000)]) == pytest.approx(0.2, rel=0.1)
    assert variation([rng.gauss(10, 2) for _ in range(4000)], 4) == pytest.approx(0.2, rel=0.1)
    assert variation([]) == variation([1.0]) == variation([0.0, 0.0]) == 0.0


def test_a_step_on_the_cpu_takes_its_seconds_from_the_workers_cores() -> None:
    # two cores, 20 ms of preparing and 10 ms of training for each sample: 2 / 30 ms, not 2 / 20 ms
    assert shared_cores_per_s(lambda cores: cores / 0.02, 2, 0.01) == pytest.approx(2 / 0.03)
    # a single worker needs one core, and the step needs the other
    assert shared_cores_per_s(lambda cores: min(cores, 1) / 0.02, 2, 0.01) == pytest.approx(50.0)
    assert shared_cores_per_s(lambda cores: cores / 0.02, 2, 0.0) == 100.0


@given(rates, rates, rates, shares, st.floats(1.0, 4.0))
def test_a_gpu_lane_never_slows_the_training_and_never_beats_the_gpu(
    gpu: float, prep: float, lane: float, lane_cost: float, faster: float
) -> None:
    rate = assisted_per_s(gpu, prep, lane, lane_cost)
    assert min(gpu, prep) <= rate * CLOSE
    assert rate <= min(gpu, prep + lane) * CLOSE
    assert rate <= assisted_per_s(gpu, prep * faster, lane, lane_cost) * CLOSE
    assert assisted_per_s(gpu, prep, 0.0, lane_cost) == min(gpu, prep)


def test_a_lane_costs_the_gpu_what_it_does_for_it() -> None:
    # 500 of 1000/s come from a lane whose best, 1000/s, costs 10%: G falls by 5%, and 450 need to come
    rate = assisted_per_s(1000.0, 500.0, 1000.0, 0.1)
    assert rate == pytest.approx(1000 * (1 - 0.1 * (rate - 500) / 1000))


@given(*[st.integers(1, 10**6)] * 4)
def test_the_cheaper_way_is_cheaper_from_that_epoch_on_and_not_before(a: int, b: int, c: int, d: int) -> None:
    epochs = epochs_until_cheaper(a, b, c, d)

    def cheaper(epochs: int) -> bool:
        return c + (epochs - 1) * d < a + (epochs - 1) * b

    if epochs is None:
        assert not cheaper(1)
        assert not cheaper(10**9)
    else:
        assert cheaper(epochs)
        assert epochs == 1 or not cheaper(epochs - 1)


@given(rates, st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.floats(0.0, 20.0), st.floats(1.0, 2.0))
def test_what_saturates_lies_between_the_straight_line_and_proportion(
    one: float, second: float, third: float, readers: float, more: float
) -> None:
    points = [(1.0, one), (4.0, one * (1 + 3 * second)), (8.0, one * (1 + 3 * second) * (1 + third))]
    per_s = saturating(points)
    assert curve(points)(readers) <= per_s(readers) * CLOSE
    assert per_s(readers) <= min(readers * one, points[-1][1]) * CLOSE
    assert per_s(readers) <= per_s(readers * more) * CLOSE
    assert [per_s(count) for count, _ in points] == pytest.approx([rate for _, rate in points])


def test_a_curve_is_straight_between_points_and_level_after_the_last() -> None:
    per_s = curve([(1, 100.0), (3, 200.0), (4, 190.0)])
    assert [per_s(n) for n in (0, 0.5, 1, 2, 3, 4, 9)] == [0, 50, 100, 150, 200, 200, 200]
