"""What the pages say was measured is what the recorded files say."""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks import gpu, gpu_pages, report


def test_pages_show_the_recorded_figures() -> None:
    assert report.main(["--check"]) == 0


def test_a_changed_figure_makes_the_pages_stale(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for path in report.RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            for sample in row["samples"]:
                sample.update({key: value * 2 for key, value in sample.items() if report._number(value)})
        (tmp_path / path.name).write_text(json.dumps(record))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.main(["--check"]) == 1


def test_every_recorded_contest_has_all_contenders() -> None:
    for name in report.CONTESTS:
        record = report.load(name)
        assert record is not None
        assert not [row["name"] for row in record["rows"] if row["error"]]


def test_what_a_gpu_did_is_shown_with_its_machine(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Invented figures, which go into a page of the test's own."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    for page in ("benchmarks", "gpu"):
        (tmp_path / "docs" / f"{page}.md").write_text("<!-- figures -->\n<!-- /figures -->\n")
    part = gpu.PARTS[0]
    machine = {"gpu": "Some GPU", "torch": "2.0"}
    settings = {**asdict(part), "machine": machine, "mean_file_bytes": 110_000, "seconds": 6.0}
    rounds = [
        {"g": 5000.0, "alone_images_per_s": 9000.0, "images_per_s": 4500 + 10 * number, "ratio": 0.9 + number / 100}
        for number in range(3)
    ]
    failed = {"name": "dali", "note": "", "samples": [], "error": "it <broke>"}
    rows = [{"name": "synthetic", "note": "", "samples": rounds[:1], "error": None}, failed]
    record = {"settings": settings, "rows": [*rows, {"name": "penstock", "note": "", "samples": rounds, "error": None}]}
    (tmp_path / "gpu-some.json").write_text(json.dumps(record))
    alone = dict(record, settings={**settings, "model": "none"})
    (tmp_path / "gpu-alone.json").write_text(json.dumps(alone))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.main([]) == 0
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "### ResNet-50, eager, batch 256, 2 cores, 500x375, RandAugment" in text
    assert "| **Penstock** | 5,000 | 9,000 | 4,510 | 0.910 |" in text
    assert "| DALI, engine 0.65 | failed |" in text
    assert "Some GPU, torch 2.0, files of 110 KB; medians of 3 rounds of 6 s" in text
    plot = (tmp_path / "docs" / "gpu-some.svg").read_text()
    assert plot.count("<rect") == 2, "the ground, and one bar: neither G nor what failed has one"
    assert ">0.910<" in plot
    assert ">9,000<" in (tmp_path / "docs" / "gpu-alone.svg").read_text()
    assert report.main(["--check"]) == 0
    more = [{**sample, "ratio": sample["ratio"] + 0.04} for sample in rounds]
    dalis = [{**failed, "name": "dali", "samples": rounds}, {**failed, "name": "dali:1.0", "samples": more}]
    trained = {**record, "rows": [*record["rows"], *dalis]}
    assert list(gpu_pages.summary({"a": trained, "b": alone}))[2:] == [
        "| ResNet-50, eager, batch 256, 2 cores, 500x375, RandAugment |  | 0.95 | **0.91** |"
    ]
    assert not list(gpu_pages.summary({"b": alone})), "without a training there is no table"
