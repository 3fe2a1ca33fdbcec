"""Fetching alone: from storage with caches dropped (S), and from memory (C). Whether it was so, counters say."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.diagnosis.children import Task, Turnout, apart, crew
from penstock.diagnosis.reads import Reads, read_pieces
from penstock.profile import Evidence, ReadPoint

__all__ = ["Fetching", "drop", "measure"]

_PHASE_S = 10.0
"""At most, for reading with one number of readers."""
_ATTEMPTS = 3
_LEAD = 8
"""One sample of so many does not count: storage that is limited to a rate gives some for nothing at first."""
_PACED = 200
"""Samples that a reader with pauses reads."""
_MEMORY_READS = 4096
_COLD = 0.95
"""The share of the bytes that a device must have read for them to have been cold."""
_WARM = 0.01
"""The share up to which data count as in memory: a page of code may have been read meanwhile."""


@dataclass(frozen=True)
class Fetching:
    """S or C at several numbers of readers; `points` is empty where it could not be measured."""

    points: tuple[ReadPoint, ...]
    cpu_s: float | None
    """For each sample, with the loader's own number of readers."""
    wait_s: float | None
    """For each sample of a single reader that pauses as long after it as it takes at best; None for C."""
    evidence: Evidence | None
    as_meant: bool | None
    """Cold, for S; in memory, for C; None where no counter tells."""


def drop(paths: Iterable[str]) -> None:
    """Have the kernel forget what it caches of these files; pages that others map, or that are dirty, it keeps."""
    for path in paths:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def measure(reads: Reads, fetch: Callable[[], Task[int]] | None, readers: Sequence[int], cold: bool) -> Fetching:
    """Fetch the samples; the first number of readers is the loader's own. `fetch` makes what fetches a sample by its
    id, where the data set has that apart from preparing; else its files are read."""
    turnouts = []
    everything = range(len(reads.ids))
    if not cold:
        _turnout(reads, fetch, readers[0], everything)
    shares = _shares(everything, len(readers)) if cold else [_repeated(everything)] * len(readers)
    for count, items in zip(readers, shares, strict=True):
        turnouts.append(_cold_turnout(reads, fetch, count, items) if cold else _turnout(reads, fetch, count, items))
    own = turnouts[0]
    points = [
        ReadPoint(count, done.items / done.seconds, done.bytes / done.seconds)
        for count, done in zip(readers, turnouts, strict=True)
        if done.items and _as_meant(done, cold) is not False
    ]
    evidence = Evidence(own.bytes, own.device_bytes, "/proc/PID/io" if own.device_bytes is not None else "")
    cpu = own.cpu_s / own.items if own.items else None
    wait_s = _paced(reads, fetch, readers, turnouts) if cold and points else None
    return Fetching(tuple(points), cpu, wait_s, evidence, _as_meant(own, cold))


def _paced(
    reads: Reads, fetch: Callable[[], Task[int]] | None, readers: Sequence[int], turnouts: Sequence[Turnout]
) -> float | None:
    """What one reader waits for a sample, where it does not ask again at once."""
    alone = turnouts[readers.index(1)]
    pause_s = alone.seconds / max(1, alone.items)
    items = range(min(len(reads.ids), _PACED, int(_PHASE_S / max(pause_s, 1e-9)) // 2))
    if not items:
        return None
    drop(reads.files)

    def waits() -> float:
        task = _task(reads, fetch)()
        waited = 0.0
        for item in items:
            start = time.perf_counter()
            task(item)
            waited += time.perf_counter() - start
            time.sleep(pause_s)
        return waited / len(items)

    return apart(waits)


def _cold_turnout(reads: Reads, fetch: Callable[[], Task[int]] | None, readers: int, items: Sequence[int]) -> Turnout:
    """Once more where something else read the files meanwhile."""
    for _ in range(_ATTEMPTS):
        drop(reads.files)
        done = _turnout(reads, fetch, readers, items)
        if _as_meant(done, cold=True) is not False:
            break
    return done


def _turnout(reads: Reads, fetch: Callable[[], Task[int]] | None, readers: int, items: Sequence[int]) -> Turnout:
    return crew(readers, _task(reads, fetch), items, _PHASE_S, lead=len(items) // readers // _LEAD)


def _task(reads: Reads, fetch: Callable[[], Task[int]] | None) -> Callable[[], Task[int]]:
    """What makes what fetches a sample by its place among those looked at."""
    if fetch is None:
        return lambda: lambda item: read_pieces(reads.samples[item])

    def make() -> Task[int]:
        task = fetch()
        return lambda item: task(reads.ids[item])

    return make


def _shares(items: Sequence[int], points: int) -> list[Sequence[int]]:
    """Different samples for each number of readers: below the kernel, something may cache too. Half for the first."""
    if len(items) < 8 * points or points == 1:
        return [items] * points
    first = len(items) // 2
    rest = (len(items) - first) // (points - 1)
    return [items[:first], *(items[first + i * rest : first + (i + 1) * rest] for i in range(points - 1))]


def _repeated(items: Sequence[int]) -> Sequence[int]:
    """As many as take long beside the start of a process."""
    return list(itertools.islice(itertools.cycle(items), max(len(items), _MEMORY_READS)))


def _as_meant(done: Turnout, cold: bool) -> bool | None:
    if done.device_bytes is None or not done.bytes:
        return None
    share = done.device_bytes / done.bytes
    return share >= _COLD if cold else share <= _WARM
