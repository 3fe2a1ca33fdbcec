"""Counters as text: what Prometheus reads is what was counted."""

from __future__ import annotations

import re

from penstock.report import prometheus
from penstock.stats import Counters
from penstock.work import BadSample

LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> tuple[Series, dict[str, str]]:
    """The text exposition format, version 0.0.4: series by name and labels, and the type of each name."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    helped: set[str] = set()
    series: Series = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge")
            assert name not in types
            types[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match is not None, line
            name, labels, value = match.groups()
            assert list(types)[-1] == name, "a metric's lines stand together, after its type"
            pairs = LABEL.findall(labels)
            assert ",".join(f'{key}="{text}"' for key, text in pairs) == labels
            key = name, tuple((label, re.sub(r"\\(.)", _plain, text)) for label, text in pairs)
            assert key not in series
            series[key] = float(value)
    assert helped == set(types)
    return series, types


def _plain(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def counters(name: str = "train") -> Counters:
    counters = Counters(name, 42, 2)
    counters.deliver(64, [BadSample(0, 7, "a.jpg", "decode", "broken"), BadSample(1, 3, "b.jpg", "read", "gone")])
    counters.deliver(32, [BadSample(0, 7, "a.jpg", "decode", "broken")])
    counters.worker(1).samples = 60
    counters.worker(0).samples = 36
    counters.worker(0).busy_s = 1.5e-7
    counters.lost = 1
    counters.count({"samples": 5, "source_s": 0.5})
    counters.count({"samples": 2, "source_samples": 9})
    counters.trainer = {"wait_s": 0.25, "batches_taken": 2, "batches_copied": 1, "slots_held": 3}
    return counters


GAUGES = {"window": 4, "slots": 8, "slots_free": 5, "slot_bytes": 1 << 30}


def test_prometheus_reads_what_was_counted() -> None:
    series, types = parse(prometheus(counters().snapshot(**GAUGES)))
    own = (("loader", "train"), ("pid", "42"))
    read = {name.removeprefix("penstock_"): value for (name, labels), value in series.items() if labels == own}
    assert read == {
        "batches_total": 2,
        "samples_total": 96,
        "wait_seconds_total": 0.25,
        "batches_copied_total": 1,
        "workers_lost_total": 1,
        "bad_samples_total": 3,
        "disk_samples_total": 7,
        "disk_read_bytes_total": 0,
        "disk_kept_samples_total": 0,
        "disk_kept_bytes_total": 0,
        "disk_damaged_total": 0,
        "source_samples_total": 9,
        "source_read_bytes_total": 0,
        "source_seconds_total": 0.5,
        "window_batches": 4,
        "slots": 8,
        "slots_free": 5,
        "slots_held": 3,
        "slot_bytes": 1 << 30,
    }
    assert series["penstock_worker_samples_total", (*own, ("worker", "0"))] == 36
    assert series["penstock_worker_samples_total", (*own, ("worker", "1"))] == 60
    assert series["penstock_worker_busy_seconds_total", (*own, ("worker", "0"))] == 1.5e-7
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types.items())


def test_a_cache_is_served_where_there_is_one() -> None:
    names = (
        *("hits", "misses", "hit_bytes", "read_bytes", "spoiled", "samples", "bytes"),
        *("decoded_samples", "decoded_bytes", "held_bytes", "budget_bytes"),
    )
    cache = {name: number for number, name in enumerate((*names, "given_back_bytes"), 1)}
    without, _ = parse(prometheus(counters().snapshot(**GAUGES)))
    series, types = parse(prometheus(counters().snapshot(cache, **GAUGES)))
    assert {name for name, _ in series} - {name for name, _ in without} == {
        "penstock_cache_hits_total",
        "penstock_cache_misses_total",
        "penstock_cache_hit_bytes_total",
        "penstock_storage_read_bytes_total",
        "penstock_cache_spoiled_total",
        "penstock_cache_samples",
        "penstock_cache_bytes",
        "penstock_cache_decoded_samples",
        "penstock_cache_decoded_bytes",
        "penstock_cache_held_bytes",
        "penstock_cache_budget_bytes",
        "penstock_cache_given_back_bytes_total",
    }
    own = (("loader", "train"), ("pid", "42"))
    assert series["penstock_storage_read_bytes_total", own] == 4
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types.items())


def test_any_name_can_be_served() -> None:
    for name in ("", 'say "hi"', "back\\slash", "two\nlines", "\\n", "größe 7 {x}"):
        series, _ = parse(prometheus(counters(name).snapshot(**GAUGES)))
        assert {dict(labels)["loader"] for _, labels in series} == {name}


def test_a_loader_that_did_nothing_yet_can_be_served() -> None:
    series, _ = parse(prometheus(Counters("idle", 1, 0).snapshot(**GAUGES)))
    assert series["penstock_batches_total", (("loader", "idle"), ("pid", "1"))] == 0


def test_bad_samples_are_listed_once_and_all_counted() -> None:
    snapshot = counters().snapshot(**GAUGES)
    assert snapshot["bad_samples"] == 3
    assert [(error["id"], error["place"], error["operator"], error["reason"]) for error in snapshot["errors"]] == [
        (3, "b.jpg", "read", "gone"),
        (7, "a.jpg", "decode", "broken"),
    ]


def test_the_list_of_bad_samples_does_not_grow_without_end() -> None:
    counters = Counters("many", 1, 1)
    for id in range(5000):
        counters.deliver(1, [BadSample(0, id, "", "", "")])
    snapshot = counters.snapshot(**GAUGES)
    assert snapshot["bad_samples"] == 5000
    assert len(snapshot["errors"]) == 1000


def test_a_worker_keeps_its_number_and_its_counts() -> None:
    counters = Counters("train", 1, 1)
    counters.worker(0).samples += 5
    counters.worker(0).pid = 99
    assert counters.snapshot(**GAUGES)["workers"] == [{"number": 0, "pid": 99, "samples": 5, "busy_s": 0.0}]
