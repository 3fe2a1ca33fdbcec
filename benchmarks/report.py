"""Renders the recorded figures: tables in README.md and docs/benchmarks.md, plots in docs/. Measures nothing.

`python -m benchmarks.report` rewrites what stands between the markers; `--check` says whether it is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import gpu_pages
from benchmarks.harness import ROOT
from benchmarks.predictions import plots, section

RESULTS = ROOT / "benchmarks" / "results"
CONTESTS = {"contest-default-2cores": "random resized crop, flip", "contest-rand-2cores": "RandAugment as well"}
NAMES = {
    "torch_pillow": "torch DataLoader, Pillow",
    "torch_opencv": "torch DataLoader, OpenCV",
    "torchvision": "torch DataLoader, torchvision tensors",
    "webdataset": "WebDataset",
    "litdata": "LitData",
    "grain": "Grain, OpenCV",
    "spdl": "SPDL",
    "ffcv": "FFCV",
    "dali": "DALI, CPU",
    "penstock": "Penstock",
}

Record = dict[str, Any]


def load(name: str) -> Record | None:
    """What a benchmark recorded."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def gpu_records() -> dict[str, Record]:
    """What `benchmarks.gpu` recorded."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu-*.json"))}


def spread(row: Record, key: str) -> tuple[float, float, float]:
    """Median, least and most over the rounds."""
    values = [sample[key] for sample in row["samples"]]
    return statistics.median(values), min(values), max(values)


def ranked(record: Record) -> list[Record]:
    """The rows of a contest that have figures, fastest first."""
    rows = [row for row in record["rows"] if row["samples"]]
    return sorted(rows, key=lambda row: -spread(row, "images_per_s")[0])


def contest_table(record: Record) -> Iterator[str]:
    """Markdown: rate, spread, ratio to torch's DataLoader with Pillow."""
    base = next(spread(row, "images_per_s")[0] for row in record["rows"] if row["name"] == "torch_pillow")
    yield "| | images/s | least to most | times torch with Pillow |"
    yield "| --- | ---: | ---: | ---: |"
    for row in ranked(record):
        median, least, most = spread(row, "images_per_s")
        name = NAMES[row["name"]]
        shown = f"**{name}**" if row["name"] == "penstock" else name
        yield f"| {shown} | {median:,.0f} | {least:,.0f} to {most:,.0f} | {median / base:.2f} |"
    for row in record["rows"]:
        if row["error"]:
            yield f"| {NAMES[row['name']]} | failed | | |"


def where(record: Record) -> str:
    """The machine, in a sentence."""
    environment = record["environment"]
    memory = int(environment["memory"].split()[0]) / 2**20
    rounds = max(len(row["samples"]) for row in record["rows"])
    return (
        f"{environment['cores']} cores of an {environment['cpu']}, {memory:.0f} GiB, Python {environment['python']}, "
        f"{environment['date'][:10]}; medians of {rounds} rounds, contenders in turn."
    )


def opaque_table(record: Record) -> Iterator[str]:
    """Markdown: `ps.DataLoader` beside torch's."""
    rows = {row["name"]: row for row in record["rows"]}
    yield "| dataset | torch, samples/s | Penstock, samples/s | ratio | longest wait, torch | Penstock |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for case in dict.fromkeys(name.split("/")[0] for name in rows):
        torch, penstock = rows[f"{case}/torch"], rows[f"{case}/penstock"]
        rates = [spread(row, "samples_per_s")[0] for row in (torch, penstock)]
        waits = [1000 * spread(row, "longest_wait_s")[0] for row in (torch, penstock)]
        yield (
            f"| {case} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[1] / rates[0]:.2f} "
            f"| {waits[0]:.1f} ms | {waits[1]:.1f} ms |"
        )


def bars(record: Record, title: str) -> str:
    """An SVG with a bar for each contender; the whisker spans all rounds."""
    rows = ranked(record)
    most = max(spread(row, "images_per_s")[2] for row in rows)
    left, width, step = 230, 430, 28
    height = 56 + step * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" fill="#222">{escape(title)}: images per second on two cores</text>',
    ]
    for index, row in enumerate(rows):
        median, low, high = spread(row, "images_per_s")
        y = 44 + step * index
        fill = "#1f6f8b" if row["name"] == "penstock" else "#a9b7bd"
        ends = [left + width * value / most for value in (low, high)]
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="#222">{escape(NAMES[row["name"]])}</text>',
            f'<rect x="{left}" y="{y}" width="{width * median / most:.1f}" height="19" fill="{fill}"/>',
            f'<path d="M{ends[0]:.1f} {y + 9.5}H{ends[1]:.1f}" stroke="#222" stroke-width="1.5"/>',
            f'<text x="{left + width + 12}" y="{y + 14}" fill="#222">{median:,.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def readme() -> str:
    """The one table of the README."""
    record = load("contest-default-2cores")
    if record is None:
        return ""
    lines = [
        "4,000 photographs (98 KB each) from the page cache; random resized crop to 224x224, antialiased, and flip;",
        "batches of 64.",
        "",
        *contest_table(record),
        "",
        where(record) + " RandAugment, opaque datasets, start-up and what the training process pays:",
        "[benchmarks](docs/benchmarks.md).",
    ]
    trainings = list(gpu_pages.summary(gpu_records()))
    if trainings:
        lines += ["", *trainings, "", "How each was measured, and on what: [on the GPU](docs/gpu.md)."]
    return "\n".join(lines)


def figures() -> str:
    """The section of docs/benchmarks.md."""
    lines: list[str] = []
    for name, title in CONTESTS.items():
        record = load(name)
        if record is not None:
            lines += [f"### Photographs: {title}", "", f"![{title}](contest-{name.split('-')[1]}.svg)", ""]
            lines += [*contest_table(record), "", where(record), ""]
    opaque = load("opaque")
    if opaque is not None:
        lines += ["### Opaque datasets", "", *opaque_table(opaque), "", *uneven(opaque), where(opaque), ""]
    for name, head in (("overhead", "What the training process pays"), ("startup", "Start")):
        record = load(name)
        if record is not None:
            lines += [f"### {head}", "", *plain_table(record), "", where(record), ""]
    return "\n".join(lines).rstrip()


def cache_figures() -> str:
    """The section of docs/cache.md."""
    lines: list[str] = []
    share, hit = load("cache_share"), load("cache")
    if share is not None:
        lines += [*share_table(share), "", where(share), ""]
    if hit is not None:
        lines += [*hit_table(hit), "", where(hit)]
    return "\n".join(lines).rstrip()


def share_table(record: Record) -> Iterator[str]:
    """Markdown: what caches of several sizes leave to storage."""
    rows = {row["name"]: row for row in record["rows"] if row["samples"]}
    yield "| cache, of the data | requested | from the device | LRU: requested | page cache: from the device |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for size in [name.removeprefix("penstock ") for name in rows if name.startswith("penstock ")]:
        ours, lru, pages = (rows[f"{name} {size}"] for name in ("penstock", "lru", "page cache"))
        shares = (
            *(spread(ours, key)[0] for key in ("requested_share", "device_share")),
            spread(lru, "requested_share")[0],
            spread(pages, "device_share")[0],
        )
        yield f"| {size} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"


def hit_table(record: Record) -> Iterator[str]:
    """Markdown: the hit path beside a copy."""
    yield "| readers | copy | hit | with its note | whole sample | hit / copy | with its note / copy | whole / copy |"
    yield "| --- |" + " ---: |" * 7
    for row in record["rows"]:
        times = [f"{spread(row, f'{way}_us')[0]:.2f} µs" for way in ("copy", "hit", "get", "sample")]
        ratios = [f"{spread(row, f'{way}_ratio')[0]:.2f}" for way in ("hit", "get", "sample")]
        yield f"| {row['name'].split()[0]} | " + " | ".join([*times, *ratios]) + " |"


def uneven(record: Record) -> Iterator[str]:
    """How evenly work was spread that differs by sample."""
    for case in ("uneven", "waiting"):
        shares = {
            row["name"].split("/")[1]: spread(row, "balance")[0]
            for row in record["rows"]
            if row["name"].startswith(f"{case}/")
        }
        if shares:
            yield (
                f"`{case}`: {shares['penstock']:.3f} of perfect balance over the workers "
                f"(torch {shares['torch']:.3f}), start included."
            )
            yield ""


def plain_table(record: Record) -> Iterator[str]:
    """Markdown: every number of every row, as medians."""
    rows = [row for row in record["rows"] if row["samples"]]
    keys = list(dict.fromkeys(key for row in rows for key, value in row["samples"][0].items() if _number(value)))
    yield "| | " + " | ".join(keys) + " |"
    yield "| --- |" + " ---: |" * len(keys)
    for row in rows:
        cells = [f"{spread(row, key)[0]:,.4g}" if key in row["samples"][0] else "" for key in keys]
        yield f"| {row['name']} | " + " | ".join(cells) + " |"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def between(text: str, name: str, content: str) -> str:
    """The text with what stands between two markers replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}{match[2]}", text)


def pages() -> dict[Path, str]:
    """Every file that shows figures, as it should be."""
    found = {}
    measured = gpu_records()
    for path, name, content in (
        (ROOT / "README.md", "measurements", readme()),
        (ROOT / "docs" / "findings.md", "predictions", section(load("diagnosis-real"))),
        (ROOT / "docs" / "benchmarks.md", "figures", figures()),
        (ROOT / "docs" / "cache.md", "figures", cache_figures()),
        (ROOT / "docs" / "gpu.md", "figures", gpu_pages.section(measured)),
    ):
        if content:
            found[path] = between(path.read_text(), name, content)
    found |= {ROOT / "docs" / name: plot for name, plot in plots(load("diagnosis-real")).items()}
    for name, title in CONTESTS.items():
        record = load(name)
        if record is not None:
            found[ROOT / "docs" / f"contest-{name.split('-')[1]}.svg"] = bars(record, title)
    return found | {ROOT / "docs" / name: plot for name, plot in gpu_pages.plots(measured).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    options = parser.parse_args(arguments)
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(path.relative_to(ROOT))
        if not options.check:
            path.write_text(pages()[path])
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
