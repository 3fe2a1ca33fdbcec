"""What the pages say was measured is what the recorded files say."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree

from benchmarks import report

from penstock.whatif import as_it_is, predict
from profiles import profile


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


def test_predictions_are_shown_beside_what_was_measured() -> None:
    whole = profile()
    rows = [{"name": "diagnosis", "samples": [{"profile": whole.to_json()}]}]
    for workers, share in itertools.product((4, 8, 16), (20, 80)):
        setup = replace(as_it_is(whole), workers=workers, cached_share=share / 100)
        measured = 1.03 * predict(whole, setup).samples_per_s
        samples = [{"samples_per_s": measured}]
        rows.append({"name": f"{workers} workers, {share}% cached", "samples": samples})
    lines = list(report.predictions({"rows": rows}))[2:]
    assert len(lines) == 6
    assert all(line.endswith("| -2.9% |") for line in lines)
    plot = ElementTree.fromstring(report.predictions_plot({"rows": rows}))
    assert len(plot.findall(".//{*}circle")) == 6 + 3  # and in the legend
