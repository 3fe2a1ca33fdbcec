"""Diagnosis of scripts that know nothing of it, and of loops in Python: what is measured, and what is said where it
cannot be."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.throttled import Disk, Samples
from tests.trainings import PHOTOS, diagnose, plain
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import penstock as ps
from penstock.diagnosis.conduct import Conductor
from penstock.diagnosis.session import Settings
from penstock.profile import Profile

pytestmark = pytest.mark.processes

STEP = "optimizer.step()"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of 100 kB."""
    folder = tmp_path / "files"
    folder.mkdir()
    for index in range(240):
        (folder / f"{index:03}.bin").write_bytes(os.urandom(100_000))
    return folder


def test_a_script_that_nobody_changed(tmp_path: Path, photos: Path) -> None:
    pages = "--json", tmp_path / "all.json", "--html", tmp_path / "page.html"
    done = diagnose(tmp_path, PHOTOS, photos, "--epochs", 2, options=pages)
    assert done.status == 0, done.err
    assert done.err == ""
    assert "Where the time goes" in done.out
    assert "the script has ended" not in done.out
    profile = Profile.from_json((tmp_path / "profile.json").read_text())
    assert "DataLoader over Photos" in profile.loader
    assert (profile.batch_samples, profile.workers, profile.dataset_samples) == (5, 1, 30)
    assert profile.gpu_samples_per_s > 0
    assert {point.workers for point in profile.prep} >= {1}
    assert not [note for note in profile.notes if "could not" in note]
    assert {"resize", "to_tensor", "collate"} <= {operator.name for operator in profile.operators}
    size = sum(path.stat().st_size for path in photos.rglob("*.jpg")) / 30
    assert profile.sample_bytes == pytest.approx(size)
    assert profile.memory_samples_per_s
    assert profile.in_memory is True
    assert sum(vars(profile.split).values()) == pytest.approx(sum(profile.steps_s) / len(profile.steps_s))
    assert {"profile.json", "all.json", "page.html"} <= {path.name for path in tmp_path.iterdir()}


def test_a_script_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    body = f"{STEP}\n        if number == 5: raise ValueError('boom')"
    done = diagnose(tmp_path, plain(body))
    assert done.status == 1
    assert done.out == ""
    assert done.profile is None
    lines = done.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/train.py", line 12, in <module>'
    assert "ValueError: boom" in lines
    assert lines[-1].startswith("penstock: ")
    assert "watching" in lines[-1]
    assert "nothing is reported" in lines[-1]


def test_a_script_that_cannot_be_compiled_shows_where(tmp_path: Path) -> None:
    done = diagnose(tmp_path, "x = = 1\n")
    assert done.status == 1
    assert "train.py" in done.err.splitlines()[0]
    assert "SyntaxError" in done.err
    assert "runpy" not in done.err


@pytest.mark.parametrize(("argument", "status"), [("3", 3), ("'bad words'", 1)])
def test_a_script_s_exit_status_is_kept(tmp_path: Path, argument: str, status: int) -> None:
    done = diagnose(tmp_path, plain(f"{STEP}; sys.exit({argument})"))
    assert done.status == status
    assert done.profile is None
    assert ("bad words" in done.err) == (status == 1)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("print('hello')\n", [], ["without iterating"]),
        (plain(f"{STEP}\n        if number == 9: break"), [], ["ended while replaying", "--steps"]),
        (plain(STEP), ["--skip", 101], ["before the first phase", "Let it train longer"]),
        (plain("pass"), [], ["no torch optimizer stepped", "0: torch.utils.data.DataLoader", "--loader"]),
    ],
    ids=["no loader", "ends early", "ends while steps are skipped", "no optimizer"],
)
def test_where_there_is_nothing_to_measure_it_says_why(
    tmp_path: Path, script: str, options: list[object], words: list[str]
) -> None:
    done = diagnose(tmp_path, script, options=options)
    assert done.status == 2
    assert done.profile is None
    assert all(word in done.err.splitlines()[-1] for word in words), done.err


def test_a_script_without_an_optimizer_is_told_which_loader_trains(tmp_path: Path) -> None:
    done = diagnose(tmp_path, plain("pass"), options=["--loader", 0])
    assert done.status == 0, done.err
    assert done.profile is not None
    assert done.profile["storage_samples_per_s"] is None
    assert any("no file is read" in note for note in done.profile["notes"])


def test_data_smaller_than_a_phase_are_iterated_again(tmp_path: Path) -> None:
    done = diagnose(tmp_path, plain(STEP, samples=4, epochs=2))
    assert done.status == 0, done.err
    assert done.profile is not None
    assert any("epoch ended while it was watched" in note for note in done.profile["notes"])


def test_caches_that_cannot_be_dropped_give_no_storage_rate(tmp_path: Path, photos: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copytree(photos, Path(folder, "photos"))
        done = diagnose(tmp_path, PHOTOS, Path(folder, "photos"), "--epochs", 2)
    assert done.status == 0, done.err
    assert done.profile is not None
    assert done.profile["storage_samples_per_s"] is None
    assert done.profile["storage"] == []
    assert done.profile["cold"] is False
    assert done.profile["memory_samples_per_s"] > 0
    assert any("could not be dropped" in note for note in done.profile["notes"])


def test_with_continue_the_script_goes_on_to_its_end(tmp_path: Path) -> None:
    done = diagnose(tmp_path, plain(f"{STEP}; last = number"), options=["--continue"])
    assert done.status == 0, done.err
    assert "the script has ended" in done.out
    assert done.out.index("the script has ended") < done.out.index("Where the time goes")
    assert done.profile is not None
    assert done.profile["gpu_batches"] == []


def test_a_step_that_cannot_take_half_a_batch_loses_nothing_else(tmp_path: Path) -> None:
    done = diagnose(tmp_path, plain(f"assert len(batch) == 2; {STEP}"))
    assert done.status == 0, done.err
    assert done.profile is not None
    assert done.profile["gpu_samples_per_s"] > 0
    assert done.profile["gpu_batches"] == []
    assert any("failed while replaying halved batches" in note for note in done.profile["notes"])


def test_all_ranks_measure_and_one_reports(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.zeros(400, 4))
for batch, in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    model(batch).sum().backward()
    optimizer.step()
"""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = diagnose(tmp_path, script, launcher=run)
    assert done.status == 0, done.err
    assert done.out.count("Where the time goes") == 1
    assert done.profile is not None
    assert (done.profile["ranks"], done.profile["dataset_samples"]) == (2, 400)
    assert any("over 2 ranks" in note for note in done.profile["notes"])


def test_rates_are_near_the_truth(files: Path) -> None:
    """On a machine that others use, too; the benchmark is stricter."""
    step_s, prep_s, bytes_per_s = 0.02, 0.01, 10e6
    data = Samples(files, Disk(bytes_per_s), prep_s)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    profile = ps.diagnose(loader, lambda batch: time.sleep(step_s), steps=12)
    assert profile.gpu_samples_per_s == pytest.approx(4 / step_s, rel=0.15)
    assert profile.prep_samples_per_s == pytest.approx(2 / prep_s, rel=0.15)
    if profile.cold is None:
        pytest.skip("this kernel does not count what a device reads")
    if profile.cold:
        assert profile.storage_bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)
    else:  # the folder of this test lies in memory
        assert profile.storage_bytes_per_s is None


def test_a_penstock_loader_is_diagnosed_operator_by_operator(photos: Path) -> None:
    pipe = ps.files(photos).decode().random_resized_crop(32).flip().batch(4, drop_last=True)
    with ps.Loader(pipe, workers=1, seed=0) as loader:
        before = loader.state_dict()
        profile = ps.diagnose(loader, lambda batch: batch["image"].float().sum(), steps=4)
        assert loader.state_dict()["fingerprint"] == before["fingerprint"]
    names = [operator.name for operator in profile.operators]
    assert names[0] == "read"
    assert names[-1] == "batch"
    assert any("random_resized_crop" in name for name in names)
    size = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert profile.dataset_bytes == pytest.approx(size, rel=0.2)  # from the samples that were looked at
    assert profile.memory_samples_per_s is not None


def test_copies_to_a_device_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for one: memory is copied to the host's own."""
    monkeypatch.setattr("penstock.diagnosis.session._device", lambda: torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    loader = DataLoader(TensorDataset(torch.zeros(80, 1000)), batch_size=4)
    profile = ps.diagnose(loader, lambda batch: None, steps=4)
    assert profile.copy_s is not None
    assert profile.copy_bytes_per_s == pytest.approx(16_000 / profile.copy_s)
    assert profile.resident_samples_per_s is not None


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in sorted(self._folder.iterdir()):
            yield torch.frombuffer(bytearray(path.read_bytes()[:64]), dtype=torch.uint8)


def test_a_stream_is_diagnosed_as_far_as_it_can_be(files: Path) -> None:
    profile = ps.diagnose(DataLoader(_Stream(files), batch_size=4, num_workers=1), lambda batch: None, steps=4)
    assert profile.sample_bytes == 100_000
    assert profile.dataset_samples is None
    assert profile.cache_bytes is None
    assert profile.operators == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], print), "DataLoader"),
        ((DataLoader(TensorDataset(torch.zeros(4))), 3), "step"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(arguments: tuple[Any, Any], words: str) -> None:
    with pytest.raises(ps.OptionError, match=words):
        ps.diagnose(*arguments)


def test_steps_have_a_least_number() -> None:
    with pytest.raises(ps.OptionError, match="at least 4"):
        ps.diagnose(DataLoader(TensorDataset(torch.zeros(4))), print, steps=3)


def test_a_step_s_own_error_comes_through() -> None:
    def step(batch: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ps.diagnose(DataLoader(TensorDataset(torch.zeros(40))), step, steps=4)


def test_steps_that_are_to_pass_first_do() -> None:
    seen: list[int] = []
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    profile = ps.diagnose(loader, lambda batch: seen.append(len(batch[0])), steps=4, skip=7)
    assert not any("no whole epoch" in note for note in profile.notes)
    assert len(seen) >= 7 + 3 * (4 + 2)


def test_nothing_is_replaced_outside_of_a_diagnosis() -> None:
    kinds = (DataLoader, ps.Loader)
    originals = [kind.__iter__ for kind in kinds]
    conductor = Conductor("script", Settings())
    with conductor.watched():
        assert all(kind.__iter__ is not original for kind, original in zip(kinds, originals, strict=True))
    assert [kind.__iter__ for kind in kinds] == originals
