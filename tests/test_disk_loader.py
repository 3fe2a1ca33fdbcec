"""Loaders with a disk tier: the same batches as without, fewer reads, and nothing that goes wrong there stops a job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

import penstock as ps
from loading import Launcher
from penstock.disk import plan_disk, survey

pytestmark = pytest.mark.processes


def pipe(photos: Path) -> ps.Pipe:
    return ps.files(photos).decode().random_resized_crop(32).flip().batch(4)


def epochs(photos: Path, count: int, **options: Any) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    with ps.Loader(pipe(photos), seed=3, **options) as loader:
        batches = [{name: value.clone() for name, value in batch.items()} for _ in range(count) for batch in loader]
        return batches, loader.stats()


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    return len(left) == len(right) and all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(left, right, strict=True)
    )


@pytest.fixture
def plain(photos: Path) -> list[dict[str, torch.Tensor]]:
    return epochs(photos, 2, workers=0)[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_and_the_source_is_read_once(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]], workers: int
) -> None:
    first, told = epochs(photos, 2, workers=workers, cache_folder=tmp_path / "kept")
    assert same(first, plain)
    assert told["disk"]["source_samples"] == told["disk"]["kept_samples"] == told["disk"]["samples"] == 30
    assert told["disk"]["source_bytes"] == sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert told["disk"]["source_s"] > 0
    second, told = epochs(photos, 2, workers=workers, cache_folder=tmp_path / "kept")
    assert same(second, plain)
    assert (told["disk"]["source_samples"], told["disk"]["samples"], told["disk"]["damaged"]) == (0, 60, 0)


def test_a_later_job_needs_the_source_for_names_alone(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    epochs(copy, 1, workers=2, cache_folder=tmp_path / "kept")
    loader = ps.Loader(pipe(copy), seed=3, workers=2, cache_folder=tmp_path / "kept")
    shutil.rmtree(copy)
    with loader:
        assert same([dict(batch) for _ in range(2) for batch in loader], plain)


def test_files_that_were_overwritten_are_read_anew(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    first, second = sorted(copy.rglob("*.jpg"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert not same(epochs(copy, 2, workers=2, cache_folder=tmp_path / "kept")[0], plain)
    first.write_bytes(content)
    batches, told = epochs(copy, 2, workers=2, cache_folder=tmp_path / "kept")
    assert same(batches, plain)
    assert told["disk"]["source_samples"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_stands_before_it(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]], workers: int
) -> None:
    batches, told = epochs(photos, 2, workers=workers, cache_folder=tmp_path, cache="8MiB")
    assert same(batches, plain)
    assert (told["disk"]["source_samples"], told["disk"]["samples"], told["disk"]["kept_samples"]) == (30, 0, 30)
    assert (told["cache"]["misses"], told["cache"]["hits"]) == (30, 30)
    batches, told = epochs(photos, 2, workers=workers, cache_folder=tmp_path, cache="8MiB")
    assert same(batches, plain)
    assert (told["disk"]["source_samples"], told["disk"]["samples"]) == (0, 30)
    assert told["cache"]["read_bytes"] == told["disk"]["bytes"]


def test_it_stands_before_urls(photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]) -> None:
    fsspec: Any = pytest.importorskip("fsspec")
    assert fsspec
    with ps.Loader(
        ps.files(f"local://{photos}").decode().random_resized_crop(32).flip().batch(4),
        seed=3,
        workers=2,
        cache_folder=str(tmp_path),
    ) as loader:
        assert same([dict(batch) for _ in range(2) for batch in loader], plain)
        assert loader.stats()["disk"]["source_samples"] == 30


def test_it_stands_before_tars(tmp_path: Path, photos: Path) -> None:
    subprocess.run(["tar", "cf", tmp_path / "a.tar", "--transform", "s,/,_,g", "-C", photos, "class0"], check=True)
    tars = ps.tars(str(tmp_path / "a.tar")).decode().random_resized_crop(32).batch(5)
    found = []
    for options in ({}, {"cache_folder": tmp_path / "kept"}, {"cache_folder": tmp_path / "kept"}):
        with ps.Loader(tars, workers=1, **options) as loader:
            found.append([dict(batch) for batch in loader])
            told = loader.stats()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert told["disk"]["samples"] == 10


def test_what_is_kept_is_shown(photos: Path, tmp_path: Path) -> None:
    with ps.Loader(pipe(photos), workers=1, metrics_port=0, cache_folder=tmp_path, cache_folder_bytes="1MB") as loader:
        assert "keeps 0 of these samples" in loader.explain()
        list(loader)
        assert f"disk tier: {tmp_path}" in loader.explain()
        assert "keeps 30 of these samples" in loader.explain()
        assert "of at most 1,000,000 bytes" in loader.explain()
        with urlopen(f"http://localhost:{loader.metrics_port}/metrics") as page:
            lines = page.read().decode().splitlines()
        assert any(line.startswith("penstock_disk_kept_samples_total{") and line.endswith(" 30") for line in lines)


def test_a_tier_that_cannot_be_used_is_one_warning_and_the_job_goes_on(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    for workers in (0, 2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            batches, told = epochs(photos, 2, workers=workers, cache_folder=tmp_path, cache_folder_bytes=900)
        assert same(batches, plain)
        assert told["disk"]["source_samples"] == 60
        (one,) = [str(warning.message) for warning in said if warning.category is RuntimeWarning]
        assert "cache_folder keeps no more samples: " in one
        assert "the budget of 900 bytes has no room for an index" in one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 KB; needs the right to mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", point], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root; the test of a budget without room stands for it")
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def test_a_full_disk_is_one_warning_and_the_job_goes_on(
    photos: Path, small_disk: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches, told = epochs(photos, 2, workers=2, cache_folder=small_disk, cache_folder_bytes="1GB")
    assert same(batches, plain)
    assert 0 < told["disk"]["kept_samples"] < 30
    assert told["disk"]["samples"] == told["disk"]["kept_samples"]
    (one,) = [str(warning.message) for warning in said if warning.category is RuntimeWarning]
    assert "No space left on device" in one


def test_a_job_that_is_killed_leaves_what_it_kept(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    script = (
        f"pipe = ps.files({str(photos)!r}).decode().random_resized_crop(32).flip().batch(4)\n"
        f"loader = ps.Loader(pipe, seed=3, workers=2, cache_folder={str(tmp_path / 'kept')!r})\n"
        "for number, batch in enumerate(loader):\n"
        "    if number == 2:\n"
        "        print('here', flush=True)\n"
        "        import time; time.sleep(60)\n"
    )
    launcher = Launcher()
    try:
        job = launcher.start(tmp_path / "job.py", script)
        job.first_line()
        os.kill(job.pid, signal.SIGKILL)
        assert job.end()[0] == -signal.SIGKILL
    finally:
        launcher.close()
    kept, _ = survey(plan_disk(pipe(photos).graph.source, str(tmp_path / "kept"), 0.5))
    assert kept >= 12
    batches, told = epochs(photos, 2, workers=2, cache_folder=tmp_path / "kept")
    assert same(batches, plain)
    assert told["disk"]["source_samples"] == 30 - kept


def test_two_jobs_at_once_share_what_they_keep(
    photos: Path, tmp_path: Path, plain: list[dict[str, torch.Tensor]]
) -> None:
    loaders = [ps.Loader(pipe(photos), seed=3, workers=1, cache_folder=tmp_path / "kept") for _ in range(2)]
    found: list[list[Any]] = [[], []]
    for _ in range(2):
        for pair in zip(*loaders, strict=True):
            for one, batch in zip(found, pair, strict=True):
                one.append(dict(batch))
    told = [loader.stats() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert same(found[0], plain)
    assert same(found[1], plain)
    assert sum(one["disk"]["kept_samples"] for one in told) >= 30
    assert sum(one["disk"]["source_samples"] for one in told) <= 60
