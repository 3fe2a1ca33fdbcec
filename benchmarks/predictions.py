"""What the diagnosis benchmark predicted and then measured: a table and a plot for docs/findings.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock.profile import Profile
from penstock.report.svg import Axis, Chart, standalone
from penstock.whatif import Prediction, as_it_is, predict

__all__ = ["plot", "plots", "predicted", "section", "table"]

Record = dict[str, Any]


def predicted(record: Record) -> list[tuple[Prediction, float]]:
    """Each setting of the diagnosis benchmark that was measured, as its one profile predicts it, and its rate."""
    profile = Profile.from_json(record["rows"][0]["samples"][0]["profile"])
    found = []
    for row in record["rows"][1:]:
        workers, share = re.fullmatch(r"(\d+) workers, (\d+)% cached", row["name"]).groups()  # type: ignore[union-attr]
        if row["samples"]:
            setup = replace(as_it_is(profile), workers=int(workers), cached_share=int(share) / 100)
            found.append(
                (predict(profile, setup), statistics.median(sample["samples_per_s"] for sample in row["samples"]))
            )
    return found


def table(record: Record) -> Iterator[str]:
    """Markdown: each prediction beside what was then measured."""
    yield "| workers | cached | F | P | G | min(F, P, G) | predicted | measured | off by |"
    yield "| ---: |" + " ---: |" * 8
    for one, measured in predicted(record):
        rates = (one.fetch_samples_per_s or 0.0, one.prep_samples_per_s, one.gpu_samples_per_s, one.least_samples_per_s)
        cells = [f"{rate:,.0f}" for rate in (*rates, one.samples_per_s, measured)]
        yield (
            f"| {one.setup.workers} | {one.setup.cached_share:.0%} | {' | '.join(cells)} "
            f"| {one.samples_per_s / measured - 1:+.1%} |"
        )


def plot(record: Record) -> str:
    """An SVG: predicted lines and measured points, a colour for each number of workers."""
    profile = Profile.from_json(record["rows"][0]["samples"][0]["profile"])
    points = predicted(record)
    top = 1.15 * max(max(measured, one.samples_per_s) for one, measured in points)
    chart = Chart(
        "Predicted and measured rate against cache size",
        "Lines are predicted from one profile, points were measured.",
        Axis("share of the data cached", 0.0, 1.0, percent=True),
        Axis("samples/s", 0.0, top),
    )
    workers = sorted({one.setup.workers for one, _ in points})
    for count, colour in zip(workers, ("prep", "best", "thrash"), strict=True):
        setup = replace(as_it_is(profile), workers=count)
        line = [(x / 50, predict(profile, replace(setup, cached_share=x / 50)).samples_per_s) for x in range(51)]
        chart.line(line, colour, f"{count} worker{'s' if count > 1 else ''}, predicted")
        seen = [(one.setup.cached_share, rate, f"{rate:.0f}") for one, rate in points if one.setup.workers == count]
        chart.points(seen, colour, "measured")
    return standalone(chart.text())


def section(record: Record | None) -> str:
    """The section of the page; empty where nothing was recorded."""
    if record is None:
        return ""
    environment = record["environment"]
    lines = [
        "One profile of a small network's steps on the CPU, decoded photographs and a disk that the kernel throttles,",
        "taken with two workers and no cache; then each setting was run",
        "(`python -m benchmarks.diagnosis --part real`).",
        "",
        "![Lines predicted from one profile, and points measured](diagnosis-real.svg)",
        "",
        *table(record),
        "",
        f"{environment['cores']} cores of an {environment['cpu']}, {environment['date'][:10]}; medians of "
        f"{max(len(row['samples']) for row in record['rows'])} rounds.",
    ]
    return "\n".join(lines)


def plots(record: Record | None) -> dict[str, str]:
    """The plots of the page, by the names of their files."""
    return {} if record is None else {"diagnosis-real.svg": plot(record)}
