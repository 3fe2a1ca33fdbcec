"""`penstock demo`: its data set is the same everywhere, and its comparison is of two real trainings."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penstock import demo, terminal
from penstock.demo.dataset import PillowImages
from penstock.demo.images import CLASSES, generate, picture
from penstock.demo.training import Comparison, Outcome, compare, report


def test_a_picture_is_the_same_each_time() -> None:
    assert picture(2, 5).tobytes() == picture(2, 5).tobytes()
    assert picture(2, 5).tobytes() != picture(2, 6).tobytes()
    assert picture(2, 5).tobytes() != picture(3, 5).tobytes()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("demo"), 10)


def test_the_data_set_has_class_folders_and_a_validation_part(root: Path) -> None:
    for part, count in (("train", 9), ("val", 1)):
        assert sorted(folder.name for folder in (root / part).iterdir()) == sorted(CLASSES)
        assert all(len(list(folder.glob("*.jpg"))) == count for folder in (root / part).iterdir())
    sizes = set()
    for path in root.rglob("*.jpg"):
        with Image.open(path) as image:
            sizes.add(image.size)
    assert len(sizes) >= 3


def test_a_data_set_that_is_there_is_used_again(root: Path) -> None:
    marked = next(root.rglob("*.jpg"))
    before = marked.stat().st_mtime_ns
    calls: list[int] = []
    assert generate(root.parent, 10, calls.append) == root
    assert marked.stat().st_mtime_ns == before
    assert not calls


def test_a_data_set_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    def stop(pictures: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        generate(tmp_path, 10, stop)
    assert not list(tmp_path.iterdir())
    assert len(list(generate(tmp_path, 10).rglob("*.jpg"))) == 10 * len(CLASSES)


def test_the_compared_data_set_holds_the_same_samples_with_the_same_labels(root: Path) -> None:
    samples = PillowImages(root / "train", 32, (0.35, 1.0))
    assert len(samples) == 9 * len(CLASSES)
    assert [samples[i][1] for i in range(len(samples))] == sorted([*range(len(CLASSES))] * 9)
    image, _ = samples[0]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.uint8
    assert not torch.equal(image, samples[0][0])


@pytest.mark.processes
def test_both_trainings_see_every_image(root: Path) -> None:
    threads = torch.get_num_threads()
    result = compare(root, epochs=2)
    assert torch.get_num_threads() == threads
    assert [outcome.name for outcome in result.outcomes] == ["Penstock", "DataLoader"]
    for outcome in result.outcomes:
        assert outcome.images == 2 * 9 * len(CLASSES)
        assert 0 < outcome.waited_s < outcome.seconds
        assert np.isfinite(outcome.loss)
        assert 0 <= outcome.accuracy <= 1


def test_the_report_shows_both_side_by_side() -> None:
    outcomes = (Outcome("Penstock", 4000, 2.0, 0.2, 0.5, 0.9), Outcome("DataLoader", 4000, 8.0, 6.0, 0.25, 0.8))
    lines = [line.split() for line in report(Comparison(outcomes, 2000, 2, 3, 1)).splitlines()]
    assert ["images/s", "2,000", "500"] in lines
    assert ["time", "waited", "for", "data", "10%", "75%"] in lines
    assert ["accuracy,", "validation", "90.0%", "80.0%"] in lines


@pytest.mark.processes
def test_the_whole_demo_runs_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(tmp_path / "new" / "folder", per_class=10, epochs=1)
    out = capsys.readouterr().out
    assert "making pictures: 60 of 60" in out
    assert "Penstock, epoch 1: 54 of 54" in out
    assert "images/s" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("training", 128) as advance:
        advance(64)
        advance(64)
    assert "training" in screen.getvalue()
    assert "64/128" in screen.getvalue()
    assert "128/128" in screen.getvalue()


def test_progress_does_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with terminal.progress("training", 128) as advance:
        advance(64)
    assert screen.getvalue() == f"\rtraining             [{'#' * 20}{'.' * 20}] 64/128\n"
