"""How soon the first batch comes, what a worker weighs, and how soon a killed worker is replaced.

The first batch is timed in a fresh process from building the loader, and from the start of the process (imports
included). Weight is private memory (what no other process shares) of the heaviest worker after two epochs. The data are
photographs: through Pillow in torch's DataLoader (workers forked, and spawned), natively in Penstock.

`python -m benchmarks.startup`
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness, photos
from benchmarks.harness import Measured, Row

STARTS = ("torch fork", "torch spawn", "penstock")
RESPAWN = "penstock respawn"
WORKERS = 2

Built = tuple[Any, Callable[[], list[int]]]
"""A loader, and what gives its workers' process ids."""


def first_batch(request: Measured) -> Measured:
    """Times of the first batch, then the workers' memory."""
    name = request["name"]
    imported = _import(name)
    begun = time.perf_counter()
    loader, pids = _build(name, imported, request["root"])
    batches = iter(loader)
    next(batches)
    measured = {"first_batch_s": time.perf_counter() - begun, "since_launch_s": time.time() - request["launched"]}
    for rest in (batches, loader):
        for _ in rest:
            pass
    return {**measured, "private_mb": max(map(_private_mb, pids()))}


def _import(name: str) -> Any:
    if name == "penstock":
        import penstock

        return penstock.files, penstock.Loader
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    return DataLoader, ImageFolder, v2


def _build(name: str, imported: Any, root: str) -> Built:
    if name == "penstock":
        files, native = imported
        loader = native(files(root).decode().random_resized_crop(224).flip().batch(64), workers=WORKERS, seed=0)
        return loader, lambda: [worker["pid"] for worker in loader.stats()["workers"]]
    dataloader, folder, v2 = imported
    steps = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    context = name.removeprefix("torch ")
    common = {"num_workers": WORKERS, "persistent_workers": True, "multiprocessing_context": context}
    loader = dataloader(folder(root, steps), batch_size=64, shuffle=True, **common)
    return loader, lambda: [worker.pid for worker in loader._iterator._workers]


def _private_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.M)) / 1024


def respawn(request: Measured) -> Measured:
    """From SIGKILL of a worker until its replacement has finished work, seen through the loader's counters."""
    import penstock as ps

    pipe = ps.files(request["root"]).decode().random_resized_crop(224).flip().batch(4)
    delays = []
    with ps.Loader(pipe, workers=WORKERS, seed=0) as loader:
        batches = _endless(loader)
        for _ in range(request["kills"]):
            for _ in range(20):
                next(batches)
            delays.append(_kill_one(loader, batches))
    return {"respawn_s": sorted(delays)[len(delays) // 2], "slowest_s": max(delays), "kills": len(delays)}


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def _kill_one(loader: Any, batches: Any) -> float:
    victim = loader.stats()["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.perf_counter()
    fresh: int | None = None
    while True:
        next(batches)
        worker = loader.stats()["workers"][0]
        if worker["pid"] != victim["pid"] and fresh is None:
            fresh = worker["samples"]
        elif fresh is not None and worker["samples"] > fresh:
            return time.perf_counter() - killed


def _run(row: Row, options: argparse.Namespace) -> Measured:
    root = photos.class_folders(options.photos, 256)
    request: Measured = {
        "name": row.name,
        "root": str(root),
        "launched": time.time(),
        "kills": 2 if options.quick else 11,
    }
    function = "respawn" if row.name == RESPAWN else "first_batch"
    return harness.measure(f"benchmarks.startup:{function}", request, cores=options.cores, timeout=options.timeout)


def _line(row: Row, base: Row) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", "", ""
    first = row.median("first_batch_s")
    ratio = "" if base.error else f"{first / base.median('first_batch_s'):.2f}"
    return row.name, f"{first:.3f}", ratio, f"{row.median('since_launch_s'):.3f}", f"{row.median('private_mb'):.0f}"


def main() -> int:
    """Run it from the command line."""
    options = harness.arguments(__doc__ or "").parse_args()
    rows = [Row(name) for name in (*STARTS, RESPAWN)]
    harness.alternate(rows, 1 if options.quick else options.rounds, lambda row: _run(row, options))
    head = ("first batch", "seconds", "ratio", "with imports", "private MB per worker")
    text = harness.table(head, [_line(row, rows[0]) for row in rows[:-1]])
    if rows[-1].error is None:
        median, slowest = 1000 * rows[-1].median("respawn_s"), 1000 * max(rows[-1].values("slowest_s"))
        text += f"\n\na killed worker works again after {median:.0f} ms (slowest {slowest:.0f} ms)"
    settings = {"cores": options.cores, "workers": WORKERS, "batch": 64}
    return harness.finish("startup", options, settings, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
