"""What the pages say was measured is what the recorded files say."""

from __future__ import annotations

import json

from benchmarks import report


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
