"""A GPU lane beside CPU lanes: the batches are those of CPU lanes alone, whatever the lane takes, refuses or breaks at.

The device is a stand-in (stand_in_device.py); tests/gpu has the same for a real one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
import penstock.loader
from arenas import apart
from loading import Batch, assert_same, epochs, ids, rest, wait_until
from penstock.coordinator import Policy
from penstock.placing import Sizes
from penstock.stage import Recipe
from stand_in_device import SIZE, StandIn

__all__ = ["apart"]

pytestmark = pytest.mark.processes


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Loaders with device="cuda" get a stand-in; it is listed here."""
    opened: list[StandIn] = []

    def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> StandIn:
        opened.append(StandIn(recipe, sizes))
        return opened[-1]

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    return opened


def _pipe(root: Path, **batch: Any) -> ps.Pipe:
    return ps.files(root).decode().random_resized_crop(SIZE).flip().rand_augment().batch(8, **batch)


def _with_lane(
    pipe: ps.Pipe, stand_ins: list[StandIn], epochs: int = 1, lane_rows: int = 1, **options: Any
) -> list[list[Batch]]:
    """The batches of some epochs, in all of which the lane has made some images: the first wait until it is there."""
    with ps.Loader(pipe, device="cuda", workers=options.pop("workers", 2), **options) as loader:
        found = [rest(loader) for _ in range(epochs)]
        while stand_ins[-1].rows < lane_rows:
            rest(loader)
        assert stand_ins[-1].rows >= lane_rows
    assert stand_ins[-1].closed
    return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of all kinds, most of which no JPEG engine takes."""
    root = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("JPEG", {"subsampling": 0}),
        ("WEBP", {}),
        ("JPEG", {"mode": "CMYK"}),
        ("JPEG", {"mode": "L"}),
        ("JPEG", {"exif": 6}),
    ]
    for index in range(48):
        form, options = kinds[index % len(kinds)]
        image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(tuple(rng.integers(30, 90, 2)))
        options = dict(options)
        image = image.convert(options.pop("mode", "RGB"))
        if "exif" in options:
            exif = Image.Exif()
            exif[0x0112] = options.pop("exif")
            options["exif"] = exif
        folder = root / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{index:02}.{form.lower()}", form, **options)
    return root


def test_batches_are_those_of_cpu_lanes(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 3, workers=1, seed=4)
    for found, wanted in zip(_with_lane(pipe, stand_ins, 3, seed=4), expected, strict=True):
        assert_same(found, wanted)


def test_labels_of_any_size_and_tiny_batches_of_one_sample(photos: Path, stand_ins: list[StandIn]) -> None:
    paths = sorted(map(str, photos.rglob("*.jpg")))
    labels = [0, 255, 256, 1000, 70_000, 2**40, -1] * 5
    for size in (1, 3):
        pipe = ps.files(paths, labels[: len(paths)]).decode().random_resized_crop(SIZE).rand_augment().batch(size)
        expected = epochs(pipe, 2, workers=1)
        assert {label for batch in expected[0] for label in batch["label"].tolist()} == set(labels)
        for found, wanted in zip(_with_lane(pipe, stand_ins, 2), expected, strict=True):
            assert_same(found, wanted)


def test_what_the_lane_cannot_take_goes_to_cpu_lanes(mixed: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(mixed)
    expected = epochs(pipe, 2, workers=1)
    for found, wanted in zip(_with_lane(pipe, stand_ins, 2), expected, strict=True):
        assert_same(found, wanted)


def test_rows_that_the_decoder_refuses_go_to_cpu_lanes(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 3, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        found = [rest(loader)]
        stand_ins[0].damaged = lambda row: bool(row[2] % 2 or row[3] % 3 == 0)
        found += [rest(loader), rest(loader)]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_lane_that_breaks_costs_nothing(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 4, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        found = [rest(loader)]
        stand_ins[0].breaks_after = stand_ins[0].tiny_batches + 1
        found += [rest(loader) for _ in range(3)]
        wait_until(lambda: rest(loader) and "told to break" in loader.explain())
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("policy", [Policy(sort=False), Policy(leave_last=False), Policy(False, False)])
def test_what_the_scheduler_leaves_out_changes_no_batch(photos: Path, stand_ins: list[StandIn], policy: Policy) -> None:
    class Less(ps.Loader):
        _policy = policy

    pipe = _pipe(photos)
    expected = epochs(pipe, 4, workers=1)
    with Less(pipe, device="cuda", workers=2) as loader:
        for wanted in expected:
            assert_same(rest(loader), wanted)


def test_stagers_read_through_the_cache(photos: Path, stand_ins: list[StandIn], apart: str) -> None:
    pipe = _pipe(photos)
    on_cpu = epochs(pipe, 3)
    with ps.Loader(pipe, device="cuda", workers=2, cache="4MiB") as loader:
        for expected in on_cpu:
            assert_same(rest(loader), expected)
        while not stand_ins[-1].rows:
            rest(loader)
        before = loader.stats()["cache"]
        rest(loader)
        after = loader.stats()["cache"]
        assert (after["hits"] - before["hits"], after["misses"]) == (30, 30)


def test_killed_stagers_and_workers_lose_nothing(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 8, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        found = []
        for number in range(8):
            batches = iter(loader)
            found.append([next(batches)])
            pids = [worker["pid"] for worker in loader.stats()["workers"] if worker["pid"]]
            os.kill(pids[number % len(pids)], signal.SIGKILL)
            found[-1] += list(batches)
            found[-1] = [{name: value.clone() for name, value in batch.items()} for batch in found[-1]]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_batches_that_are_kept_stay_right(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 2, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        kept = [list(loader), list(loader)]
        for one, other in zip(kept, expected, strict=True):
            assert_same(one, other)


def test_an_epoch_that_is_left_is_forgotten(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    expected = epochs(pipe, 5, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        for epoch in range(4):
            assert ids([next(iter(loader))]) == ids(expected[epoch][:1])
        assert_same(rest(loader), expected[4])


def test_resumed_runs_go_on_the_same(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    (expected,) = epochs(pipe, 1, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with ps.Loader(pipe, device="cuda", workers=1) as loader:
        loader.load_state_dict(state)
        assert_same(rest(loader), expected[1:])


def test_bad_samples_are_found_by_cpu_lanes(photos: Path, tmp_path: Path, stand_ins: list[StandIn]) -> None:
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        target = tmp_path / path.parent.name / path.name
        target.parent.mkdir(exist_ok=True)
        data = path.read_bytes()
        target.write_bytes(data[: len(data) // 2] if number % 7 == 3 else data)
    pipe = _pipe(tmp_path)
    for on_error in ("skip", "replace"):
        expected = epochs(pipe, 2, workers=1, on_error=on_error)
        for found, wanted in zip(_with_lane(pipe, stand_ins, 2, on_error=on_error), expected, strict=True):
            assert_same(found, wanted)
    with pytest.raises(ps.SampleError, match="decode"):
        _with_lane(pipe, stand_ins)


def test_images_too_large_for_one_stage_slot_take_several(tmp_path: Path, stand_ins: list[StandIn]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    (tmp_path / "class").mkdir()
    for number in range(24):
        Image.fromarray(np.roll(noise, number)).save(tmp_path / "class" / f"{number}.jpg", quality=98)
    pipe = ps.files(tmp_path).decode().random_resized_crop(SIZE).batch(24)
    (expected,) = epochs(pipe, 1, workers=1)
    (found,) = _with_lane(pipe, stand_ins)
    assert_same(found, expected)


def test_what_follows_the_copy_is_applied_on_the_device(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = (
        ps.files(photos).decode().random_resized_crop(SIZE).flip().normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).batch(8)
    )
    expected = epochs(pipe, 2, workers=1)
    for found, wanted in zip(_with_lane(pipe, stand_ins, 2), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert one["image"].dtype == torch.float32
            assert one["image"].equal(other["image"])
            assert one["id"].equal(other["id"])


def test_a_pipeline_without_a_lane_is_copied(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = ps.files(photos).decode().resize((2 * SIZE, 2 * SIZE)).map(_doubled, field="image").batch(8)
    expected = epochs(pipe, 4, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        for wanted in expected:
            assert_same(rest(loader), wanted)
        assert "no kernel does map" in loader.explain()
        assert stand_ins[0].rows == 0
        assert stand_ins[0].copied_bytes > 0


def _doubled(image: np.ndarray) -> np.ndarray:
    return image * 2


def test_without_workers_batches_are_moved(photos: Path, stand_ins: list[StandIn]) -> None:
    pipe = _pipe(photos)
    (expected,) = epochs(pipe, 1, workers=0)
    assert_same(*epochs(pipe, 1, workers=0, device="cuda"), expected)


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_named(photos: Path, device: str) -> None:
    if torch.cuda.is_available() and device == "cuda":
        assert ps.Loader(_pipe(photos), device=device)
        return
    with pytest.raises(ps.OptionError, match=r"cannot be had: (this torch|torch sees|there are)"):
        ps.Loader(_pipe(photos), device=device)
