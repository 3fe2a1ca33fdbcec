"""Several devices in one process: batch k of an iteration is on device k modulo their number, and the same as ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.loader
from loading import Batch, assert_same, copied, epochs, rest, wait_until
from penstock.placing import Sizes
from penstock.stage import Recipe
from stand_in_device import SIZE, StandIn

pytestmark = pytest.mark.processes

TWO = ["cuda:0", "cuda:1"]
THREE = ["cuda:0", "cuda:1", "cuda:2"]


def _pipe(root: Path) -> ps.Pipe:
    return ps.files(root).decode().random_resized_crop(SIZE).flip().rand_augment().batch(4)


def _whose(batch: Batch, devices: list[StandIn]) -> int:
    """The device in whose memory a batch lies."""
    address = batch["image"].data_ptr()
    for number, device in enumerate(devices):
        for _, mirror in device.mirrors.values():
            if mirror.ctypes.data <= address < mirror.ctypes.data + mirror.nbytes:
                return number
    raise AssertionError("the batch lies nowhere")


@pytest.mark.parametrize(("devices", "exact"), [(TWO, False), (THREE, False), (TWO, True)])
def test_batches_go_to_the_devices_in_turn(
    photos: Path, stand_ins: list[StandIn], devices: list[str], exact: bool
) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 4, workers=1, seed=4)
    with ps.Loader(pipe, device=devices, workers=2, seed=4, exact=exact) as loader:
        for wanted in expected:
            found, where = [], []
            for batch in loader:
                where.append(_whose(batch, stand_ins))
                found.append(copied(batch))
            assert_same(found, wanted)
            assert where == [number % len(devices) for number in range(len(wanted))]
        wait_until(lambda: rest(loader) and all(device.rows for device in stand_ins))
        assert f"{', '.join(devices)}, one batch to each in turn" in loader.explain()
    assert [device.name for device in stand_ins] == devices
    assert all(device.closed for device in stand_ins)


def test_each_device_has_memory_for_its_own_batches_only(photos: Path, stand_ins: list[StandIn]) -> None:
    with ps.Loader(_pipe(photos), workers=2, device="cuda") as loader:
        rest(loader)
        one = loader.stats()["slots"]
    with ps.Loader(_pipe(photos), workers=2, device=TWO) as loader:
        rest(loader)
        slots = [next(iter(device.mirrors.values()))[1].shape[0] for device in stand_ins[1:]]
        assert slots[0] == slots[1] <= one, "no more than where there is one device"
        assert loader.stats()["slots"] == sum(slots)


def test_a_lane_that_breaks_leaves_the_others_theirs(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 5, workers=1)
    with ps.Loader(pipe, device=TWO, workers=2) as loader:
        found = [rest(loader)]
        stand_ins[0].breaks_after = stand_ins[0].tiny_batches + 1
        found += [rest(loader) for _ in range(4)]
        wait_until(
            lambda: rest(loader) and "GPU lane of cpu: none; LaneError: the stand-in was told" in loader.explain()
        )
        before = stand_ins[0].rows, stand_ins[1].rows
        wait_until(lambda: rest(loader) and stand_ins[1].rows > before[1])
        assert stand_ins[0].rows == before[0]
        stand_ins[1].breaks_after = stand_ins[1].tiny_batches
        wait_until(lambda: rest(loader) and loader.explain().count("told to break") == 2)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_where_rows_are_tied_a_lane_that_breaks_ends_the_loader(photos: Path, stand_ins: list[StandIn]) -> None:
    with ps.Loader(_pipe(photos), device=TWO, workers=2, exact=True) as loader:
        rest(loader)
        stand_ins[1].breaks_after = 0
        with pytest.raises(ps.LaneError, match="exact=True ties samples to the GPU lane"):
            wait_until(lambda: rest(loader) is None)


def test_killed_stagers_and_workers_lose_nothing(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 8, workers=1)
    with ps.Loader(pipe, device=TWO, workers=2) as loader:
        for number, wanted in enumerate(expected):
            batches = iter(loader)
            found = [copied(next(batches))]
            pids = [worker["pid"] for worker in loader.stats()["workers"] if worker["pid"]]
            os.kill(pids[number % len(pids)], signal.SIGKILL)
            found += [copied(batch) for batch in batches]
            assert_same(found, wanted)


def test_an_iteration_begins_at_the_first_device(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    (expected,) = epochs(pipe, 1, workers=1)
    with ps.Loader(pipe, device=THREE, workers=2) as loader:
        batches = iter(loader)
        for number in range(2):
            assert _whose(next(batches), stand_ins) == number
        state = loader.state_dict()
        del batches
        loader.load_state_dict(state)
        found = []
        for number, batch in enumerate(loader):
            assert _whose(batch, stand_ins) == number % 3
            found.append(copied(batch))
        assert_same(found, expected[2:])


def test_keeping_the_batches_of_one_device_holds_nobody_up(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 2, workers=1)
    with ps.Loader(pipe, device=TWO, workers=2, memory_bytes=8 << 16, prefetch=4) as loader:
        kept: dict[int, Batch] = {}
        for epoch in range(2):
            for number, batch in enumerate(loader):
                if number % 2 == 0:
                    kept[epoch * len(loader) + number] = batch
        flat = [batch for wanted in expected for batch in wanted]
        for number, batch in kept.items():
            assert_same([batch], [flat[number]])


def test_the_tail_runs_on_each_batchs_device(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = ps.files(photos).decode().random_resized_crop(SIZE).normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).batch(4)
    expected = epochs(pipe, 1, workers=1)[0]
    with ps.Loader(pipe, device=TWO, workers=2) as loader:
        for one, other in zip(loader, expected, strict=True):
            assert one["image"].equal(other["image"])


def test_samples_of_any_shape_are_moved_in_turn(stand_ins: list[StandIn]) -> None:
    """They need no slots, and are copied when they arrive."""
    pipe = ps.arrays(x=np.arange(40)).map(_longer).batch(4, ragged="list")
    expected = epochs(pipe, 2, workers=1)
    with ps.Loader(pipe, device=TWO, workers=2) as loader:
        for wanted in expected:
            assert_same(rest(loader), wanted)


def _longer(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(int(sample["x"]) + 1, sample["x"])}


def test_without_workers_batches_are_moved_in_turn(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the CPU and to torch's device without memory, of which one can tell."""
    names = {"cuda:0": torch.device("cpu"), "cuda:1": torch.device("meta")}

    def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> StandIn:
        stand_in = StandIn(recipe, sizes, device)
        stand_in.torch_device = names[device]
        return stand_in

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    with ps.Loader(_pipe(photos), device=TWO, workers=0) as loader:
        for _ in range(2):
            where = [batch["image"].device.type for batch in loader]
            assert where == [("cpu", "meta")[number % 2] for number in range(len(loader))]


@pytest.mark.parametrize("device", [[], ["cuda:0", "cuda:0"], ["cuda"], ["cpu", "cuda:0"], [0, 1], {"cuda:0": 1}])
def test_senseless_lists_are_refused(photos: Path, device: Any) -> None:
    with pytest.raises(ps.OptionError, match="device must be"):
        ps.Loader(_pipe(photos), device=device)


def test_what_keeps_no_turns_is_refused(photos: Path) -> None:
    with pytest.raises(ps.OptionError, match="in turn, which order='ready' does not keep"):
        ps.Loader(_pipe(photos), device=TWO, order="ready")
