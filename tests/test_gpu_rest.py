"""CPU lanes rest while a GPU lane keeps up, and where all cores are taken."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import penstock as ps
from loading import assert_same, copied, epochs, rest, wait_until
from stand_in_device import SIZE, StandIn

pytestmark = pytest.mark.processes


@pytest.fixture
def plain(photos: Path) -> ps.Pipe:
    """All of it a GPU lane can do."""
    return ps.files(photos).decode().random_resized_crop(SIZE).flip().rand_augment().batch(5)


def decoded(loader: ps.Loader) -> int:
    """Samples that CPU lanes have made."""
    return sum(worker["samples"] for worker in loader.stats()["workers"] if worker["number"] < 2)


def begun(loader: ps.Loader, devices: list[StandIn]) -> None:
    """The GPU lane works."""
    wait_until(lambda: rest(loader) and devices[0].rows)


@pytest.mark.parametrize(("cores", "words"), [(2, "only what it cannot"), (16, "when it does not keep up")])
def test_without_cores_to_spare_cpu_lanes_leave_all_to_a_gpu_lane(
    plain: ps.Pipe, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch, cores: int, words: str
) -> None:
    monkeypatch.setattr("penstock.loader.available_cores", lambda: cores)
    expected = epochs(plain, 4, workers=1)
    with ps.Loader(plain, device="cuda", workers=2) as loader:
        begun(loader, stand_ins)
        stand_ins[0].takes_s = 0.02
        loader.set_epoch(0)
        before = decoded(loader)
        for wanted in expected:
            assert_same(rest(loader), wanted)
        assert (decoded(loader) > before) == (cores == 16)
        assert f"CPU lanes decode {words}" in loader.explain()


def test_what_a_gpu_lane_cannot_take_cpu_lanes_do_at_once(plain: ps.Pipe, stand_ins: list[StandIn]) -> None:
    expected = epochs(plain, 3, workers=1)
    with ps.Loader(plain, device="cuda", workers=2) as loader:
        begun(loader, stand_ins)
        stand_ins[0].damaged = lambda row: bool(row[0] % 2)
        loader.set_epoch(0)
        for wanted in expected:
            assert_same(rest(loader), wanted)


def test_a_training_that_a_gpu_lane_keeps_fed_costs_no_cpu_lane_time(
    plain: ps.Pipe, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.available_cores", lambda: 16)
    with ps.Loader(plain, device="cuda", workers=2) as loader:
        begun(loader, stand_ins)
        found = []
        for number, batch in enumerate(loader):
            found.append(copied(batch))
            if number == 1:  # those that the lanes began together are there
                time.sleep(0.3)
                before = decoded(loader)
            time.sleep(0.05)
        assert decoded(loader) == before
        assert len(found) == 6


def test_when_a_gpu_lane_breaks_cpu_lanes_rest_no_more(plain: ps.Pipe, stand_ins: list[StandIn]) -> None:
    expected = epochs(plain, 4, workers=1)
    with ps.Loader(plain, device="cuda", workers=2) as loader:
        begun(loader, stand_ins)
        loader.set_epoch(0)
        found = [rest(loader)]
        stand_ins[0].breaks_after = stand_ins[0].tiny_batches
        found += [rest(loader) for _ in range(3)]
        for one, wanted in zip(found, expected, strict=True):
            assert_same(one, wanted)
