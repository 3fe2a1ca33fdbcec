"""The hit path of the cache: a cached sample of 100 KB beside copying its bytes; one reader, and eight.

A measuring process starts the readers, which share an arena of 300 MB, many times what the processor's cache holds.
Each reader goes by turns, in blocks, over four ways to come by samples at random: `copy`, a copy of the bytes out of
mapped memory and nothing else; `hit`, the bytes of a sample that the process has met, as all later epochs have it;
`get`, the bytes with their note, as the first has it; `sample`, what a worker gets from the cache's reader: a dict with
a label. Its own CPU time counts, since eight readers share the cores.

`python -m benchmarks.cache`
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable

from benchmarks import harness
from benchmarks.harness import Measured, Row

SAMPLE_BYTES = 100_000
SAMPLES = 3000
READERS = (1, 8)
BLOCK = 200
WAYS = ("copy", "hit", "get", "sample")


def hits(request: Measured) -> Measured:
    """Microseconds of each way: medians over blocks, then over readers."""
    from penstock.cache import Arena

    arena = Arena.create(SAMPLES * (SAMPLE_BYTES + 256) + (1 << 20))
    _fill(arena)
    pipes = [os.pipe() for _ in range(request["readers"])]
    pids = []
    for number, (_, writer) in enumerate(pipes):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.write(writer, json.dumps(_read(arena, number, request["blocks"])).encode())
            os._exit(0)
    found = [json.loads(os.read(reader, 4096)) for reader, _ in pipes]
    for pid in pids:
        os.waitpid(pid, 0)
    times = {f"{way}_us": statistics.median(one[way] for one in found) for way in WAYS}
    return {**times, **{f"{way}_ratio": times[f"{way}_us"] / times["copy_us"] for way in WAYS[1:]}}


def _shelf(arena, number):  # type: ignore[no-untyped-def]
    from penstock.cache import Tally

    descriptor = Tally.create(1)
    row = Tally(descriptor, 1).row(0)
    return arena.shelf(b"samples of 100KB", SAMPLES, row), row


def _fill(arena) -> None:  # type: ignore[no-untyped-def]
    from penstock.cache.reader import CachedReader
    from penstock.graph import Reader

    class Source(Reader):
        def read(self, id: int) -> dict[str, object]:
            return {"image": random.Random(id).randbytes(SAMPLE_BYTES), "label": id % 1000}

    shelf, row = _shelf(arena, 0)
    reader = CachedReader(Source(), shelf, row, SAMPLES)
    for id in range(SAMPLES):
        reader.read(id)
    assert shelf.held[0] == SAMPLES


def _read(arena, number: int, blocks: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    from penstock.cache import Arena
    from penstock.cache.reader import CachedReader
    from penstock.graph import Reader

    mine = Arena(*map(os.dup, arena.descriptors))
    shelf, row = _shelf(mine, number)
    size = os.fstat(mine.descriptors[1]).st_size
    memory = memoryview(mmap.mmap(mine.descriptors[1], size, prot=mmap.PROT_READ))
    pitch = -(-(SAMPLE_BYTES + 60) // 64) * 64

    def copy(id: int) -> bytes:
        start = pitch * id + 16
        return bytes(memory[start : start + SAMPLE_BYTES])

    class Nothing(Reader):
        def read(self, id: int) -> dict[str, object]:
            raise KeyError(id)

    ways: dict[str, Callable[[int], object]] = {
        "copy": copy,
        "hit": shelf.data,
        "get": shelf.get,
        "sample": CachedReader(Nothing(), shelf, row, SAMPLES).read,
    }
    for way in ways.values():
        for id in range(SAMPLES):  # pages are mapped, checksums verified: what follows is every later epoch
            way(id)
    rng = random.Random(number)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, way in ways.items():  # each has samples of its own: the processor's cache still has those of the last
            times[name].append(_timed(way, [rng.randrange(SAMPLES) for _ in range(BLOCK)]))
    return {name: statistics.median(values) for name, values in times.items()}


def _timed(way: Callable[[int], object], ids: list[int]) -> float:
    started = time.thread_time()
    for id in ids:
        way(id)
    return (time.thread_time() - started) / len(ids) * 1e6


def _run(row: Row, options: argparse.Namespace) -> Measured:
    request = {"readers": int(row.name.split()[0]), "blocks": 5 if options.quick else 200}
    return harness.measure("benchmarks.cache:hits", request, cores=options.cores, timeout=options.timeout)


def _line(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", "", "", "", "", ""
    times = (f"{row.median(f'{way}_us'):.2f}" for way in WAYS)
    return row.name, *times, *(f"{row.median(f'{way}_ratio'):.2f}" for way in WAYS[1:])


def main() -> int:
    """Run it from the command line."""
    options = harness.arguments(__doc__ or "").parse_args()
    rows = [Row(f"{readers} reader{'s' if readers > 1 else ''}") for readers in READERS]
    harness.alternate(rows, 1 if options.quick else options.rounds, lambda row: _run(row, options))
    head = ("100 KB, microseconds", *WAYS, *(f"{way} / copy" for way in WAYS[1:]))
    text = harness.table(head, [_line(row) for row in rows])
    settings = {"cores": options.cores, "sample_bytes": SAMPLE_BYTES, "samples": SAMPLES}
    return harness.finish("cache", options, settings, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
