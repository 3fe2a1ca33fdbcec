"""Counters at the borders: what crossed from workers to slots to the training process. Plain numbers, one writer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.work import DISK_TALLY, BadSample

__all__ = ["Counters", "WorkerCounters"]

_LISTED = 1000
"""Bad samples listed one by one; all are counted."""


@dataclass
class WorkerCounters:
    """What one worker has done; it keeps its number when it is replaced."""

    number: int
    pid: int = 0
    samples: int = 0
    busy_s: float = 0.0


@dataclass
class Counters:
    """The coordinator's books of a loader."""

    name: str
    pid: int
    workers: int
    trainer: dict[str, float] = field(default_factory=dict)
    """What the training process says of itself: seconds waited, batches copied, slots held."""
    lost: int = 0
    batches: int = 0
    samples: int = 0
    bad: int = 0
    disk: dict[str, float] | None = None
    """What readers behind a disk tier counted, all together; None without one, or before they read."""
    started: float = field(default_factory=time.monotonic)
    _workers: dict[int, WorkerCounters] = field(default_factory=dict)
    _bad: dict[int, BadSample] = field(default_factory=dict)

    def worker(self, number: int) -> WorkerCounters:
        """The counters of a worker."""
        return self._workers.setdefault(number, WorkerCounters(number))

    def forget(self, number: int) -> None:
        """A worker that is not replaced is gone."""
        self._workers.pop(number, None)

    def deliver(self, rows: int, bad: Sequence[BadSample]) -> None:
        """A batch went to the training process."""
        self.batches += 1
        self.samples += rows
        self.bad += len(bad)
        for sample in bad:
            if len(self._bad) < _LISTED:
                self._bad.setdefault(sample.id, sample)

    def count(self, tally: Mapping[str, float]) -> None:
        """A reader behind a disk tier counted this."""
        if tally and self.disk is None:
            self.disk = dict.fromkeys(DISK_TALLY, 0)
        for name, number in tally.items():
            assert self.disk is not None
            self.disk[name] += number

    def snapshot(self, cache: dict[str, Any] | None = None, **gauges: float) -> dict[str, Any]:
        """Everything, as plain data. `cache`: what its keeper says, where there is one."""
        return {
            "name": self.name,
            "pid": self.pid,
            "uptime_s": time.monotonic() - self.started,
            "batches": self.batches,
            "samples": self.samples,
            "wait_s": 0.0,
            "batches_taken": 0,
            "batches_copied": 0,
            "slots_held": 0,
            **self.trainer,
            **gauges,
            "cache": cache,
            "disk": self.disk,
            "workers": [asdict(self._workers[number]) for number in sorted(self._workers)],
            "workers_lost": self.lost,
            "bad_samples": self.bad,
            "errors": [asdict(self._bad[id]) for id in sorted(self._bad)],
        }
