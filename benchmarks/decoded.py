"""Images per second where samples are cached encoded or as pixels, against files in the page cache and no other cache.

The files are read from the page cache in every row: what the cached rows save is decoding. Random resized crop to
224x224 and flip, batches of 64; the first epoch fills the cache, the second warms up, the next three are timed.

`python -m benchmarks.decoded [--samples 4000] [--only none decoded]`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import harness, photos
from benchmarks.harness import Measured, Row

FORMS = ("none", "encoded", "decoded", "auto")
TIMED = 3
"""Epochs."""
ROOM = 1 << 20
"""Bytes of cache for a sample: more than its pixels."""


def measure(request: Measured) -> Measured:
    """Two epochs, then the timed ones."""
    import penstock as ps

    pipe = ps.files(request["root"]).decode().random_resized_crop(224).flip().batch(64)
    options: dict[str, Any] = {"workers": request["workers"], "seed": 0}
    if request["form"] != "none":
        options |= {"cache": f"{request['samples'] * ROOM >> 20}MiB", "cache_form": request["form"]}
    with ps.Loader(pipe, **options) as loader:
        first, second = _epoch(loader), _epoch(loader)
        timed = sum(_epoch(loader) for _ in range(TIMED))
        stats, told = loader.stats(), loader.explain()
    cache = stats.get("cache") or {}
    return {
        "images_per_s": TIMED * request["samples"] / timed,
        "first_epoch_s": first,
        "second_epoch_s": second,
        "seconds": timed,
        "explain": told.splitlines(),
        "cache": cache,
    }


def _epoch(loader: Any) -> float:
    start = time.perf_counter()
    for batch in loader:
        batch["image"].shape  # noqa: B018
    return time.perf_counter() - start


def _line(row: Row, base: float) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", "", "", "", ""
    rates = row.values("images_per_s")
    cache = row.samples[-1]["cache"]
    figures = f"{row.median('images_per_s'):.0f}", f"{min(rates):.0f}", f"{max(rates):.0f}"
    held = f"{cache['held_bytes'] / 1e6:,.0f} MB" if cache else ""
    return row.name, *figures, f"{row.median('images_per_s') / base:.2f}", f"{row.median('first_epoch_s'):.2f}", held


def main() -> int:
    """Run it from the command line."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, help="these forms")
    options: argparse.Namespace = parser.parse_args()
    samples = 256 if options.quick else options.samples
    root: Path = photos.class_folders(options.photos, samples)
    photos.warm(root)
    request = {"root": str(root), "samples": samples, "workers": options.workers}
    rows = [Row(form) for form in options.only]

    def run(row: Row) -> Measured:
        function, asked = "benchmarks.decoded:measure", {**request, "form": row.name}
        return harness.measure(function, asked, cores=options.cores, timeout=options.timeout)

    harness.alternate(rows, 1 if options.quick else options.rounds, run)
    base = rows[0].median("images_per_s")
    head = ("cache", "images/s", "min", "max", "ratio", "first epoch, s", "memory")
    text = harness.table(head, [_line(row, base) for row in rows])
    settings = {
        "cores": options.cores,
        "rounds": options.rounds,
        "samples": samples,
        "workers": options.workers,
        "batch": 64,
        "size": 224,
        "photographs": "generated" if options.photos is None else "given",
    }
    return harness.finish("decoded", options, settings, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
