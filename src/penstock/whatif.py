"""What a measured training would reach on other hardware: a profile and a setup in, a prediction out. Runs nothing.

    setup = as_it_is(profile)
    predict(profile, replace(setup, cores=16, workers=16)).samples_per_s

The cache is one that never evicts. Rates are those of one rank, as in the profile; `total_samples_per_s` is all ranks'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock import cost
from penstock.errors import DiagnosisError
from penstock.profile import BatchPoint, Profile, ReadPoint, Split
from penstock.units import bytes_text

__all__ = [
    "Case",
    "Limit",
    "Prediction",
    "Setup",
    "as_it_is",
    "cache_needed_bytes",
    "cached_share",
    "cores_needed",
    "never_evicting",
    "outlook",
    "predict",
    "remote",
    "split",
    "with_cores",
    "workers_needed",
]

Limit = Literal["gpu", "prep", "fetch", "workers", "cores"]
"""What holds the rate: the step; preparing; fetching; workers that read and prepare in turn; cores that workers share
with a step on the CPU."""

ENOUGH = 0.99
"""A rate within 1% of what it could become has no stall worth removing."""

_MOST_WORKERS = 512
_CLEARLY_FASTER = 1.25
_LEAST_LEFT = 0.85
"""A greater loss has another cause, which is to be found rather than taken along."""
_HALVINGS = 40


@dataclass(frozen=True)
class Setup:
    """What the training would run on."""

    ranks: int
    """GPUs on the host, each with a process of its own; batches for each stay as large as they are."""
    cores: float
    """For all ranks."""
    workers: int
    """Of each rank."""
    cached_share: float
    """Of the data set, in a cache that never evicts; on the host, for all ranks."""
    batch_samples: int
    gpu_factor: float = 1.0
    """How many times as fast as the measured one."""
    storage_factor: float = 1.0
    lane_samples_per_s: float = 0.0
    """What a GPU lane prepares at its best on each rank (its JPEG engine decodes); 0: there is none."""
    lane_cost: float = 0.0
    """The share of its own rate that the GPU loses while the lane is at its best."""


@dataclass(frozen=True)
class Prediction:
    """What a setup reaches, and what holds it."""

    setup: Setup
    gpu_samples_per_s: float
    """G."""
    prep_samples_per_s: float
    """P."""
    fetch_samples_per_s: float | None
    """F by equations 1 and 2; None where storage was not measured."""
    least_samples_per_s: float
    """min(F, P, G): what the paper predicts."""
    samples_per_s: float
    """What is predicted here, never above that."""
    limit: Limit
    notes: tuple[str, ...]
    """Where this lies beyond what was measured."""

    @property
    def total_samples_per_s(self) -> float:
        """The rate of all ranks together."""
        return self.samples_per_s * self.setup.ranks


def as_it_is(profile: Profile) -> Setup:
    """What the profile was measured on, with the share cached that was seen to come from memory while the loop ran.

    A page cache that evicts what is still needed serves less than it could hold, and in a first epoch nothing yet.
    """
    seen = profile.watch_evidence
    if seen is not None and seen.device_bytes is not None and seen.requested_bytes:
        share = max(0.0, 1 - seen.device_bytes / seen.requested_bytes)
    elif profile.dataset_bytes and profile.cache_bytes is not None:
        share = cached_share(profile, profile.cache_bytes)
    else:
        share = 1.0
    return Setup(profile.ranks, profile.cores, profile.workers, share, profile.batch_samples)


def never_evicting(profile: Profile) -> Setup:
    """The same with a cache that never evicts, as large as memory allows now."""
    now = as_it_is(profile)
    if profile.cache_bytes is None or not profile.dataset_bytes:
        return now
    return replace(now, cached_share=cached_share(profile, profile.cache_bytes))


def with_cores(setup: Setup, cores: float) -> Setup:
    """Other cores, and as many workers as each rank then has cores, unless there are more already."""
    return replace(setup, cores=cores, workers=max(setup.workers, int(cores / setup.ranks)) if setup.workers else 0)


def cached_share(profile: Profile, cache_bytes: float) -> float:
    """The share of the data set that a cache holds."""
    if not profile.dataset_bytes:
        raise DiagnosisError(
            f"{profile.script}: the profile does not say how large the data set is (a stream, or one that cannot be "
            "looked into), so what a cache would hold of it is not known; diagnose it with a data set that has a length"
        )
    return min(1.0, cache_bytes / profile.dataset_bytes)


def predict(profile: Profile, setup: Setup) -> Prediction:
    """The rate in that setup."""
    rates = _Rates(profile, setup)
    return Prediction(
        setup=setup,
        gpu_samples_per_s=rates.gpu,
        prep_samples_per_s=rates.prep_now,
        fetch_samples_per_s=rates.fetch,
        least_samples_per_s=rates.least(),
        samples_per_s=rates.end_to_end,
        limit=rates.limit(),
        notes=tuple(rates.notes()),
    )


class _Rates:
    """The rates of a rank's parts in a setup, and how they combine."""

    def __init__(self, profile: Profile, setup: Setup) -> None:
        self.profile, self.setup = profile, setup
        self.uncached_share = 1.0 - setup.cached_share
        self.cores = setup.cores / setup.ranks
        self.gpu = _gpu_per_s(profile, setup.batch_samples) * setup.gpu_factor
        self.beside = self.gpu * (_left_beside_workers(profile) if setup.workers else 1.0)
        self.step_cpu_s = profile.step_cpu_s / profile.batch_samples
        self.prep = _prep_curve(profile, self.cores)
        self.prep_now = self.prep(setup.workers) if setup.workers else _prep_inline_per_s(profile)
        self.storage = _read_curve(profile, setup, profile.storage, profile.storage_samples_per_s, setup.storage_factor)
        self.memory = _read_curve(profile, setup, profile.memory, profile.memory_samples_per_s, 1.0)
        self.readers = max(1, setup.workers)
        self.fetch = self._fetch_per_s()
        self.slack = self._slack()
        self.end_to_end = min(self._end_to_end(), self.least())

    def _fetch_per_s(self) -> float | None:
        if self.storage is None:
            return None
        memory_per_s = self.memory(self.readers) if self.memory else math.inf
        return cost.fetch_per_s(memory_per_s, self.storage(self.readers), self.setup.cached_share)

    def least(self) -> float:
        """min(F, P, G), with a GPU lane's help where there is one."""
        return min(self._assisted(self.prep_now), self.fetch or math.inf)

    def _assisted(self, prep_per_s: float) -> float:
        """What G and preparing at that rate reach together with the GPU lane, if there is one."""
        return cost.assisted_per_s(self.gpu, prep_per_s, self.setup.lane_samples_per_s, self.setup.lane_cost)

    def _slack(self) -> float:
        profile, workers = self.profile, self.setup.workers
        ahead = profile.prefetch_batches * workers // max(1, profile.workers)
        prep_variation = cost.variation(profile.prep_batches_s, max(1, profile.workers))
        return cost.buffer_slack(ahead, workers, prep_variation, cost.variation(profile.gpu_steps_s))

    def _end_to_end(self) -> float:
        """The rate, with what chance and sharing take from the least one."""
        if self.setup.workers == 0:
            return self._inline_per_s()
        if self.setup.lane_samples_per_s:
            return min(self._assisted(self._data_per_s(self.cores)), self.fetch or math.inf)
        return cost.shared_cores_per_s(self._on_cores, self.cores, self.step_cpu_s)

    def _on_cores(self, cores: float) -> float:
        """The rate when so many cores are left to the workers."""
        return cost.buffered_per_s(self._data_per_s(cores), self.beside, self.slack)

    def _data_per_s(self, cores: float) -> float:
        """What the workers deliver on so many cores."""
        left = max(cores, 1e-3)

        def prep(workers: float) -> float:
            busy = min(workers, self.cores)  # beyond the cores, workers only fill each other's gaps
            return self.prep(workers) * self.prep(min(busy, left)) / self.prep(busy) if workers > 0 else 0.0

        if self.fetch is None or self.storage is None or self.profile.overlapped:
            return min(prep(self.setup.workers), self.fetch or math.inf)
        alternating = cost.alternating_per_s(self.setup.workers, prep, self._beyond_memory, self.uncached_share)
        return min(alternating, self.fetch)

    def _beyond_memory(self, readers: float) -> float:
        """Reads per second from storage, as far as they take longer than from memory: those seconds are in P."""
        assert self.storage is not None
        per_s = self.storage(readers) * _haste(self.profile)
        if per_s <= 0:
            return 0.0
        return 1.0 / max(1.0 / per_s - self._memory_read_s() / readers, 1e-3 / per_s)

    def _memory_read_s(self) -> float:
        """Seconds of a worker that reading a sample from memory takes: P has them in it, for every sample."""
        return self.readers / self.memory(self.readers) if self.memory else 0.0

    def _inline_per_s(self) -> float:
        """The training process reads, prepares and trains in turn."""
        seconds = 1 / self.prep_now + 1 / self.gpu
        if self.storage is not None:
            seconds += self.uncached_share * max(
                0.0, 1 / (self.storage(1) * _haste(self.profile)) - self._memory_read_s()
            )
        return 1 / seconds

    def limit(self) -> Limit:
        """What would have to improve for the rate to rise."""
        parts: dict[Limit, float] = {"gpu": self.gpu, "prep": self.prep_now + self.setup.lane_samples_per_s}
        if self.fetch is not None:
            parts["fetch"] = self.fetch
        least: Limit = min(parts, key=lambda name: parts[name])
        if self.setup.workers == 0 or self.setup.lane_samples_per_s:
            return least if self.setup.workers else "workers"
        alone = self._data_per_s(self.cores)
        if self.end_to_end < 0.95 * self._on_cores(self.cores):
            return "cores"
        if alone < 0.95 * min(parts.values()):
            return "workers"
        return least

    def notes(self) -> Sequence[str]:
        """Where the measurements end."""
        profile, setup = self.profile, self.setup
        found = []
        busy = min(setup.workers, self.cores)
        measured = max((min(p.workers, profile.cores / profile.ranks) for p in profile.prep), default=profile.workers)
        if busy > measured + 0.5:
            found.append(f"P beyond {measured:g} busy cores is extrapolated at their efficiency")
        readers = max((point.readers for point in profile.storage), default=profile.workers) * profile.ranks
        if self.uncached_share > 0 and self.storage is not None and setup.workers * setup.ranks > readers:
            found.append(f"S beyond {readers} readers is taken to be level")
        if setup.ranks != profile.ranks:
            found.append("what exchanging gradients between GPUs costs is not known")
        return found


def _gpu_per_s(profile: Profile, batch_samples: int) -> float:
    """G at a batch size: a step takes a fixed time and a time for each sample, fitted to the sizes measured."""
    if batch_samples == profile.batch_samples:
        return profile.gpu_samples_per_s
    points = {point.batch_samples: point for point in profile.gpu_batches}
    points[profile.batch_samples] = BatchPoint(profile.batch_samples, profile.gpu_samples_per_s)
    if len(points) < 2:
        raise DiagnosisError(
            f"{profile.script}: G was measured with batches of {profile.batch_samples} only (they could not be cut), "
            f"so batches of {batch_samples} cannot be predicted; diagnose the script with that batch size"
        )
    sizes = list(points)
    times_s = [size / points[size].samples_per_s for size in sizes]
    mean, mean_s = sum(sizes) / len(sizes), sum(times_s) / len(sizes)
    slope = sum((x - mean) * (y - mean_s) for x, y in zip(sizes, times_s, strict=True)) / sum(
        (x - mean) ** 2 for x in sizes
    )
    slope = min(max(slope, 0.0), mean_s / mean)  # neither part is negative
    return batch_samples / (mean_s - slope * mean + slope * batch_samples)


def _prep_curve(profile: Profile, cores: float) -> cost.Curve:
    """P by the number of workers, on that many cores: as measured, and in proportion to the cores beyond."""
    measured_cores = profile.cores / profile.ranks
    points: dict[float, float] = {point.workers: point.samples_per_s for point in profile.prep if point.workers > 0}
    if profile.workers:
        points[profile.workers] = profile.prep_samples_per_s
    if not points:  # only ever measured in the training process: a worker is no faster than that
        points = {1: profile.prep_samples_per_s}
    above = [workers for workers in points if workers >= measured_cores]
    if above:
        points.setdefault(measured_cores, points[min(above)])
    measured = cost.curve(list(points.items()))
    last = max(points)
    busy = min(last, measured_cores)

    def per_s(workers: float) -> float:
        if cores == measured_cores and workers <= last:
            return measured(workers)
        active = min(workers, cores)
        return measured(active) if active <= busy else measured(busy) * active / busy

    return per_s


def _prep_inline_per_s(profile: Profile) -> float:
    """P in the training process."""
    for point in profile.prep:
        if point.workers == 0:
            return point.samples_per_s
    return profile.prep_samples_per_s if profile.workers == 0 else _prep_curve(profile, 1.0)(1)


def _read_curve(
    profile: Profile, setup: Setup, points: Sequence[ReadPoint], own_per_s: float | None, factor: float
) -> cost.Curve | None:
    """A rank's rate by its number of readers, while every rank reads as much; level beyond what was measured."""
    if own_per_s is None:
        return None
    rates = {point.readers: point.samples_per_s for point in points}
    rates[max(1, profile.workers)] = own_per_s
    host = cost.saturating(
        [(profile.ranks * readers, profile.ranks * per_s * factor) for readers, per_s in rates.items()]
    )
    return lambda readers: host(setup.ranks * readers) / setup.ranks


def _left_beside_workers(profile: Profile) -> float:
    """The share of G that a step keeps beside workers, which use the same caches: what the training from memory
    reached of it, where preparing was not what held it. 0.91 on two cores with steps on the CPU."""
    if not profile.warm_samples_per_s or not profile.workers:
        return 1.0
    if profile.prep_samples_per_s < _CLEARLY_FASTER * profile.gpu_samples_per_s:
        return 1.0
    left = profile.warm_samples_per_s / profile.gpu_samples_per_s
    return min(1.0, left) if left >= _LEAST_LEFT else 1.0


def _haste(profile: Profile) -> float:
    """How many times as fast storage gives a sample to a reader that pauses as to one that does not."""
    alone = [point.samples_per_s for point in profile.storage if point.readers == 1]
    if not alone or not profile.storage_wait_s:
        return 1.0
    return max(1.0, 1.0 / (profile.storage_wait_s * alone[0]))


def cache_needed_bytes(profile: Profile, setup: Setup) -> float | None:
    """The smallest cache that removes the fetch stall; None where storage or the data set's size is not known."""
    if profile.storage_samples_per_s is None or not profile.dataset_bytes:
        return None

    def enough(share: float) -> bool:
        return predict(profile, replace(setup, cached_share=share)).samples_per_s >= target

    target = ENOUGH * predict(profile, replace(setup, cached_share=1.0)).samples_per_s
    return profile.dataset_bytes * _smallest_share(enough)


def _smallest_share(enough: Callable[[float], bool]) -> float:
    if enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def workers_needed(profile: Profile, setup: Setup) -> int | None:
    """The fewest workers for each rank at which the GPU does not wait, with the cores and the cache of that setup."""
    return _fewest(lambda workers: _keeps_up(profile, replace(setup, workers=workers)))


def cores_needed(profile: Profile, setup: Setup) -> int | None:
    """The fewest cores for all ranks, a worker on each, that remove the prep stall of data in memory."""
    ranks, everything = setup.ranks, replace(setup, cached_share=1.0)
    each = _fewest(lambda cores: _keeps_up(profile, replace(everything, cores=cores * ranks, workers=cores)))
    return None if each is None else each * ranks


def _keeps_up(profile: Profile, setup: Setup) -> bool:
    found = predict(profile, setup)
    return found.samples_per_s >= ENOUGH * found.gpu_samples_per_s


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number from 1 that is enough, if any is; a number above one that is enough is enough too."""
    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_WORKERS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def split(profile: Profile, setup: Setup) -> Split:
    """The stall split of a step that the setup would have; a cache that never evicts thrashes nothing."""
    found, warm = predict(profile, setup), predict(profile, replace(setup, cached_share=1.0))
    compute_s = setup.batch_samples / found.gpu_samples_per_s
    warm_s = max(compute_s, setup.batch_samples / warm.samples_per_s)
    return Split(compute_s, warm_s - compute_s, max(0.0, setup.batch_samples / found.samples_per_s - warm_s), 0.0)


@dataclass(frozen=True)
class Case:
    """A setup that somebody asks about, with its prediction."""

    label: str
    prediction: Prediction


def outlook(profile: Profile) -> list[Case]:
    """What one would ask first: as it is, a cache that never evicts, and each part twice as fast or as large."""
    now, kept = as_it_is(profile), never_evicting(profile)
    asked = {"as it is": now}
    if profile.storage_samples_per_s is not None and profile.dataset_bytes and profile.cache_bytes is not None:
        asked[f"cache of {bytes_text(profile.cache_bytes)}, never evicting"] = kept
        needed = cache_needed_bytes(profile, kept) or 0.0
        if needed > profile.cache_bytes:
            share = cached_share(profile, needed)
            asked[f"cache of {bytes_text(needed)}, never evicting"] = replace(kept, cached_share=share)
        asked["disk 2x"] = replace(now, storage_factor=2.0)
    if now.workers:
        asked[f"{2 * now.workers} workers"] = replace(now, workers=2 * now.workers)
        asked[f"{2 * now.cores:g} cores, a worker on each"] = with_cores(now, 2 * now.cores)
    asked["GPU 2x"] = replace(now, gpu_factor=2.0)
    if now.ranks * 2 <= profile.gpus:
        asked[f"{2 * now.ranks} GPUs"] = replace(now, ranks=2 * now.ranks)
    return [Case(label, predict(profile, setup)) for label, setup in asked.items()]


@dataclass(frozen=True)
class Remote:
    """Training from remote storage, beside downloading the data set first."""

    remote_bytes_per_s: float
    download_bytes_per_s: float
    remote_first_epoch_s: float
    remote_epoch_s: float
    download_s: float
    local_first_epoch_s: float
    local_epoch_s: float
    pays_from_epochs: int | None
    """Trained for so many epochs or more, downloading first takes less time in all; None: never."""


def remote(profile: Profile, setup: Setup, remote_bytes_per_s: float, download_bytes_per_s: float) -> Remote:
    """Read from remote storage in every epoch, or download everything once and read the measured storage.

    In both cases the first epoch finds nothing cached, and later ones find the setup's cache full.
    """
    if not (profile.dataset_bytes and profile.dataset_samples and profile.sample_bytes):
        raise DiagnosisError(f"{profile.script}: the profile does not say how large the data set is")
    far_per_s = remote_bytes_per_s / profile.sample_bytes / profile.ranks
    far = replace(
        profile,
        storage_samples_per_s=far_per_s,
        storage_bytes_per_s=remote_bytes_per_s / profile.ranks,
        storage=(ReadPoint(max(1, profile.workers), far_per_s, remote_bytes_per_s / profile.ranks),),
    )

    def epochs_s(source: Profile) -> tuple[float, float]:
        cold = predict(source, replace(setup, cached_share=0.0)).total_samples_per_s
        later = predict(source, setup).total_samples_per_s
        return (source.dataset_samples or 0) / cold, (source.dataset_samples or 0) / later

    remote_s, local_s, download_s = epochs_s(far), epochs_s(profile), profile.dataset_bytes / download_bytes_per_s
    return Remote(
        remote_bytes_per_s,
        download_bytes_per_s,
        *remote_s,
        download_s,
        *local_s,
        cost.epochs_until_cheaper(*remote_s, download_s + local_s[0], local_s[1]),
    )
