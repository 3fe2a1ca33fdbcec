"""From what the phases measured to a profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.diagnosis.machine import Machine
from penstock.diagnosis.ranks import here
from penstock.diagnosis.session import Loop, Measured
from penstock.diagnosis.storage import Fetching
from penstock.diagnosis.target import Target
from penstock.profile import VERSION, BatchPoint, Evidence, Profile, ReadPoint, Split

__all__ = ["profile_of"]

_LISTED = 1000
"""Steps whose times a profile lists; the mean is of all."""
_COUNTER = "/proc/PID/io"


def profile_of(script: str, target: Target, measured: Measured, machine: Machine) -> Profile:
    """The profile of a diagnosis that has run to its end."""
    return _Outcome(script, target, measured, machine).profile()


@dataclass(frozen=True)
class _Outcome:
    script: str
    target: Target
    measured: Measured
    machine: Machine

    def profile(self) -> Profile:
        found, target, machine = self.measured, self.target, self.machine
        assert found.watch is not None
        assert found.replay is not None
        assert found.prep is not None
        assert found.reads is not None
        storage, memory = _own_point(found.storage), _own_point(found.memory)
        return Profile(
            version=VERSION,
            script=self.script,
            loader=target.name,
            steps_per_phase=len(found.watch.steps_s),
            ranks=here().on_host,
            cores=machine.cores,
            memory_bytes=machine.memory_bytes,
            cache_bytes=machine.free_bytes if self._dataset_bytes() else None,
            gpu=machine.gpu,
            gpus=machine.gpus,
            dataset_samples=target.dataset_samples,
            batch_samples=found.batch_samples,
            workers=target.workers,
            overlapped=target.overlapped,
            prefetch_batches=target.prefetch_batches,
            sample_bytes=found.reads.sample_bytes,
            dataset_bytes=self._dataset_bytes(),
            batch_bytes=found.batch_bytes,
            gpu_samples_per_s=found.replay.samples_per_s,
            gpu_batches=self._batch_points(found.replay),
            step_cpu_s=found.replay.cpu_s / len(found.replay.steps_s),
            prep_samples_per_s=found.prep.samples_per_s,
            prep_cpu_s=found.prep.counted.cpu_s / found.prep.samples,
            prep=found.prep_points,
            operators=found.operators,
            memory_samples_per_s=memory.samples_per_s if memory else None,
            memory_bytes_per_s=memory.bytes_per_s if memory else None,
            storage_samples_per_s=storage.samples_per_s if storage else None,
            storage_bytes_per_s=storage.bytes_per_s if storage else None,
            memory_cpu_s=found.memory.cpu_s if found.memory and memory else None,
            storage_cpu_s=found.storage.cpu_s if found.storage and storage else None,
            storage_wait_s=found.storage.wait_s if found.storage and storage else None,
            memory=found.memory.points if found.memory else (),
            storage=found.storage.points if found.storage else (),
            rate_samples_per_s=found.watch.samples_per_s,
            warm_samples_per_s=found.warm.samples_per_s if found.warm else None,
            split=self._split(),
            lock_wait_s=None if found.lock_share is None else found.lock_share * _mean(found.watch.steps_s),
            copy_s=found.copy_s,
            copy_bytes_per_s=found.copy_bytes / found.copy_s if found.copy_s else None,
            resident_samples_per_s=found.resident.samples_per_s if found.resident else None,
            read_amplification=self._amplification(),
            waits_s=found.watch.waits_s[:_LISTED],
            steps_s=found.watch.steps_s[:_LISTED],
            gpu_steps_s=found.replay.steps_s[:_LISTED],
            prep_batches_s=found.prep.gaps_s[:_LISTED],
            prep_evidence=self._prep_evidence(),
            storage_evidence=found.storage.evidence if found.storage else None,
            watch_evidence=self._watch_evidence(found.watch),
            in_memory=self._in_memory(),
            cold=found.storage.as_meant if found.storage else None,
            notes=(*found.notes, *self._notes()),
        )

    def _dataset_bytes(self) -> float | None:
        return self.target.dataset_bytes(self.measured.reads.sample_bytes if self.measured.reads else None)

    def _batch_points(self, replay: Loop) -> tuple[BatchPoint, ...]:
        points = self.measured.batch_points
        return (*points, BatchPoint(self.measured.batch_samples, replay.samples_per_s)) if points else ()

    def _split(self) -> Split:
        """Differentially: the training as it is, from memory, and without a loader at all."""
        found = self.measured
        assert found.watch is not None
        assert found.replay is not None
        step = _mean(found.watch.steps_s)
        compute = min(step, _mean(found.replay.steps_s))
        warm = min(step, max(compute, _mean(found.warm.steps_s))) if found.warm else compute
        if not self._read_a_device(found.watch):
            warm = step  # or it was the machine's noise
        fetch = step - warm
        thrashing = max(0.0, step - max(warm, self._ideal_s())) if self._steady() else 0.0
        thrashing = min(fetch, thrashing)
        return Split(compute, warm - compute, fetch - thrashing, thrashing)

    def _ideal_s(self) -> float:
        """Fetching a batch where as much as memory holds is cached and never evicted: equation 1 of the paper."""
        found = self.measured
        storage, memory = _own_point(found.storage), _own_point(found.memory)
        size = self._dataset_bytes()
        if storage is None or memory is None or not size:
            return float("inf")
        cached = min(1.0, self.machine.free_bytes / size)
        return found.batch_samples * (cached / memory.samples_per_s + (1 - cached) / storage.samples_per_s)

    def _read_a_device(self, loop: Loop) -> bool:
        """Something of what the loop needed did not come from memory, or that is not known."""
        read, evidence = loop.counted.device_bytes, self._watch_evidence(loop)
        return read is None or read > (0.01 * evidence.requested_bytes if evidence else 0)

    def _steady(self) -> bool:
        """An epoch had passed before the watch: until then every sample has to be read once, whatever the cache."""
        samples, passed = self.target.dataset_samples, self.measured.passed * self.measured.batch_samples
        return samples is not None and passed * here().world >= samples

    def _amplification(self) -> float | None:
        evidence = self._watch_evidence(self.measured.watch) if self.measured.watch else None
        if evidence is None or evidence.device_bytes is None or not evidence.requested_bytes:
            return None
        return evidence.device_bytes / evidence.requested_bytes

    def _watch_evidence(self, loop: Loop) -> Evidence | None:
        return self._evidence(loop.samples, loop.counted.device_bytes)

    def _prep_evidence(self) -> Evidence | None:
        prep = self.measured.prep
        return None if prep is None else self._evidence(prep.samples, prep.counted.device_bytes)

    def _evidence(self, samples: int, device_bytes: int | None) -> Evidence | None:
        size = self.measured.reads.sample_bytes if self.measured.reads else None
        if size is None:
            return None
        return Evidence(round(samples * size), device_bytes, "" if device_bytes is None else _COUNTER)

    def _in_memory(self) -> bool | None:
        evidence = self._prep_evidence()
        if evidence is None:  # nothing is read
            return True if self._nothing_read() else None
        return None if evidence.device_bytes is None else evidence.device_bytes <= 0.01 * evidence.requested_bytes

    def _nothing_read(self) -> bool:
        prep = self.measured.prep
        return prep is not None and prep.counted.device_bytes == 0

    def _notes(self) -> Iterator[str]:
        found = self.measured
        if self._in_memory() is False:
            yield "P is too low: a device was read while it was measured, as memory does not hold the data"
        if found.storage is not None and found.storage.as_meant is False:
            evidence = found.storage.evidence
            assert evidence is not None
            share = (evidence.device_bytes or 0) / max(1, evidence.requested_bytes)
            yield (
                f"S is not given: caches could not be dropped; of {evidence.requested_bytes:,} bytes "
                f"a device read {share:.0%} (they are in memory themselves, mapped, or held by a cache of their own)"
            )
        if found.storage is not None and found.storage.as_meant is None:
            yield "whether caches were cold while S was measured is not known: no counter tells"
        if found.memory is not None and found.memory.as_meant is False:
            yield "C is not given: the data did not stay in memory while it was measured"
        if found.storage is not None and not self._dataset_bytes():
            yield "how large the data set is, is not known; predictions take all of it to be cached"
        if not self._steady():
            yield "no whole epoch had passed before the watch (--skip): what was evicted from caches cannot be told"


def _own_point(fetching: Fetching | None) -> ReadPoint | None:
    """With as many readers as the loader has workers, which is measured first."""
    return fetching.points[0] if fetching and fetching.points and fetching.as_meant is not False else None


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)
