"""Predictions keep the laws of what they predict, on any profile, and say where they end."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_path import alternating, reading
from penstock.errors import DiagnosisError
from penstock.profile import BatchPoint, PrepPoint, Profile, ReadPoint
from penstock.whatif import (
    as_it_is,
    cache_needed_bytes,
    cores_needed,
    never_evicting,
    outlook,
    predict,
    remote,
    split,
    with_cores,
    workers_needed,
)
from profiles import profile

CLOSE = 1 + 1e-6
shares = st.floats(0.0, 1.0)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any training: rates over three orders of magnitude, one or more ranks, with and without overlap."""
    cores, workers, ranks = draw(st.integers(1, 16)), draw(st.integers(1, 12)), draw(st.integers(1, 2))
    prep, storage = draw(st.floats(20, 2000)), draw(st.floats(20, 5000))
    efficiency, depth = draw(st.floats(0.5, 1.0)), draw(st.integers(1, 8))
    busy = min(workers, cores / ranks)
    own = prep * (1 + (busy - 1) * efficiency) if busy > 1 else prep
    deep = storage * min(depth, workers)
    return profile(
        cores=cores,
        workers=workers,
        ranks=ranks,
        overlapped=draw(st.booleans()),
        prefetch_batches=2 * workers,
        gpu_samples_per_s=draw(st.floats(20, 20000)),
        step_cpu_s=draw(st.sampled_from([0.0, 0.01, 0.5])),
        prep_samples_per_s=own,
        prep=tuple({1: PrepPoint(1, prep, 1.0), workers: PrepPoint(workers, own, efficiency)}.values()),
        storage_samples_per_s=deep,
        storage=(ReadPoint(1, storage, storage * 1e5), ReadPoint(workers, deep, deep * 1e5)),
        memory_samples_per_s=1e5 * workers,
        memory=(ReadPoint(workers, 1e5 * workers, 1e10),),
    )


@settings(deadline=None, max_examples=60)
@given(profiles(), shares, shares)
def test_no_prediction_is_above_the_least_rate_and_more_cache_is_never_slower(
    whole: Profile, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    little, much = (predict(whole, replace(as_it_is(whole), cached_share=share)) for share in (low, high))
    for found in (little, much):
        assert 0 < found.samples_per_s <= found.least_samples_per_s * CLOSE
        assert found.fetch_samples_per_s is not None
        least = min(found.gpu_samples_per_s, found.prep_samples_per_s, found.fetch_samples_per_s)
        assert found.least_samples_per_s == pytest.approx(least)
    assert little.samples_per_s <= much.samples_per_s * CLOSE


@settings(deadline=None, max_examples=60)
@given(profiles(), shares, st.floats(1.0, 4.0), st.integers(1, 16))
def test_a_faster_part_is_never_slower(whole: Profile, share: float, factor: float, more: int) -> None:
    setup = replace(as_it_is(whole), cached_share=share)
    now = predict(whole, setup).samples_per_s
    for change in (
        replace(setup, gpu_factor=factor),
        replace(setup, storage_factor=factor),
        replace(setup, cores=setup.cores + more),
        with_cores(setup, setup.cores + more),
    ):
        assert predict(whole, change).samples_per_s * CLOSE >= now


@settings(deadline=None, max_examples=60)
@given(profiles(), shares)
def test_a_prediction_has_no_jumps_along_the_cache(whole: Profile, share: float) -> None:
    setup = replace(as_it_is(whole), cached_share=share)
    beside = replace(setup, cached_share=min(1.0, share + 1e-6))
    assert predict(whole, beside).samples_per_s == pytest.approx(predict(whole, setup).samples_per_s, rel=1e-3)


def test_the_paper_s_model_where_reading_and_preparing_overlap_without_chance() -> None:
    whole = profile(
        overlapped=True,
        gpu_samples_per_s=2400.0,
        gpu_steps_s=(),
        prep_batches_s=(),
        step_cpu_s=0.0,
        watch_evidence=None,
    )
    for share, expected in ((0.0, 1900.0), (0.05, 1 / (0.05 / 60_000 + 0.95 / 1900)), (0.5, 2000.0), (1.0, 2000.0)):
        found = predict(whole, replace(as_it_is(whole), cached_share=share))
        assert found.least_samples_per_s == pytest.approx(expected)
        assert found.samples_per_s == pytest.approx(expected, rel=2e-3)
        assert found.limit == ("fetch" if share < 0.1 else "prep")


def test_predictions_agree_with_a_simulation_at_five_caches_and_three_numbers_of_workers() -> None:
    """Two cores, 5 ms of preparing, a disk of 4 ms: F, P and their sum are close to each other everywhere."""
    prep_s, disk_s, delay_s, uneven = 0.005, 0.003, 0.001, (0.5, 0.5)
    errors = {}
    for workers in (1, 2, 3):
        points = {n: reading(n, disk_s, delay_s, uneven[1]) for n in (1, workers, 2 * workers)}
        own = min(workers, 2) / prep_s
        whole = profile(
            cores=2,
            workers=workers,
            prefetch_batches=2 * workers,
            gpu_samples_per_s=1e6,
            gpu_steps_s=(),
            prep_batches_s=(),
            step_cpu_s=0.0,
            prep_samples_per_s=own,
            prep=(PrepPoint(1, 1 / prep_s, 1.0), PrepPoint(workers, own, 1.0)),
            storage_samples_per_s=points[workers],
            storage=tuple(ReadPoint(n, per_s, per_s * 1e5) for n, per_s in points.items()),
            memory_samples_per_s=None,
            memory=(),
        )
        for share in (0.2, 0.35, 0.5, 0.65, 0.8):
            seen = alternating(workers, 2, prep_s, disk_s, delay_s, 1 - share, uneven)
            found = predict(whole, replace(as_it_is(whole), cached_share=share))
            errors[workers, share] = abs(found.samples_per_s / seen - 1)
    assert max(errors.values()) < 0.04, errors


def test_a_capped_disk_catches_up_while_its_reader_prepares() -> None:
    """One worker, 600/s to prepare; a disk that is capped at 250/s but answers a single read at once."""
    capped = profile(
        workers=1,
        prefetch_batches=2,
        prep_samples_per_s=600.0,
        prep=(PrepPoint(1, 600.0, 1.0),),
        storage_samples_per_s=250.0,
        storage=(ReadPoint(1, 250.0, 2.5e7), ReadPoint(2, 250.0, 2.5e7)),
        storage_wait_s=1 / 5000,
        memory=(),
        memory_samples_per_s=None,
        step_cpu_s=0.0,
    )
    setup = replace(as_it_is(capped), cached_share=0.2)
    found = predict(capped, setup)
    assert found.samples_per_s == pytest.approx(250 / 0.8, rel=0.01)
    assert found.limit == "fetch"
    plain = replace(capped, storage_wait_s=1 / 250)  # one that is no faster for a single read
    assert predict(plain, setup).samples_per_s == pytest.approx(1 / (1 / 600 + 0.8 / 250), rel=0.01)


def test_a_step_on_the_cpu_takes_cores_from_the_workers() -> None:
    whole = profile(
        gpu=None,
        cores=2,
        workers=2,
        batch_samples=10,
        gpu_samples_per_s=100.0,
        step_cpu_s=0.1,
        prep_samples_per_s=100.0,
        prep=(PrepPoint(1, 50.0, 1.0), PrepPoint(2, 100.0, 1.0)),
        gpu_steps_s=(),
        prep_batches_s=(),
    )
    found = predict(whole, replace(as_it_is(whole), cached_share=1.0))
    assert found.least_samples_per_s == 100.0
    assert found.samples_per_s == pytest.approx(2 / 0.03, rel=0.01)  # 20 ms of preparing and 10 ms of training each
    assert found.limit == "cores"


def test_without_workers_reading_preparing_and_training_add_up() -> None:
    whole = profile(
        workers=0, prep_samples_per_s=200.0, gpu_samples_per_s=400.0, prep=(), memory=(), memory_samples_per_s=None
    )
    whole = replace(whole, storage_samples_per_s=100.0, storage=(ReadPoint(1, 100.0, 1e7),))
    found = predict(whole, replace(as_it_is(whole), cached_share=0.5))
    assert found.samples_per_s == pytest.approx(1 / (1 / 200 + 1 / 400 + 0.5 / 100))
    assert found.limit == "workers"


@settings(deadline=None, max_examples=20)
@given(profiles())
def test_what_is_said_to_be_needed_is_enough_and_less_is_not(whole: Profile) -> None:
    setup = as_it_is(whole)
    size = whole.dataset_bytes
    assert size is not None

    def rate(**changes: float) -> float:
        return predict(whole, replace(setup, **changes)).samples_per_s  # type: ignore[arg-type]

    needed = cache_needed_bytes(whole, setup)
    assert needed is not None
    full = rate(cached_share=1.0)
    assert rate(cached_share=needed / size) >= 0.99 * full / CLOSE
    if needed > 0.01 * size:
        assert rate(cached_share=needed / size - 0.01) < 0.99 * full

    warm = replace(setup, cached_share=1.0)
    workers = workers_needed(whole, warm)
    if workers is not None:
        goal = 0.99 * whole.gpu_samples_per_s
        assert rate(cached_share=1.0, workers=workers) >= goal / CLOSE
        assert workers == 1 or rate(cached_share=1.0, workers=workers - 1) < goal
    cores = cores_needed(whole, warm)
    if cores is not None:
        found = predict(whole, replace(warm, cores=cores, workers=cores // whole.ranks))
        assert found.samples_per_s >= 0.99 * whole.gpu_samples_per_s / CLOSE


def test_more_gpus_share_cores_and_storage() -> None:
    whole = profile()
    one, two = (predict(whole, replace(as_it_is(whole), ranks=ranks)) for ranks in (1, 2))
    assert two.prep_samples_per_s == pytest.approx(1100.0)  # four cores each, as measured with four workers
    assert two.fetch_samples_per_s == pytest.approx((one.fetch_samples_per_s or 0) / 2, rel=0.02)
    assert two.gpu_samples_per_s == one.gpu_samples_per_s
    assert two.total_samples_per_s == 2 * two.samples_per_s
    assert any("gradients" in note for note in two.notes)


def test_another_batch_size_needs_two_measured_ones() -> None:
    points = tuple(BatchPoint(size, size / (0.01 + size * 0.0004)) for size in (64, 128, 256))
    whole = profile(gpu_batches=points, gpu_samples_per_s=points[2].samples_per_s)
    for size in (32, 512):
        found = predict(whole, replace(as_it_is(whole), batch_samples=size))
        assert found.gpu_samples_per_s == pytest.approx(size / (0.01 + size * 0.0004))
    with pytest.raises(DiagnosisError, match=r"batches of 256 only .* batches of 512 cannot be predicted"):
        predict(profile(), replace(as_it_is(profile()), batch_samples=512))


def test_a_gpu_lane_prepares_what_the_cores_do_not() -> None:
    whole = profile(gpu_samples_per_s=4000.0)
    warm = replace(as_it_is(whole), cached_share=1.0)
    found = predict(whole, replace(warm, lane_samples_per_s=15_000.0, lane_cost=0.09))
    assert predict(whole, warm).samples_per_s < 2001
    lane_per_s = found.samples_per_s - 2000
    assert found.samples_per_s == pytest.approx(4000 * (1 - 0.09 * lane_per_s / 15_000))
    assert found.limit == "gpu"


def test_downloading_first_pays_once_what_it_saves_exceeds_what_it_takes() -> None:
    whole = profile()
    found = remote(whole, never_evicting(whole), 50e6, 100e6)
    assert found.download_s == pytest.approx(1_281_167 * 110_000 / 100e6)
    epochs = found.pays_from_epochs
    assert epochs is not None

    def saved_s(epochs: int) -> float:
        here = found.download_s + found.local_first_epoch_s + (epochs - 1) * found.local_epoch_s
        return found.remote_first_epoch_s + (epochs - 1) * found.remote_epoch_s - here

    assert saved_s(epochs) > 0
    assert saved_s(epochs - 1) <= 0
    assert remote(whole, never_evicting(whole), 50e9, 100e6).pays_from_epochs is None


def test_the_predicted_split_adds_up_to_the_step() -> None:
    whole = profile()
    parts = split(whole, never_evicting(whole))
    step_s = parts.compute_s + parts.prep_stall_s + parts.fetch_stall_s + parts.thrashing_s
    assert step_s == pytest.approx(256 / predict(whole, never_evicting(whole)).samples_per_s)
    assert parts.thrashing_s == 0
    assert split(whole, replace(never_evicting(whole), cached_share=1.0)).fetch_stall_s == pytest.approx(0)


def test_what_was_not_measured_is_not_predicted() -> None:
    stream = profile(dataset_bytes=None, cache_bytes=None, dataset_samples=None)
    assert cache_needed_bytes(stream, as_it_is(stream)) is None
    assert as_it_is(stream) == never_evicting(stream)
    with pytest.raises(DiagnosisError, match="how large the data set is"):
        remote(stream, as_it_is(stream), 1e8, 1e9)
    unread = profile(storage_samples_per_s=None, storage=())
    assert predict(unread, as_it_is(unread)).fetch_samples_per_s is None
    assert [case.label for case in outlook(unread)] == [
        "as it is",
        "16 workers",
        "16 cores, a worker on each",
        "GPU 2x",
    ]


def test_what_lies_beyond_the_measurements_is_said() -> None:
    whole = profile()
    assert predict(whole, as_it_is(whole)).notes == ()
    beyond = predict(whole, with_cores(as_it_is(whole), 32)).notes
    assert any(note.startswith("P beyond 8 busy cores") for note in beyond)
    assert any(note.startswith("S beyond 8 readers") for note in beyond)


def test_measured_points_of_p_are_met() -> None:
    rng = random.Random(3)
    points = tuple(PrepPoint(n, 250 * n * rng.uniform(0.9, 1.0), 1.0) for n in (1, 2, 4, 8))
    whole = profile(prep=points, prep_samples_per_s=points[-1].samples_per_s)
    setup = as_it_is(whole)
    found = [predict(whole, replace(setup, workers=point.workers)).prep_samples_per_s for point in points]
    assert found == pytest.approx([point.samples_per_s for point in points])
    assert mean(found) > 0
