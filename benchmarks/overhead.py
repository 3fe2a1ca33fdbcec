"""What the training process pays: its CPU time at 100 batches a second, its threads; and what a second worker brings.

The consumer asks for a batch of 64 small images every 10 ms; the row `pacer` does so with no loader at all. Only the
training process itself is counted, not the processes that it starts.

`python -m benchmarks.overhead`
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness, photos
from benchmarks.contenders import CONTENDERS
from benchmarks.harness import Measured, Row

RATE = 100
"""Batches per second."""
PACED = ("pacer", "torch", "penstock")
SAMPLES = 64_000
SETTLE_S = 2
"""Before the timed part: the threads of numpy's BLAS spin for a second after it is imported."""


def paced(request: Measured) -> Measured:
    """CPU time of this process while it takes 100 batches a second."""
    batches = _BATCHES[request["loader"]]()
    _pace(batches, SETTLE_S)
    start, cpu = time.perf_counter(), time.process_time()
    late = _pace(batches, request["seconds"])
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    threads = len(os.listdir("/proc/self/task"))
    python = [thread.name for thread in threading.enumerate()]
    return {"cpu_share": share, "late_batches": late, "threads": threads, "python_threads": python}


def _pace(batches: Iterator[Any], seconds: int) -> int:
    """Take batches at the rate; how many came late."""
    start, late = time.perf_counter(), 0
    for number in range(1, RATE * seconds + 1):
        next(batches)
        left = start + number / RATE - time.perf_counter()
        late += left < 0
        time.sleep(max(0.0, left))
    return late


def _pacer() -> Iterator[Any]:
    while True:
        yield None


def _torch() -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.zeros(SAMPLES, 32, 32, 3, dtype=torch.uint8), torch.arange(SAMPLES))
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    while True:
        yield from loader


def _penstock() -> Iterator[Any]:
    import penstock as ps

    pipe = ps.arrays(image=np.zeros((SAMPLES, 32, 32, 3), np.uint8), label=np.arange(SAMPLES)).batch(64)
    with ps.Loader(pipe, workers=2, seed=0) as loader:
        while True:
            yield from loader


_BATCHES = {"pacer": _pacer, "torch": _torch, "penstock": _penstock}


def _run(row: Row, options: argparse.Namespace) -> Measured:
    if row.name in PACED:
        paced_request = {"loader": row.name, "seconds": 1 if options.quick else 10}
        return harness.measure("benchmarks.overhead:paced", paced_request, cores=options.cores, timeout=options.timeout)
    contender, workers = row.name.split("/")
    samples = 256 if options.quick else 4000
    job = {
        "root": str(photos.class_folders(options.photos, samples)),
        "own": "",
        "samples": samples,
        "batch": 64,
        "size": 224,
        "workers": int(workers),
        "augment": "default",
        "seed": 0,
    }
    request: Measured = {"name": contender, "job": job, "show": ""}
    return harness.measure("benchmarks.contest:measure", request, cores=options.cores, timeout=options.timeout)


def _paced_line(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", "", ""
    figures = (
        f"{100 * row.median('cpu_share'):.2f}%",
        f"{row.median('threads'):.0f}",
        f"{row.median('late_batches'):.0f}",
    )
    return row.name, *figures, ", ".join(row.samples[-1]["python_threads"])


def _scaling_line(name: str, one: Row, two: Row) -> tuple[str, ...]:
    if one.error or two.error:
        return name, "failed", "", ""
    rates = one.median("images_per_s"), two.median("images_per_s")
    return name, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / (2 * rates[0]):.3f}"


def main() -> int:
    """Run it from the command line."""
    options = harness.arguments(__doc__ or "").parse_args()
    contenders = (CONTENDERS[0], "penstock")
    rows = [Row(name) for name in PACED] + [Row(f"{name}/{n}") for name in contenders for n in (1, 2)]
    harness.alternate(rows, 1 if options.quick else options.rounds, lambda row: _run(row, options))
    split = len(PACED)
    head = ("at 100 batches/s", "CPU of training process", "threads", "late", "Python threads")
    text = harness.table(head, [_paced_line(row) for row in rows[:split]])
    pairs = zip(contenders, rows[split::2], rows[split + 1 :: 2], strict=True)
    lines = [_scaling_line(name, one, two) for name, one, two in pairs]
    text += "\n\n" + harness.table(("images/s", "1 worker", "2 workers", "efficiency"), lines)
    return harness.finish("overhead", options, {"cores": options.cores, "rate": RATE, "batch": 64}, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
