"""The device's own code from end to end, on a GPU of the imagination: its batches are the CPU's, bit for bit."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.training.loaders import ablation
from PIL import Image

from triton_device import DEVICE

# isort: split

from triton.runtime import interpreter

import penstock as ps
import penstock.gpu
import penstock.loader
from fake_cuda import FakeGpu, install
from loading import Batch, assert_same, epochs, rest, wait_until
from penstock.gpu import CudaDevice
from penstock.kernels.triton import cut, lane, planes
from penstock.placing import Sizes
from penstock.stage import Recipe

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(DEVICE != "cpu", reason="where there is a GPU, test_loader_gpu.py has the same on it"),
]

SIZE = 8


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops as numpy 2.4 has them, and one program for an image: see test_triton_cut.py.

    And one thread at a time, as the interpreter keeps in its module which program runs.
    """
    run, turn = lane.run, threading.Lock()

    def alone(*arguments: Any) -> None:
        with turn:
            run(*arguments)

    monkeypatch.setattr(lane, "run", alone)
    for module in (planes, cut):
        monkeypatch.setattr(module, "programs", lambda n: 1)
        monkeypatch.setattr(module, "TILE", (64, 64))
    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[CudaDevice]:
    """The devices of loaders."""
    devices: list[CudaDevice] = []

    def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> CudaDevice:
        devices.append(CudaDevice(torch.device(device), recipe, sizes))
        return devices[-1]

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    return devices


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, opened: list[CudaDevice]) -> FakeGpu:
    """Of the examples that a lane begins with, the first is decoded and the second is refused."""
    examples = penstock.gpu._examples()[:2]
    monkeypatch.setattr(penstock.gpu, "_examples", lambda: examples)
    return install(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most can be decoded by the imagined engine; some are refused by it, some are none of its business."""
    root = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    for number in range(8):
        (root / f"class{number % 2}").mkdir(exist_ok=True)
        _save(root / f"class{number % 2}" / f"{number:02}.jpg", rng, number)
    return root


def _save(path: Path | io.BytesIO, rng: np.random.Generator, number: int) -> None:
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(tuple(rng.integers(20, 70, 2)), Image.Resampling.BICUBIC)
    options: dict[str, Any] = {"subsampling": 2 if number % 8 == 3 else 0, "progressive": number % 8 == 5}
    image.convert("L" if number % 8 == 6 else "RGB").save(path, "JPEG", quality=90, **options)


def _pipe(folder: Path) -> ps.Pipe:
    return ps.files(folder).decode().random_resized_crop(SIZE).flip().batch(4)


def _epoch(loader: ps.Loader) -> list[Batch]:
    """The first, once the lanes are there."""
    loader._running()
    devices = loader._feed._devices  # type: ignore[union-attr]
    wait_until(lambda: all(device in penstock.gpu._LANES for device in devices), 60)
    return rest(loader)


@pytest.mark.parametrize("way", ["beside", "between"])
def test_batches_are_those_of_the_cpu(folder: Path, gpu: FakeGpu, opened: list[CudaDevice], way: Any) -> None:
    pipe = ps.files(folder).decode().random_resized_crop(SIZE).flip().rand_augment(n=1)
    pipe = pipe.normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).batch(4)
    (expected,) = epochs(pipe, 1, workers=1)
    with ps.Loader(pipe, device="cuda", workers=2, gpu_lane=way) as loader:
        for one, other in zip(_epoch(loader), expected, strict=True):
            assert one["id"].equal(other["id"])
            assert one["image"].equal(other["image"])
            assert one["image"].stride() == other["image"].stride()
        assert gpu.decoded > 1, "the lane took part"
        assert "of its memory the decoder has taken 7 MiB" in loader.explain()
        assert "differ from a CPU lane's" in loader.explain(), "one of its own examples is subsampled, and refused"
        assert gpu.refused > 0
    assert not gpu.pinned, "all memory is unpinned"
    assert (gpu.entered, gpu.engines, gpu.decoders) == (0, 0, 0)
    assert not opened[0]._areas


def test_an_engine_that_decodes_as_the_cpu_does_is_seen_to(
    folder: Path, gpu: FakeGpu, opened: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = []
    for number in (0, 1, 6):
        file = io.BytesIO()
        _save(file, np.random.default_rng(number), number)
        examples.append(file.getvalue())
    monkeypatch.setattr(penstock.gpu, "_examples", lambda: examples)
    with ps.Loader(_pipe(folder), device="cuda", workers=2, exact=True) as loader:
        expected = epochs(_pipe(folder), 1, workers=1)[0]
        assert_same(rest(loader), expected)
        assert "equal a CPU lane's, bit for bit" in loader.explain()


def test_exact_batches_repeat(folder: Path, gpu: FakeGpu, opened: list[CudaDevice]) -> None:
    """The lane differs from the CPU, by its own examples: every sample that it can take is its."""
    found = []
    for workers in (2, 3):
        with ps.Loader(_pipe(folder), device="cuda", workers=workers, exact=True) as loader:
            before = gpu.decoded
            found.append(rest(loader))
            made = gpu.decoded - before
            assert made == 6 + 1, "all but those that are subsampled or progressive; and an example"
    assert_same(*found)


def test_batches_that_are_kept_stay_right(folder: Path, gpu: FakeGpu, opened: list[CudaDevice]) -> None:
    expected = epochs(_pipe(folder), 2, workers=1)
    with ps.Loader(_pipe(folder), device="cuda", workers=2, prefetch=1) as loader:
        kept = [list(loader), list(loader)]
    for one, other in zip(kept, expected, strict=True):
        assert_same(one, other)


def test_several_devices(folder: Path, gpu: FakeGpu, opened: list[CudaDevice]) -> None:
    (expected,) = epochs(_pipe(folder), 1, workers=1)
    with ps.Loader(_pipe(folder), device=["cuda:0", "cuda:1"], workers=2) as loader:
        assert_same(_epoch(loader), expected)
        assert len(opened) == 2
    assert not gpu.pinned


def test_the_ablations_lane_makes_the_same_on_demand(
    folder: Path, gpu: FakeGpu, opened: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = epochs(_pipe(folder), 1, workers=1)[0]
    monkeypatch.setattr(penstock.loader, "open_device", ablation._on_demand)
    with ps.Loader(_pipe(folder), device="cuda", workers=2, gpu_lane="beside") as loader:
        assert_same(_epoch(loader), expected)
        assert gpu.decoded > 1
        assert "GPU lane: takes 4 samples" in loader.explain()
        assert gpu.decoders == 1, "its first one; those of tiny-batches are gone"


def test_a_lane_that_has_given_all_back_leaves_the_work_to_the_cpu(
    folder: Path, gpu: FakeGpu, opened: list[CudaDevice]
) -> None:
    expected = epochs(_pipe(folder), 3, workers=1)
    with ps.Loader(_pipe(folder), device="cuda", workers=2) as loader:
        assert_same(_epoch(loader), expected[0])
        for _ in range(2):
            opened[0].make_room()
        assert_same(rest(loader), expected[1])
        assert_same(rest(loader), expected[2])
        wait_until(lambda: rest(loader) and "has given all of its memory back" in loader.explain(), 60)
        assert gpu.decoders == 0
        assert gpu.engines == 0
