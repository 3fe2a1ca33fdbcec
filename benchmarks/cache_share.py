"""What a cache of a part of the data leaves to storage: requested bytes and bytes from the device, in each later epoch.

Photographs in random order, a new one in each epoch, one to fill the caches and then three that count. Cache sizes are
parts of the data. Contenders: `penstock`, a loader with two workers; `lru`, which evicts what was used longest ago;
`page cache`, plain reading in a container (a memory control group, version 1; needs root) whose memory is that of its
process and so much more. `penstock` and `lru` read so that the kernel keeps no pages. Bytes from the device are those
that the kernel counted for the reading processes, so the data has to lie on a disk.

`python -m benchmarks.cache_share`
"""

from __future__ import annotations

import argparse
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import harness, photos
from benchmarks.harness import Measured, Row

SIZES = (20, 35, 50, 65, 80)
"""Percent of the data."""
CONTENDERS = ("penstock", "lru", "page cache")
SAMPLES = 2000
EPOCHS = 3
GROUPS = Path("/sys/fs/cgroup/memory")

Epoch = Callable[[int], tuple[int, int]]
"""Runs an epoch; bytes requested from storage, and from the device."""


def epochs(request: Measured) -> Measured:
    """Shares of the data that were requested, missed and read from the device, of all epochs but the first."""
    files = sorted(path for path in Path(request["root"]).rglob("*.jpg"))
    sizes = [path.stat().st_size for path in files]
    _forget(files)
    whole = sum(sizes)
    budget = whole * request["percent"] // 100
    contender = {"penstock": _penstock, "lru": _lru, "page cache": _page_cache}[request["contender"]]
    with_epochs = contender(request["root"], files, budget)
    run = next(with_epochs)
    run(0)
    started = time.perf_counter()
    counted = [run(epoch) for epoch in range(1, request["epochs"] + 1)]
    seconds = time.perf_counter() - started
    return {
        "cache_share": budget / whole,
        "requested_share": sum(requested for requested, _ in counted) / whole / len(counted),
        "device_share": sum(device for _, device in counted) / whole / len(counted),
        "most_requested_share": max(requested for requested, _ in counted) / whole,
        "epoch_s": seconds / len(counted),
        "data_bytes": whole,
        **next(with_epochs, {}),
    }


def _forget(files: list[Path]) -> None:
    """Have the kernel drop the files' pages; what it has not written yet is written first."""
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _order(epoch: int, samples: int) -> list[int]:
    from penstock.kernels import native

    return native.order(0, epoch, samples, list(range(samples)))


def _from_device(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return total


def sized(sample: dict[str, object]) -> dict[str, object]:
    """Fetching alone is measured: nothing is decoded."""
    return {"size": len(sample["image"])}  # type: ignore[arg-type]


def _penstock(root: str, files: list[Path], budget: int) -> Iterator[object]:
    import penstock as ps
    from penstock.cache import finding

    finding._PREFIX = f"penstock-cache-benchmark-{os.getpid()}-"  # no cache of another job's
    loader = ps.Loader(ps.files(root).map(sized).batch(20), workers=2, seed=0, cache=f"{budget / 1000:.3f}KB")
    pids: list[int] = []
    read = 0

    def run(epoch: int) -> tuple[int, int]:
        nonlocal read
        before = _from_device(pids)
        for _ in loader:
            pass
        stats = loader.stats()
        pids[:] = [worker["pid"] for worker in stats["workers"]]
        now, read = stats["cache"]["read_bytes"] - read, stats["cache"]["read_bytes"]
        return now, _from_device(pids) - before

    yield run
    cache = loader.stats()["cache"]
    cached = cache["hit_bytes"] / EPOCHS
    whole = sum(path.stat().st_size for path in files)
    yield {
        "cached_share": cached / whole,
        "requested_less_uncached_bytes": (cache["read_bytes"] - whole) / EPOCHS - (whole - cached),
        "held_share_of_budget": cache["held_bytes"] / cache["budget_bytes"],
    }
    loader.close()


def _lru(root: str, files: list[Path], budget: int) -> Iterator[Epoch]:
    """Bytes are counted exactly, its own needs not at all."""
    from penstock.read.storage import read_file

    held: OrderedDict[int, bytes] = OrderedDict()
    size = 0

    def run(epoch: int) -> tuple[int, int]:
        nonlocal size
        before, requested = _from_device([os.getpid()]), 0
        for id in _order(epoch, len(files)):
            if id in held:
                held.move_to_end(id)
                continue
            held[id] = read_file(str(files[id]), drop=True)
            requested += len(held[id])
            size += len(held[id])
            while size > budget:
                size -= len(held.popitem(last=False)[1])
        return requested, _from_device([os.getpid()]) - before

    yield run


def _page_cache(root: str, files: list[Path], budget: int) -> Iterator[Epoch]:
    """All is requested; what counts is what the device had to give."""
    _order(0, len(files))
    group = GROUPS / f"penstock-benchmark-{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    limit = _own_bytes(group, files) + budget
    (group / "memory.limit_in_bytes").write_text(str(limit // 4096 * 4096))

    def run(epoch: int) -> tuple[int, int]:
        before, requested = _from_device([os.getpid()]), 0
        for id in _order(epoch, len(files)):
            with files[id].open("rb", buffering=0) as file:
                requested += len(file.read())
        return requested, _from_device([os.getpid()]) - before

    yield run
    (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


def _own_bytes(group: Path, files: list[Path]) -> int:
    """What the process needs beside pages of files: found out by reading some, which are forgotten again."""
    for path in files[:50]:
        path.read_bytes()
    _forget(files[:50])
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    kept = sum(int(stat[f"total_{kind}_file"]) for kind in ("active", "inactive"))
    return int((group / "memory.usage_in_bytes").read_text()) - kept + (1 << 20)


def _run(row: Row, options: argparse.Namespace) -> Measured:
    contender, percent = row.name.rsplit(" ", 1)
    samples = 400 if options.quick else SAMPLES
    request: Measured = {
        "contender": contender,
        "percent": int(percent.removesuffix("%")),
        "root": str(photos.class_folders(options.photos, samples)),
        "epochs": EPOCHS,
    }
    if contender == "page cache" and not (os.getuid() == 0 and (GROUPS / "memory.limit_in_bytes").exists()):
        raise RuntimeError("a container cannot be made: it needs root and memory control groups of version 1")
    return harness.measure("benchmarks.cache_share:epochs", request, cores=options.cores, timeout=options.timeout)


def _line(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", ""
    requested = "" if row.name.startswith("page") else f"{row.median('requested_share'):.1%}"
    return row.name, requested, f"{row.median('device_share'):.1%}", f"{row.median('epoch_s'):.2f}"


def main() -> int:
    """Run it from the command line."""
    options = harness.arguments(__doc__ or "", rounds=3).parse_args()
    rows = [Row(f"{contender} {percent}%") for percent in SIZES for contender in CONTENDERS]
    harness.alternate(rows, 1 if options.quick else options.rounds, lambda row: _run(row, options))
    head = ("cache of so much of the data", "requested per epoch", "from the device", "seconds per epoch")
    text = harness.table(head, [_line(row) for row in rows])
    settings = {"cores": options.cores, "samples": SAMPLES, "epochs": EPOCHS, "workers": 2}
    return harness.finish("cache_share", options, settings, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
