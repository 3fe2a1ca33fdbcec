"""Loaders with device="cuda" on a real GPU: the batches are the CPU's, and the training is left alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
import penstock.loader
from loading import assert_same, epochs
from penstock.gpu import CudaDevice
from penstock.kernels.decoder import Decoder
from penstock.kernels.triton import axes, cut, finish, planes, steps, steps_tables
from penstock.placing import Sizes
from penstock.stage import Recipe

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


def _lane(loader: ps.Loader, number: int = 0) -> CudaDevice:
    device = loader._feed._devices[number]  # type: ignore[union-attr]
    assert isinstance(device, CudaDevice)
    return device


def _compiled() -> int:
    """How many variants of the lane's kernels were compiled up to now."""
    kernels = [axes._weigh, planes._convert, cut._pass, steps._apply, steps_tables.fill_tables, finish._finish]
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def _room() -> int:
    """Bytes of the GPU that a training could have."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


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
        device = _lane(loader)
        before, variants = (torch.cuda.memory_stats(), device.counts()), _compiled()
        for _ in range(1000):
            next(batches)
        after = torch.cuda.memory_stats(), device.counts()
        assert variants > 0
        assert _compiled() == variants, "a kernel was compiled on the way"
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
        clock = time.pthread_getcpuclockid(loader._feed.threads[0]._thread.ident)  # type: ignore[union-attr]

        def held(steps: int, images_per_s: float) -> float:
            start, cpu, native = time.perf_counter(), time.clock_gettime(clock), outside["seconds"]
            for step in range(steps):
                next(batches)
                time.sleep(max(0.0, start + (step + 1) * 128 / images_per_s - time.perf_counter()))
            wall = time.perf_counter() - start
            share = (time.clock_gettime(clock) - cpu - (outside["seconds"] - native)) / wall
            print(f"the interpreter for {share:.1%} of the time at {steps * 128 / wall:,.0f} images a second")
            return share

        held(100, 1e9)
        assert held(100, 5000) < 0.05, "as fast as a ResNet-50 takes them"


def test_nobody_waits_for_the_whole_device(folder: Path) -> None:
    """The training thread gets batches while a kernel of its own still runs, and no call synchronises the device."""
    with ps.Loader(_pipe(folder), device="cuda", workers=4, prefetch=12) as loader:
        batches = _running(loader)
        for _ in range(20):
            next(batches)
        time.sleep(0.5)  # until some are ready
        torch.cuda._sleep(4_000_000_000)  # two seconds or more
        behind = torch.cuda.Event()
        behind.record()
        kept = [next(batches) for _ in range(2)]
        assert not behind.query(), "a batch was handed over only when the device had done all"
        torch.cuda.synchronize()
        del kept
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(100):
                next(batches)
        calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")}
        print({key: count for key, count in calls.items() if "Launch" not in key})
        assert sum(count for key, count in calls.items() if "Launch" in key) > 100, "the profiler saw no lane"
        whole = sum(calls.get(key, 0) for key in ("cudaDeviceSynchronize", "cuCtxSynchronize"))
        assert whole <= 3, "more than the profiler's own"
        assert not any(key.startswith(("cudaMalloc", "cuMemAlloc", "cudaFree", "cuMemFree")) for key in calls), calls


def test_what_the_lane_adds_to_a_training_is_less_than_a_gibibyte(folder: Path) -> None:
    alone = _room()
    with ps.Loader(_pipe(folder, 256), device="cuda", workers=16) as loader:
        batches = _running(loader)
        for _ in range(10):
            next(batches)
        del batches
        beside = _room()
        counts = _lane(loader).counts()
        print(f"{(alone - beside) >> 20} MiB less than without; nvJPEG has taken {counts.device_bytes >> 20}")
        print(loader.explain())
        assert alone - beside <= 1 << 30


@pytest.mark.parametrize("sampling", [0, 1, 2])
def test_what_the_decoders_differ_by(tmp_path: Path, sampling: int) -> None:
    """Photographs as they are, cut without being resized: nothing but the decoders can differ."""
    rng = np.random.default_rng(sampling)
    (tmp_path / "class").mkdir()
    for number in range(64):
        coarse = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        grain = rng.normal(0, 6, (375, 500, 3))
        noisy = Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
        noisy.save(tmp_path / "class" / f"{number:02}.jpg", quality=90, subsampling=sampling)
    pipe = ps.files(tmp_path).decode().center_crop(320).batch(64)
    (expected,) = epochs(pipe, 1, workers=2, shuffle=False)
    with ps.Loader(pipe, device="cuda", workers=2, shuffle=False, exact=True) as loader:
        _running(loader)
        loader.set_epoch(0)
        (found,) = list(loader)
        assert _share(loader) > 0.5, loader.explain()
    apart = (found["image"].cpu().int() - expected[0]["image"].int()).abs().flatten()
    most, p99 = int(apart.max()), float(apart.float().sort().values[int(0.99 * (len(apart) - 1))])
    print(f"subsampling {sampling}: at most {most} levels, 99% within {p99:g}, {(apart == 0).float().mean():.3%} equal")
    assert p99 <= 7


def test_several_devices_are_fed_in_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one GPU it stands for two."""
    count = torch.cuda.device_count()

    def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> CudaDevice:
        return CudaDevice(torch.device("cuda", int(device[-1]) % count), recipe, sizes)

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    pipe = _pipe(folder, 32)
    expected = epochs(pipe, 2, workers=4)
    with ps.Loader(pipe, device=["cuda:0", "cuda:1"], workers=4) as loader:
        _running(loader)
        loader.set_epoch(0)
        for wanted in expected:
            found = list(loader)
            assert [batch["image"].device.index for batch in found] == [k % 2 % count for k in range(len(found))]
            assert_same(_on_cpu(found), wanted)


def test_workers_come_and_go_beside_the_lane(folder: Path) -> None:
    pipe = _pipe(folder, 32)
    expected = epochs(pipe, 4, workers=4)
    with ps.Loader(pipe, device="cuda", workers=2) as loader:
        _running(loader)
        loader.set_epoch(0)
        for workers, wanted in zip((4, 8, 4, 1), expected, strict=True):
            loader.resize(workers)
            assert_same(_on_cpu(list(loader)), wanted)


@pytest.mark.parametrize("between", ["beside", "between"])
def test_a_training_goes_on_in_both_ways_of_sharing(folder: Path, between: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7, 4), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)).cuda()
    pipe = _pipe(folder, 32)
    (expected,) = epochs(pipe, 1, workers=4)
    with ps.Loader(pipe, device="cuda", workers=4, gpu_lane=between) as loader:
        _running(loader)
        loader.set_epoch(0)
        found = []
        for batch in loader:
            model(batch["image"].float()).sum().backward()
            found.append({name: value.cpu() for name, value in batch.items()})
        assert_same(found, expected)
        assert f"{between} the training's steps: as asked" in loader.explain()


def test_the_way_of_sharing_is_decided_with_a_reason(folder: Path) -> None:
    weights = torch.randn(4096, 4096, device="cuda")
    with ps.Loader(_pipe(folder, 32), device="cuda", workers=4) as loader:
        batches = _running(loader)
        for _ in range(200):
            next(batches)["image"].float().mean().add_((weights @ weights)[0, 0])
        print(loader.explain())
        assert "steps took" in loader.explain()


def test_a_training_that_runs_out_of_memory_gets_the_lanes(folder: Path) -> None:
    pipe = _pipe(folder)
    expected = epochs(pipe, 3, workers=4)
    with ps.Loader(pipe, device="cuda", workers=4) as loader:
        _running(loader)
        loader.set_epoch(0)
        assert_same(_on_cpu(list(loader)), expected[0])
        torch.cuda.empty_cache()
        hog = torch.empty(torch.cuda.mem_get_info()[0] - (100 << 20), dtype=torch.uint8, device="cuda")
        time.sleep(0.5)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(250 << 20, dtype=torch.uint8, device="cuda")
        wanted = torch.empty(250 << 20, dtype=torch.uint8, device="cuda")  # when it tries again there is room
        assert_same(_on_cpu(list(loader)), expected[1])
        assert "it gave back 1 of its areas" in loader.explain()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(250 << 20, dtype=torch.uint8, device="cuda")
        assert_same(_on_cpu(list(loader)), expected[2])
        print(loader.explain())
        del hog, wanted
    torch.cuda.empty_cache()


@pytest.mark.parametrize("left", [900 << 20, 500 << 20, 160 << 20])
def test_where_memory_is_short_the_lane_takes_less_or_nothing(folder: Path, left: int) -> None:
    pipe = _pipe(folder)
    (expected,) = epochs(pipe, 1, workers=4)
    gc.collect()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
    try:
        with ps.Loader(pipe, device="cuda", workers=4) as loader:
            assert_same(_on_cpu(list(loader)), expected)
            print(loader.explain())
            assert left > 200 << 20 or "GPU lane: none; " in loader.explain()
    finally:
        del hog
        torch.cuda.empty_cache()
