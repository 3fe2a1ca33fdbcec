"""A reader that asks the disk first, and keeps there what it had to read from the source."""

from __future__ import annotations

import time

from penstock.disk.plan import DiskPlan
from penstock.disk.store import Disk
from penstock.graph import Reader, Sample
from penstock.record import packed, unpacked
from penstock.work import DISK_TALLY

__all__ = ["DiskReader"]


class DiskReader(Reader):
    """Samples of the source's reader, bit for bit. What the disk cannot do is the source's to do.

    A record begins with the stamp of what was stored when it was made, where the source has stamps. When a process
    meets it first, it is compared with the stamp of what is stored now.
    """

    def __init__(self, plan: DiskPlan, source: Reader) -> None:
        self._source = source
        self._disk: Disk | None = None
        self._closed: str | None = None
        self._said: str | None = None
        self._met = bytearray(plan.samples // 8 + 1)
        self._requested = 0
        self.counts: dict[str, float] = dict.fromkeys(DISK_TALLY, 0)
        self.hit = False
        """The sample that was read last came from the disk."""
        try:
            self._disk = Disk(plan)
        except OSError as error:
            self._closed = f"{plan.place}: {error.strerror or error}"

    @property
    def problem(self) -> str | None:
        """Why no more is kept, where that is not the budget."""
        return self._closed if self._disk is None else self._disk.problem

    def take(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """What was counted since this was last asked, and what the user must be told now."""
        counted = {name: number for name, number in self.counts.items() if number}
        self.counts = dict.fromkeys(DISK_TALLY, 0)
        problem, said = self.problem, self._said
        self._said = problem
        if problem is None or said is not None:
            return counted, ()
        rest = "The training goes on; what is not kept is read from the source every time"
        return counted, (f"cache_folder keeps no more samples: {problem}. {rest}",)

    def read(self, id: int) -> Sample:
        sample = None if self._disk is None else self._kept(self._disk, id)
        self.hit = sample is not None
        return self._fetch(id) if sample is None else sample

    def _kept(self, disk: Disk, id: int) -> Sample | None:
        record = disk.get(id)
        self.counts["damaged"] += disk.damaged
        disk.damaged = 0
        if record is None:
            return None
        start = 1 + record[0]
        if start > 1 and not self._current(id, record[1:start]):
            disk.forget(id)
            return None
        self.counts["samples"] += 1
        self.counts["bytes"] += len(record)
        self._requested += len(record)
        return unpacked(record[start:])

    def _current(self, id: int, stamp: bytes) -> bool:
        """What is stored now is what was kept; or it cannot be asked for."""
        bit = 1 << (id & 7)
        if not self._met[id >> 3] & bit:
            try:
                if self._source.stamp(id) != stamp:
                    return False
            except OSError:
                return True
            self._met[id >> 3] |= bit
        return True

    def _fetch(self, id: int) -> Sample:
        stamp = (
            b"" if self._disk is None else self._source.stamp(id)
        )  # before the bytes: were they newer, it would tell
        before, started = self._source.requested(), time.perf_counter()
        sample = self._source.read(id)
        self.counts["source_s"] += time.perf_counter() - started
        asked = self._source.requested() - before
        asked = asked or sum(len(value) for value in sample.values() if isinstance(value, bytes))
        self._requested += asked
        self.counts["source_samples"] += 1
        self.counts["source_bytes"] += asked
        record = None if self._disk is None else packed(sample)
        if self._disk is not None and record is not None:
            record = bytes([len(stamp)]) + stamp + record
            if self._disk.put(id, record):
                self.counts["kept_samples"] += 1
                self.counts["kept_bytes"] += len(record)
        return sample

    def requested(self) -> int:
        """From the disk and from the source."""
        return self._requested

    def stamp(self, id: int) -> bytes:
        return self._source.stamp(id)

    def drop_behind(self) -> None:
        self._source.drop_behind()
        if self._disk is not None:
            self._disk.spare_page_cache()

    def close(self) -> None:
        self._source.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None
