"""Loaders whose cache keeps pixels, or either form: the same batches, from the first epoch to the last."""

from __future__ import annotations

import itertools
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
from loading import rest, workers
from penstock.cache.forms import Costs
from stand_in_device import SIZE, StandIn

__all__ = ["apart"]

pytestmark = pytest.mark.processes

Batches = list[dict[str, torch.Tensor]]
AMPLE = "64MiB"


def pipe(photos: Path) -> ps.Pipe:
    return ps.files(photos).decode().random_resized_crop(32).flip().color_jitter(0.4).batch(4)


def epochs(of: ps.Pipe, count: int = 3, **options: Any) -> tuple[Batches, dict[str, Any], str]:
    with ps.Loader(of, seed=3, **options) as loader:
        batches = [{name: value.clone() for name, value in batch.items()} for _ in range(count) for batch in loader]
        return batches, loader.stats()["cache"], loader.explain()


def same(left: Batches, right: Batches) -> bool:
    return len(left) == len(right) and all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(left, right, strict=True)
    )


@pytest.fixture(scope="module")
def plain(photos: Path) -> Batches:
    with ps.Loader(pipe(photos), seed=3, workers=0) as loader:
        return [{name: value.clone() for name, value in batch.items()} for _ in range(3) for batch in loader]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("form", ["decoded", "auto"])
def test_batches_are_those_without_a_cache(photos: Path, plain: Batches, form: str, count: int) -> None:
    batches, told, _ = epochs(pipe(photos), workers=count, cache=AMPLE, cache_form=form)
    assert same(batches, plain)
    assert (told["misses"], told["hits"]) == (30, 60)
    assert told["samples"] + told["decoded_samples"] == 30
    assert told["decoded_samples"] == 30 or form == "auto"


def test_all_samples_are_read_once_and_kept_as_pixels(photos: Path) -> None:
    _, told, explained = epochs(pipe(photos), workers=2, cache=AMPLE, cache_form="decoded")
    files = list(photos.rglob("*.jpg"))
    pixels = 0
    for path in files:
        with Image.open(path) as image:
            pixels += 3 * image.width * image.height
    assert told["read_bytes"] == sum(path.stat().st_size for path in files)
    assert 0 < told["decoded_bytes"] - pixels < 200 * 30
    assert "keeps samples as pixels, all that find room: after decode, before anything that depends on" in explained
    assert "holds 30 samples as pixels" in explained


@pytest.mark.parametrize("form", ["decoded", "auto"])
def test_every_epoch_hits_exactly_what_found_room(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    for number in range(60):
        noise = rng.integers(0, 256, (220, 300, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.jpg", quality=95)
    large = ps.files(tmp_path, labels=None).decode().random_resized_crop(32).flip().batch(4)
    expected, _, _ = epochs(large, 3, workers=0)
    with ps.Loader(large, seed=3, workers=2, cache="3MiB", cache_form=form) as loader:
        found, counts = [], []
        for _ in range(3):
            found += [{name: value.clone() for name, value in batch.items()} for batch in loader]
            counts.append(loader.stats()["cache"])
    assert same(found, expected)
    held = counts[0]["samples"] + counts[0]["decoded_samples"]
    assert 10 < held < 60
    for before, after in itertools.pairwise(counts):
        assert after["hits"] - before["hits"] == held
        assert after["misses"] - before["misses"] == 60 - held
        assert after["held_bytes"] == before["held_bytes"] <= 3 << 20


def test_the_share_is_settled_by_what_was_measured(photos: Path) -> None:
    """Files of 2 KB in the page cache: to decode them takes longer than to read them."""
    _, told, explained = epochs(pipe(photos), 4, workers=1, cache=AMPLE, cache_form="auto")
    settled = told["settled"]
    assert settled["share"] == 1.0
    costs = Costs(**settled["costs"])
    assert 1000 < costs.encoded_bytes < 5000
    assert 6000 < costs.decoded_bytes < 30_000
    assert 0 < costs.fetch_s < 0.1
    assert told["decoded_samples"] >= 30 - 16
    assert "100% of those that find room are to be pixels: a sample takes" in explained


def test_a_deterministic_pipeline_is_kept_to_its_end(photos: Path) -> None:
    final = ps.files(photos).decode().resize(24).center_crop(20).batch(4)
    expected, _, _ = epochs(final, 2, workers=0)
    batches, told, explained = epochs(final, 2, workers=2, cache=AMPLE, cache_form="decoded")
    assert same(batches, expected)
    assert 30 * 1200 <= told["decoded_bytes"] < 30 * 1400
    assert "after decode+resize+center_crop" in explained


def test_loaders_whose_pixels_are_the_same_share_them(photos: Path) -> None:
    one = ps.files(photos).decode().random_resized_crop(32).batch(4)
    other = ps.files(photos).decode().center_crop(16).batch(4)
    third = ps.files(photos).decode().flip().random_crop(16, pad_if_needed=True).batch(6)
    options: dict[str, Any] = {"workers": 1, "cache": AMPLE, "cache_form": "decoded"}
    with ps.Loader(one, **options) as first, ps.Loader(other, **options) as second, ps.Loader(third, **options) as last:
        for loader in (first, second, last):
            rest(loader)
        assert [loader.stats()["cache"]["misses"] for loader in (first, second, last)] == [30, 30, 0]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_are_as_bad_as_without(photos: Path, tmp_path: Path, on_error: str) -> None:
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[: len(content) // 2] if number % 7 == 0 else content)
    bad = ps.files(tmp_path, labels=None).decode().random_resized_crop(32).batch(5)
    expected: list[Any] = []
    for options in ({}, {"cache": AMPLE, "cache_form": "decoded"}):
        with ps.Loader(bad, seed=3, workers=2, on_error=on_error, **options) as loader:  # type: ignore[arg-type]
            found = [dict(batch) for _ in range(2) for batch in loader], loader.stats()["errors"]
            expected = expected or list(found)
            assert same(found[0], expected[0])
            assert found[1] == expected[1]


def test_workers_that_are_killed_lose_nothing(photos: Path, plain: Batches) -> None:
    with ps.Loader(pipe(photos), seed=3, workers=2, cache=AMPLE, cache_form="decoded") as loader:
        found = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                found.append({name: value.clone() for name, value in batch.items()})
                if number in (1, 4):
                    os.kill(workers(loader)[0], signal.SIGKILL)
        assert same(found, plain)


def test_memory_that_is_given_back_costs_time_alone(photos: Path, plain: Batches) -> None:
    with ps.Loader(pipe(photos), seed=3, workers=0, cache=AMPLE, cache_form="decoded") as loader:
        found = []
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found.append({name: value.clone() for name, value in batch.items()})
                if epoch == 1 and number == 3:
                    arena = loader._feed._keeper.arena  # type: ignore[union-attr]
                    due = arena.state().held - 150_000
                    arena.give_back(lambda due=due: due)
        told = loader.stats()["cache"]
    assert same(found, plain)
    assert 0 < told["decoded_samples"] < 30
    assert told["given_back_samples"] > 0


def test_what_is_overwritten_is_decoded_anew(photos: Path, tmp_path: Path) -> None:
    for path in sorted(photos.rglob("*.jpg")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    own = ps.files(tmp_path, labels=None).decode().random_resized_crop(32).batch(5)
    options: dict[str, Any] = {"cache": AMPLE, "cache_form": "decoded", "seed": 3}
    with ps.Loader(own, workers=1, **options) as first:
        before = [dict(batch) for batch in first]
        (tmp_path / "07.jpg").write_bytes((tmp_path / "08.jpg").read_bytes())
        with ps.Loader(own, workers=1, **options) as second:
            after = [dict(batch) for batch in second]
            assert second.stats()["cache"]["misses"] == 1
    expected, _, _ = epochs(own, 1, workers=0)
    assert same(after, expected)
    assert not same(before, expected)


def test_forms_are_refused_where_there_are_no_pixels(photos: Path) -> None:
    raw = ps.files(photos).batch(4, ragged="list")
    with pytest.raises(ps.OptionError, match="the pipeline does not begin with decode; use cache_form='encoded'"):
        ps.Loader(raw, cache=AMPLE, cache_form="decoded")
    with ps.Loader(raw, workers=0, cache=AMPLE, cache_form="auto") as loader:
        assert "encoded, as they are stored, for the pipeline does not begin with decode" in loader.explain()


# beside a GPU lane


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Loaders with device="cuda" get a stand-in; it is listed here."""
    opened: list[StandIn] = []

    def open_device(device: str, recipe: Any, sizes: Any) -> StandIn:
        opened.append(StandIn(recipe, sizes))
        return opened[-1]

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    return opened


@pytest.mark.parametrize("form", ["decoded", "auto"])
def test_a_gpu_lane_has_encoded_bytes(photos: Path, stand_ins: list[StandIn], form: str) -> None:
    lane = ps.files(photos).decode().random_resized_crop(SIZE).flip().rand_augment().batch(8)
    with ps.Loader(lane, seed=3, workers=2) as loader:
        expected = [dict(batch) for _ in range(3) for batch in loader]
    with ps.Loader(lane, seed=3, workers=2, device="cuda", cache=AMPLE, cache_form=form) as loader:  # type: ignore[arg-type]
        found = [{name: value.clone() for name, value in batch.items()} for _ in range(3) for batch in loader]
        while not stand_ins[-1].rows:
            rest(loader)
        told, explained = loader.stats()["cache"], loader.explain()
    assert same(found, expected)
    if form == "auto":
        assert told["decoded_samples"] == 0
        assert "keeps samples encoded, as they are stored, for the GPU lane decodes for itself" in explained
    else:
        assert "pixels serve the CPU lanes alone; what the GPU lane takes first is kept encoded" in explained
    assert told["samples"] + told["decoded_samples"] == 30
    assert told["samples"] > 0
