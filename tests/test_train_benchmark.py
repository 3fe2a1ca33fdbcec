"""The training benchmark measures what it says, end to end on the CPU; a contender that fails costs its own row."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu, harness, train
from benchmarks.training import data, loaders, meters, parts, trial
from benchmarks.training.data import Recipe, class_folders
from benchmarks.training.loaders import Job, penstock
from benchmarks.training.parts import Part
from PIL import Image

CLASSES = 300
CPU = ["--device", "cpu", "--quick", "--cores", "1", "--files", str(2 * CLASSES), "--classes", str(CLASSES)]


@pytest.fixture(autouse=True)
def _scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets of a test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_PHOTOS", raising=False)


def _record(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.processes
def test_a_training_on_images_is_measured_with_its_own_g(tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = ["--model", "tiny", "--batch", "32", "--size", "32", "--image-size", "48x40", "--results", str(results)]
    loaders = ["--loader", "synthetic", "penstock:workers=-1", "penstock", "--rounds", "2"]
    assert train.main([*CPU, *options, *loaders]) == 1
    record = _record(results)
    synthetic, wrong, right = record["rows"]
    assert "workers must be" in wrong["error"]
    assert wrong["samples"] == []
    for row in (synthetic, right):
        (sample,) = row["samples"]
        assert row["error"] is None
        assert sample["g"] > 0
        assert sample["ratio"] == pytest.approx(sample["images_per_s"] / sample["g"])
        assert sample["ratio"] + sample["waited_share"] + sample["slowed_share"] == pytest.approx(1)
        assert 0.01 < sample["cores"] < 2.5
    assert right["samples"][0]["alone_images_per_s"] > 0
    assert right["samples"][0]["waited_share"] > synthetic["samples"][0]["waited_share"]
    assert record["settings"]["machine"]["torch"] == torch.__version__
    assert record["environment"]["cores"] > 0


@pytest.mark.processes
def test_a_part_of_the_matrix_trains_on_waveforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PARTS", (Part("m5-2cores", "m5", ("penstock",), batch=2),))
    results = tmp_path / "results"
    only = ["--only", "m5-2cores", "--results", str(results)]
    assert gpu.main([*CPU, *only]) == 0
    (row,) = _record(results)["rows"]
    assert row["samples"][0]["images_per_s"] > 0


@pytest.mark.interop
@pytest.mark.parametrize(("model", "loaders"), [("resnet18", ["torch", "torch:v1", "rough"]), ("m5", ["torch"])])
def test_torch_feeds_its_models(tmp_path: Path, model: str, loaders: list[str]) -> None:
    results = tmp_path / "results"
    options = ["--model", model, "--batch", "8", "--size", "64", "--image-size", "96x80", "--results", str(results)]
    assert train.main([*CPU, *options, "--loader", *loaders]) == 0
    for row in _record(results)["rows"]:
        assert row["samples"][0]["ratio"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [[], ["--compile"], ["--compile", "reduce-overhead"]])
def test_a_gpu_is_timed_by_its_own_events(tmp_path: Path, compile: list[str]) -> None:
    results = tmp_path / "results"
    options = ["--model", "tiny", "--batch", "64", "--image-size", "96x80", "--results", str(results), *compile]
    assert train.main([*CPU[2:], *options, "--loader", "synthetic"]) == 0
    (sample,) = _record(results)["rows"][0]["samples"]
    assert sample["waited_share"] < 0.5
    assert sample["gpu_mib"] > sample["allocated_mib"] > 0


@pytest.mark.processes
def test_loaders_alone_need_no_model(tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = ["--model", "none", "--batch", "32", "--size", "32", "--image-size", "48x40", "--results", str(results)]
    assert train.main([*CPU, *options]) == 0
    (sample,) = _record(results)["rows"][0]["samples"]
    assert sample["alone_images_per_s"] > 0
    assert "g" not in sample


_BOTH = """
import contextlib, pathlib, sys, torch
from benchmarks.training import loaders

job = loaders.Job(pathlib.Path(sys.argv[1]), "image", 24, 4, 32, 1, "rand", "cpu", 0)
with (
    contextlib.closing(loaders.opened("penstock", job)) as here,
    contextlib.closing(loaders.opened("process", job)) as there,
):
    for _ in range(10):
        wanted, found = next(here), next(there)
        assert all(map(torch.equal, found, wanted))
        assert found[0].stride() == wanted[0].stride()
"""


@pytest.mark.processes
def test_another_process_gives_the_same_batches(tmp_path: Path) -> None:
    """In a fresh interpreter, as multiprocessing keeps a process of its own until the end."""
    root = class_folders(Recipe(files=24, classes=2, width=60, height=50))
    environment = {**os.environ, "PYTHONPATH": f"{harness.ROOT / 'src'}:{harness.ROOT}"}
    command = [sys.executable, "-c", _BOTH, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_the_ablation_changes_the_order_of_work_and_no_batch(tmp_path: Path) -> None:
    """On the CPU, where no lane can be taken apart; the sizes of files are known, and then they are not looked at."""
    root = class_folders(Recipe(files=24, classes=2, width=60, height=50))
    job = Job(root, "image", 24, 4, 32, 2, "rand", "cpu", 0)
    taken = {}
    for setting in ("none", "ahead", "affinity", "threshold"):
        with contextlib.closing(loaders.opened(f"ablation:{setting}", job)) as batches:
            taken[setting] = [next(batches) for _ in range(6)]
    for one in taken.values():
        for mine, other in zip(one, taken["none"], strict=True):
            assert all(map(torch.equal, mine, other))
    with pytest.raises(ValueError, match="the setting must be one of none, ahead"):
        next(loaders.opened("ablation:all", job))


def test_a_part_without_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*CPU, "--only", "tiny-2cores", "--within", "1"]) == 0
    assert "no time for all of: gpu-tiny-2cores" in capsys.readouterr().err


def test_generated_files_are_of_the_asked_size_and_many_classes(tmp_path: Path) -> None:
    root = data.class_folders(Recipe(files=330, classes=CLASSES, width=50, height=40, progressive=0.5))
    paths, labels = _job(root).files()
    assert len(paths) == 330
    assert max(labels) == CLASSES - 1
    found = [Image.open(io.BytesIO(Path(path).read_bytes())) for path in paths]
    sides = [tuple(sorted(image.size)) for image in found]
    assert all(34 <= short <= 46 and 42 <= long <= 58 for short, long in sides)
    progressive = sum("progressive" in image.info for image in found)
    assert 160 <= progressive <= 170
    assert len(list(tmp_path.iterdir())) == 1


def test_photographs_weigh_what_photographs_of_that_size_do() -> None:
    root = data.class_folders(Recipe(files=8, classes=2))
    assert 95_000 < data.mean_bytes(root) < 125_000


def _job(root: Path) -> Job:
    return Job(root, "image", 1000, 4, 32, 1, "rand", "cpu", 0)


class _Lazy:
    """A trainer whose step takes 10 ms."""

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        time.sleep(0.01)


def _slow() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A loader whose batch takes 30 ms."""
    while True:
        time.sleep(0.03)
        yield torch.zeros(4), torch.zeros(4)


def test_waiting_is_told_from_training() -> None:
    measuring = trial.Trial.__new__(trial.Trial)
    measuring.job, measuring.trainer = _job(Path()), _Lazy()  # type: ignore[assignment]
    measured = measuring._train(_slow(), 0.5)
    assert 0.65 < measured["waited_share"] < 0.85
    assert 60 < measured["images_per_s"] <= 100


def test_cpu_time_counts_children_and_their_ended_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n{burn}",
    ]
    script = f"import subprocess, sys, time\nsubprocess.run({command!r})\nprint('over', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"over\n"
        assert 0.55 < meters.cpu_seconds(process.pid) < 1.5
    finally:
        process.kill()
        process.communicate()


def test_a_contender_that_kills_the_process_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(function: str, request: dict[str, Any], *, cores: int, timeout: float) -> dict[str, Any]:
        asked.append([tuple(turn) for turn in request["turns"]])
        with open(request["log"], "a") as log:
            print(json.dumps({"machine": {"gpu": "of paper"}}), file=log)
            for number, name in request["turns"]:
                print(json.dumps({"begun": name}), file=log)
                if name == "deadly" and number == 1:
                    log.write('{"name": "dea')
                    raise RuntimeError("exit status -11")
                print(json.dumps({"name": name, "round": number, "note": "", "ratio": 0.9}), file=log)
        return {}

    monkeypatch.setattr(harness, "measure", measure)
    options = argparse.Namespace(
        rounds=2, seconds=1, warm=0, device="cpu", data=tmp_path, photos=None, samples=8, commit="", results=tmp_path
    )
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "0.jpg").write_bytes(b"0")
    part = Part("paper", "tiny", ("first", "deadly", "last"))
    rows, settings = parts.measured(part, options, time.time() + 100)
    assert asked[1] == [(1, "last")]
    assert [len(row.samples) for row in rows] == [2, 1, 2]
    assert [row.error for row in rows] == [None, "exit status -11", None]
    assert settings["machine"] == {"gpu": "of paper"}
    assert "then failed" in parts.show(part, rows)


def test_a_setting_becomes_keywords() -> None:
    assert penstock.keywords("workers=4,order=ready,seed=0x10") == {"workers": 4, "order": "ready", "seed": 16}
    assert penstock.keywords("") == {}
