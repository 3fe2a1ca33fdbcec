"""What was predicted and what was measured stand beside each other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from xml.etree import ElementTree

from benchmarks import predictions

from penstock.whatif import as_it_is, predict
from profiles import profile


def test_predictions_are_shown_beside_what_was_measured() -> None:
    whole = profile()
    rows = [{"name": "diagnosis", "samples": [{"profile": whole.to_json()}]}]
    for workers, share in itertools.product((4, 8, 16), (20, 80)):
        setup = replace(as_it_is(whole), workers=workers, cached_share=share / 100)
        measured = 1.03 * predict(whole, setup).samples_per_s
        samples = [{"samples_per_s": measured}]
        rows.append({"name": f"{workers} workers, {share}% cached", "samples": samples})
    lines = list(predictions.table({"rows": rows}))[2:]
    assert len(lines) == 6
    assert all(line.endswith("| -2.9% |") for line in lines)
    plot = ElementTree.fromstring(predictions.plot({"rows": rows}))
    assert len(plot.findall(".//{*}circle")) == 6 + 3  # and in the legend


def test_without_a_record_there_is_no_section() -> None:
    assert predictions.section(None) == ""
    assert predictions.plots(None) == {}
