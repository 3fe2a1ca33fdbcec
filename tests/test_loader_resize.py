"""Workers come and go while batches are prepared: without a pause, and without changing a batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from loading import Batch, assert_same, copied, epochs, gone, ids, wait_until, workers
from steps import steady

pytestmark = pytest.mark.processes


def _pipe(samples: int = 800) -> ps.Pipe:
    return ps.arrays(x=np.arange(samples)).map(steady).batch(8)


def _numbers(loader: ps.Loader) -> list[int]:
    return [worker["number"] for worker in loader.stats()["workers"] if worker["pid"]]


def _taken(batches: Iterator[Batch], count: int) -> list[Batch]:
    return [copied(next(batches)) for _ in range(count)]


def _until(batches: Iterator[Batch], found: list[Batch], loader: ps.Loader, numbers: list[int]) -> None:
    """Go on with the epoch until these are the workers."""
    while _numbers(loader) != numbers:
        found.append(copied(next(batches)))


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_four_eight_four_loses_and_repeats_nothing(start: str) -> None:
    (expected,) = epochs(_pipe(), 1, workers=1)
    with ps.Loader(_pipe(), workers=4, start=start) as loader:
        batches = iter(loader)
        found = _taken(batches, 4)
        _until(batches, found, loader, [0, 1, 2, 3])
        before = workers(loader)
        loader.resize(8)
        assert "workers: 8, as asked" in loader.explain()
        _until(batches, found, loader, [0, 1, 2, 3, 4, 5, 6, 7])
        eight = workers(loader)
        assert set(before) < set(eight), "those that were there stay"
        loader.resize(4)
        _until(batches, found, loader, [0, 1, 2, 3])
        wait_until(lambda: all(map(gone, set(eight) - set(before))))
        assert workers(loader) == before
        found += [copied(batch) for batch in batches]
        assert loader.stats()["workers_lost"] == 0
    assert_same(found, expected)


def test_numbers_change_all_the_time() -> None:
    expected = epochs(_pipe(400), 3, workers=1)
    rng = np.random.default_rng(1)
    with ps.Loader(_pipe(400), workers=2) as loader:
        for wanted in expected:
            found = []
            for number, batch in enumerate(loader):
                found.append(copied(batch))
                if number % 3 == 0:
                    loader.resize(int(rng.integers(1, 6)))
            assert_same(found, wanted)
        loader.resize(3)
        batches = iter(loader)
        _until(batches, [], loader, _three(loader, batches))


def _three(loader: ps.Loader, batches: Iterator[Batch]) -> list[int]:
    """The numbers of the workers once there are three; each is among the lowest that were free."""
    while len(_numbers(loader)) != 3:
        next(batches)
    return _numbers(loader)


def test_a_retired_worker_that_is_killed_first_is_not_replaced() -> None:
    (expected,) = epochs(_pipe(), 1, workers=1)
    with ps.Loader(_pipe(), workers=3) as loader:
        batches = iter(loader)
        found = _taken(batches, 4)
        _until(batches, found, loader, [0, 1, 2])
        victim = workers(loader)[2]
        os.kill(victim, signal.SIGSTOP)  # what it has will not be done
        loader.resize(2)
        loader.stats()  # once it answers, the worker is retired
        os.kill(victim, signal.SIGKILL)
        _until(batches, found, loader, [0, 1])
        wait_until(lambda: gone(victim))
        found += [copied(batch) for batch in batches]
        assert _numbers(loader) == [0, 1]
        assert loader.stats()["workers_lost"] <= 1, "none if it had ended before it was killed"
    assert_same(found, expected)


def test_workers_that_are_not_wanted_before_they_are_ready() -> None:
    (expected,) = epochs(_pipe(400), 1, workers=1)
    with ps.Loader(_pipe(400), workers=1) as loader:
        batches = iter(loader)
        found = _taken(batches, 1)
        for _ in range(10):
            loader.resize(9)
            loader.resize(1)
        found += [copied(batch) for batch in batches]
        assert _numbers(loader) == [0]
    assert_same(found, expected)


def test_before_the_first_batch_it_is_the_number_to_begin_with() -> None:
    with ps.Loader(_pipe(80), workers=1) as loader:
        loader.resize(3)
        assert sorted(ids(loader)) == list(range(80))
        assert loader.options.workers == 3
        assert len(workers(loader, 3)) == 3


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_the_training_process_does_not_become_a_worker_nor_cease_to_be_one(before: int, after: int) -> None:
    with ps.Loader(_pipe(80), workers=before) as loader, pytest.raises(ps.OptionError, match="from the start or not"):
        loader.resize(after)


@pytest.mark.parametrize("count", [-1, 4097, 2.5, "many"])
def test_what_is_no_number_of_workers_is_refused(count: int) -> None:
    with ps.Loader(_pipe(80), workers=2) as loader:
        with pytest.raises(ps.OptionError, match="workers must be"):
            loader.resize(count)
        assert sorted(ids(loader)) == list(range(80))
