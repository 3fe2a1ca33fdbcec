"""`penstock what-if` answers from a saved profile alone, and refuses what it cannot read with an example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import DiagnosisError, OptionError, PenstockError
from penstock.profile import BatchPoint
from penstock.questions import answers, load
from penstock.report.document import diagnosis_json
from profiles import profile


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    return path


def labels(**asked: str) -> list[str]:
    return [case.label for case in answers(profile(), asked)]


def test_each_value_alone_and_then_all_combinations() -> None:
    assert labels(cores="8,16", gpu="2x") == [
        *("as it is", "8 cores", "16 cores", "GPU 2x"),
        *("8 cores, GPU 2x", "16 cores, GPU 2x"),
    ]
    assert labels(cache="64GB, 50%") == ["as it is", "cache 64.0 GB", "cache 50%"]


def test_what_is_asked_is_what_is_predicted() -> None:
    asked = {"cores": "16", "workers": "12", "cache": "50%", "gpu": "2x", "disk": "0.5x", "gpus": "2"}
    setup = answers(profile(), asked)[-1].prediction.setup
    assert (setup.cores, setup.workers, setup.ranks) == (16, 12, 2)
    assert (setup.cached_share, setup.gpu_factor, setup.storage_factor) == (0.5, 2.0, 0.5)


def test_more_cores_bring_workers_unless_workers_are_asked_for() -> None:
    found = {case.label: case.prediction.setup.workers for case in answers(profile(), {"cores": "4,16"})}
    assert found == {"as it is": 8, "4 cores": 8, "16 cores": 16}


def test_a_disk_by_its_rate_and_a_cache_by_its_size() -> None:
    whole = profile()
    assert whole.storage_bytes_per_s is not None
    assert whole.dataset_bytes is not None
    disk = answers(whole, {"disk": f"{2 * whole.storage_bytes_per_s / 1e6}MB/s"})[-1]
    assert disk.prediction.setup.storage_factor == pytest.approx(2.0)
    cache = answers(whole, {"cache": "64GiB"})[-1]
    assert cache.prediction.setup.cached_share == pytest.approx(64 * 2**30 / whole.dataset_bytes)


def test_a_gpu_lane_and_another_batch_size() -> None:
    lane = answers(profile(), {"lane": "15000/9%"})[-1].prediction.setup
    assert (lane.lane_samples_per_s, lane.lane_cost) == (15000.0, 0.09)
    points = (BatchPoint(128, 2000.0), BatchPoint(256, 2400.0))
    batch = answers(profile(gpu_batches=points), {"batch": "128"})[-1].prediction
    assert batch.gpu_samples_per_s == pytest.approx(2000.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("cores", value) for value in ("0", "-1", "8,", "many", "1.5")),
        *(("cache", value) for value in ("64", "64 gigs", "120%", "")),
        *(("gpu", value) for value in ("2", "0x")),
        *(("disk", value) for value in ("3GB", "0MB/s")),
        *(("lane", value) for value in ("15000", "15000/0.1", "fast/9%")),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"--{name}"):
        answers(profile(), {name: value})


def test_too_many_combinations_are_refused() -> None:
    many = ",".join(map(str, range(1, 16)))
    with pytest.raises(OptionError, match="255 predictions; at most 200"):
        answers(profile(), {"cores": many, "workers": many})


def test_a_disk_that_was_not_measured_cannot_be_replaced() -> None:
    with pytest.raises(DiagnosisError, match="S was not measured"):
        answers(profile(storage_bytes_per_s=None), {"disk": "2x"})


def test_the_command_prints_a_table(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(saved), "--cores", "8,16", "--cache", "64GB,128GB", "--gpu", "2x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "cores, cache" in line]) == 4
    assert lines[0].split()[-3:] == ["samples/s", "held", "by"]


def test_the_command_prints_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(saved), "--gpu", "2x", "--remote", "100MB/s", "--download", "1GB/s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [case["label"] for case in data["cases"]] == ["as it is", "GPU 2x"]
    assert data["remote"]["download_s"] == pytest.approx(1_281_167 * 110_000 / 1e9)


def test_remote_storage_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(saved), "--remote", "50MB/s", "--download", "1GB/s"]) == 0
    assert capsys.readouterr().out.startswith("remote, 50.0 MB/s: first epoch")
    assert main(["what-if", str(saved), "--remote", "50MB/s"]) == 2
    assert "give both" in capsys.readouterr().err


def test_the_profile_within_a_diagnosis_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.json"
    path.write_text(diagnosis_json(profile()))
    assert load(path) == profile()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON", '{"version": 99}', '{"profile": 3}'])
def test_what_is_no_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(PenstockError, match=r"odd\.json: "):
        load(path)


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
