"""Loaders with device="cuda" on a real GPU: the batches are the CPU's, and the training is left alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from loading import assert_same, epochs
from penstock.gpu import CudaDevice
from penstock.kernels.decoder import Decoder

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough photographs of many sizes and samplings for a lane to get its share."""
    root = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    for number in range(384):
        height, width = (int(side) for side in rng.integers(120, 600, 2))
        coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        (root / f"class{number % 4}").mkdir(exist_ok=True)
        image.save(root / f"class{number % 4}" / f"{number}.jpg", quality=92, subsampling=number % 3)
    return root


def _pipe(folder: Path, batch: int = 64) -> ps.Pipe:
    return ps.files(folder).decode().random_resized_crop(160).flip().rand_augment().batch(batch)


def _on_cpu(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value.cpu() for name, value in batch.items()} for batch in batches]


def _share(loader: ps.Loader) -> float:
    """The share of samples that the lane has made."""
    workers = loader.stats()["workers"]
    return sum(w["samples"] for w in workers if not w["pid"]) / sum(w["samples"] for w in workers)


def _endless(loader: ps.Loader) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader


def _running(loader: ps.Loader) -> Iterator[dict[str, Any]]:
    """Batches of a loader whose lane works."""
    batches = _endless(loader)
    deadline = time.monotonic() + 60
    while not loader.stats()["workers"] or not any(not w["pid"] and w["samples"] for w in loader.stats()["workers"]):
        next(batches)
        assert time.monotonic() < deadline, loader.explain()
    return batches


@pytest.mark.parametrize("exact", [False, True])
def test_batches_are_those_of_the_cpu_bit_for_bit(folder: Path, exact: bool) -> None:
    pipe = _pipe(folder)
    expected = epochs(pipe, 4, workers=4)
    with ps.Loader(pipe, device="cuda", workers=4, exact=exact) as loader:
        _running(loader)
        loader.set_epoch(0)
        for wanted in expected:
            assert_same(_on_cpu(list(loader)), wanted)
        assert _share(loader) > 0.2, loader.explain()


def test_normalised_batches_are_those_of_the_cpu(folder: Path) -> None:
    pipe = ps.files(folder).decode().random_resized_crop(160).flip().normalize(MEAN, STD).batch(64)
    expected = epochs(pipe, 2, workers=4)
    with ps.Loader(pipe, device="cuda", workers=4) as loader:
        _running(loader)
        loader.set_epoch(0)
        for wanted in expected:
            for one, other in zip(loader, wanted, strict=True):
                assert one["image"].is_cuda
                assert one["image"].cpu().equal(other["image"])


def test_nothing_is_allocated_in_the_steady_state(folder: Path) -> None:
    with ps.Loader(_pipe(folder, 32), device="cuda", workers=4) as loader:
        batches = _running(loader)
        for _ in range(50):
            next(batches)
        device = lane(loader)
        before = torch.cuda.memory_stats(), device.counts()
        for _ in range(1000):
            next(batches)
        after = torch.cuda.memory_stats(), device.counts()
        assert after[1].allocations == before[1].allocations
        assert after[0]["num_alloc_retries"] == before[0]["num_alloc_retries"]
        assert after[0]["segment.all.allocated"] == before[0]["segment.all.allocated"]
        assert after[0]["allocation.all.allocated"] == before[0]["allocation.all.allocated"]


def test_a_graph_can_be_captured_while_the_lane_works(folder: Path) -> None:
    layer = torch.nn.Conv2d(3, 8, 3).cuda()
    still = torch.zeros(32, 3, 160, 160, device="cuda")
    with ps.Loader(_pipe(folder, 32), device="cuda", workers=4) as loader:
        batches = _running(loader)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            layer(still)
        for _ in range(20):
            next(batches)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(still)
                time.sleep(0.01)
            still.copy_(next(batches)["image"])
            graph.replay()
            assert torch.allclose(out, layer(still), atol=1e-2)


def test_reduced_overhead_works_beside_the_lane(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    with ps.Loader(_pipe(folder, 32), device="cuda", workers=4) as loader, torch.no_grad():
        batches = _running(loader)
        for _ in range(20):
            image = next(batches)["image"].float()
            assert torch.allclose(compiled(image), model(image), rtol=1e-2, atol=1.0)


def test_the_lane_leaves_the_interpreter_to_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of the device's thread outside native code that has let go of the interpreter lock."""
    outside = {"seconds": 0.0}

    def timed(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*arguments)
            finally:
                outside["seconds"] += time.thread_time() - start

        return call

    monkeypatch.setattr(Decoder, "submit", timed(Decoder.submit))
    with ps.Loader(_pipe(folder, 128), device="cuda", workers=4) as loader:
        batches = _running(loader)
        thread = loader._feed.threads[0]._thread  # type: ignore[union-attr]
        clock = time.pthread_getcpuclockid(thread.ident)
        start, cpu, native = time.perf_counter(), time.clock_gettime(clock), outside["seconds"]
        for _ in range(200):
            next(batches)
        wall = time.perf_counter() - start
        held = time.clock_gettime(clock) - cpu - (outside["seconds"] - native)
    assert held / wall < 0.1, f"{held / wall:.1%} at {200 * 128 / wall:.0f} images a second"


def test_memory_that_runs_out_ends_the_lane_and_not_the_training(folder: Path) -> None:
    pipe = _pipe(folder)
    (expected,) = epochs(pipe, 1, workers=4)
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
    try:
        with ps.Loader(pipe, device="cuda", workers=4) as loader:
            assert_same(_on_cpu(list(loader)), expected)
            assert "GPU lane: none; OutOfMemoryError" in loader.explain()
    finally:
        del hog
        torch.cuda.empty_cache()
