"""A diagnosis as text, as JSON after the published schema, and as a page that refers to nothing outside itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.findings import findings
from penstock.profile import Profile
from penstock.report.document import diagnosis_json, schema
from penstock.report.page import diagnosis_page
from penstock.report.plots import Check, by_cache
from penstock.report.svg import ticks
from penstock.report.text import cases_text, diagnosis_text, remote_text
from penstock.report.words import duration, evidence, gain
from penstock.whatif import as_it_is, never_evicting, outlook, predict, remote
from profiles import profile
from schemas import violations

PUBLISHED = Path(__file__).parent.parent / "docs" / "diagnosis.schema.json"
STREAM = profile(
    storage_samples_per_s=None, storage_bytes_per_s=None, storage=(), dataset_bytes=None, cache_bytes=None, operators=()
)
BARE = replace(STREAM, workers=0, prep=(), steps_s=(), waits_s=(), prep_evidence=None, watch_evidence=None, gpu=None)


def test_the_published_schema_is_that_of_what_is_written() -> None:
    written = json.dumps(schema(), indent=2) + "\n"
    assert PUBLISHED.read_text() == written, "python -m penstock.report.document > docs/diagnosis.schema.json"


@pytest.mark.parametrize("whole", [profile(), STREAM, BARE])
def test_a_diagnosis_fits_the_published_schema(whole: Profile) -> None:
    published = json.loads(PUBLISHED.read_text())
    assert list(violations(published, json.loads(diagnosis_json(whole)))) == []


def test_what_does_not_fit_the_schema_is_noticed() -> None:
    published = json.loads(PUBLISHED.read_text())
    for change in (
        lambda data: data["profile"].pop("cores"),
        lambda data: data["profile"].update(cores=1.5),
        lambda data: data["profile"].update(cores=True),
        lambda data: data["profile"].update(colour="red"),
        lambda data: data["findings"][0].update(kind="haunted"),
        lambda data: data["profile"]["split"].update(compute_s=None),
    ):
        data = json.loads(diagnosis_json(profile()))
        change(data)
        assert list(violations(published, data))


def test_units_are_in_the_keys() -> None:
    """Every number's name ends in its unit, or counts what it says."""
    counts = {
        *("version", "steps_per_phase", "ranks", "cores", "gpus", "workers", "readers", "batch_samples"),
        *("dataset_samples", "prefetch_batches", "efficiency", "read_amplification", "share", "gpu_factor"),
        *("storage_factor", "lane_cost", "cached_share"),
    }

    def numbers(name: str, value: object) -> set[str]:
        if isinstance(value, dict):
            return {each for key, item in value.items() for each in numbers(key, item)}
        if isinstance(value, list):
            return {each for item in value for each in numbers(name, item)}
        return {name} if isinstance(value, int | float) and not isinstance(value, bool) else set()

    names = numbers("", json.loads(diagnosis_json(profile()))) - counts
    assert {name for name in names if not name.endswith(("_s", "_bytes", "_share", "s_per_sample"))} == set()


def test_the_text_says_where_the_time_goes_and_what_would_help() -> None:
    shown = diagnosis_text(profile())
    assert re.search(r"compute +107 ms +49% ", shown)
    assert re.search(r"waiting for storage +70\.6 ms +32% ", shown)
    assert re.search(r"^  S +1,900  reading alone, from storage, 209 MB/s$", shown, re.MULTILINE)
    for finding in findings(profile()):
        assert finding.what in " ".join(shown.split())
    assert all(case.label in shown for case in outlook(profile()))
    assert max(map(len, shown.splitlines())) < 130


def test_every_form_bears_what_could_not_be_measured() -> None:
    for whole in (STREAM, BARE):
        assert "reading alone, from storage" not in diagnosis_text(whole)
        assert "Rate against cache size" not in diagnosis_page(whole)
        assert json.loads(diagnosis_json(whole))["profile"]["storage_samples_per_s"] is None
    noted = profile(notes=("S was not measured: caches could not be dropped",))
    assert "caches could not be dropped" in diagnosis_text(noted)
    assert "caches could not be dropped" in diagnosis_page(noted)


class Page(HTMLParser):
    """Elements that a page opens and closes, and what it refers to."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.refers += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("whole", [profile(), STREAM, BARE, profile(script="<img src=x>", notes=("a < b",))])
def test_the_page_is_well_formed_has_no_script_and_refers_to_nothing_outside(whole: Profile) -> None:
    page = Page()
    text = diagnosis_page(whole)
    page.feed(text)
    assert page.open == []
    assert not {"script", "img", "iframe"} & set(page.names)
    assert page.refers == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text


def test_a_plot_has_a_title_a_description_and_units() -> None:
    plot = by_cache(profile(), [Check(0.5, 8, 1400.0), Check(0.5, 4, 900.0)])
    assert plot is not None
    assert "<title>Rate against cache size</title><desc>Predicted from" in plot
    assert ">samples/s</text>" in plot
    assert "all of it: 141 GB" in plot
    assert "measured, 50% cached: 1,400 samples/s" in plot
    assert "900 samples/s" not in plot  # of another number of workers


def test_predictions_are_a_table_that_names_what_holds_them() -> None:
    lines = cases_text(outlook(profile())).splitlines()
    heads = lines[0].split()
    assert heads[:3] == ["workers", "cached", "G"]
    assert lines[1].startswith("as it is ")
    assert "workers read and prepare in turn" in lines[1]
    assert any("+" in line and "preparing: P" in line for line in lines)


def test_remote_storage_is_compared_in_words() -> None:
    whole = profile()
    assert "pays from epoch" in remote_text(remote(whole, never_evicting(whole), 50e6, 1e9))
    assert "never pays" in remote_text(remote(whole, never_evicting(whole), 50e9, 1e9))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_within_the_axis(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 8
    slack = 1e-6 * max(abs(low), width)
    assert all(low - slack <= value <= low + width + slack for value in found)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 µs"),
        (2.5e-6, "2.5 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (119, "119 s"),
        (150, "2.5 min"),
        (9000, "2.5 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_figures_are_shown_with_the_unit_of_their_name() -> None:
    assert evidence("storage_bytes_per_s", 132e6) == "storage 132 MB/s"
    assert evidence("storage_samples_per_s", 1200) == "storage 1,200 samples/s"
    assert evidence("cache_needed_bytes", 24e9) == "cache needed 24.0 GB"
    assert evidence("lock_wait_s", 0.0123) == "lock wait 12.3 ms"
    assert evidence("costliest_operator_share", 0.66) == "costliest operator 66%"
    assert evidence("read_amplification", 1.2345) == "read amplification 1.234"
    assert gain(150, 100) == "+50%"
    assert gain(100.4, 100) == ""


def test_rates_of_the_text_are_the_predictions() -> None:
    whole = profile()
    now = predict(whole, as_it_is(whole))
    assert f"{now.fetch_samples_per_s:,.0f}" in diagnosis_text(whole)
