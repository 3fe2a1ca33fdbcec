"""What a profile says: findings as data, worst first. A pure function; `penstock.report` renders them.

for finding in findings(profile):
    finding.kind, finding.share, finding.evidence, finding.remedies
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from penstock.profile import Profile
from penstock.units import bytes_per_s_text, bytes_text
from penstock.whatif import (
    Setup,
    as_it_is,
    cache_needed_bytes,
    cached_share,
    cores_needed,
    never_evicting,
    predict,
    workers_needed,
)

__all__ = ["Finding", "Kind", "Remedy", "findings"]

Kind = Literal[
    "not_cold",
    "coldness_unknown",
    "not_in_memory",
    "memory_unknown",
    "gpu_bound",
    "prep_bound",
    "fetch_bound",
    "thrashing",
    "read_amplification",
    "no_workers",
    "few_workers",
    "idle_workers",
    "shared_cores",
    "lock_loss",
    "slow_copies",
    "fits_in_memory",
    "unexplained",
]
Weight = Literal["invalid", "stall", "fact"]
"""invalid: a figure cannot be trusted; stall: it costs time; fact: worth knowing."""

SMALL = 0.02
"""Shares of a step below this are within what two runs of the same training differ by."""
GPU_BOUND = 0.95
"""With this share of the step spent computing, no change to the data can bring more than a twentieth."""
AMPLIFIED = 1.1
"""Device reads over needed bytes; reading ahead within files gives up to 1.04."""
PAGEABLE_BYTES_PER_S = 10e9
"""Pinned memory reaches 12 GB/s on the slowest bus that GPUs are used with today; pageable memory 3 to 10."""
UNEXPLAINED = 0.1
"""Predictions are meant to hold within 4%; a difference of more than this has a cause that was not measured."""


@dataclass(frozen=True)
class Remedy:
    """What to do, and what that is predicted to reach."""

    action: str
    samples_per_s: float | None = None
    """The rate of a rank afterwards; None where it cannot be computed from what was measured."""


@dataclass(frozen=True)
class Finding:
    """One thing a profile says."""

    kind: Kind
    weight: Weight
    what: str
    """A sentence."""
    share: float
    """How much: the share of the epoch that it costs."""
    evidence: dict[str, float]
    """The figures behind it; the unit is in the name."""
    remedies: tuple[Remedy, ...] = ()


def findings(profile: Profile) -> list[Finding]:
    """Everything that is found: first what makes figures invalid, then stalls by what they cost, then facts."""
    found = [_helpful(profile, finding) for find in _FINDERS for finding in find(profile)]
    order: list[Weight] = ["invalid", "stall", "fact"]
    return sorted(found, key=lambda finding: (order.index(finding.weight), -finding.share))


def _helpful(profile: Profile, finding: Finding) -> Finding:
    """Without the remedies that are predicted to bring nothing."""
    enough = (1 + SMALL) * profile.rate_samples_per_s
    kept = (remedy for remedy in finding.remedies if remedy.samples_per_s is None or remedy.samples_per_s > enough)
    return replace(finding, remedies=tuple(kept))


def _not_cold(profile: Profile) -> Iterator[Finding]:
    evidence = profile.storage_evidence
    if profile.cold is True or evidence is None:
        return
    shown = {"requested_bytes": float(evidence.requested_bytes)}
    if evidence.device_bytes is not None:
        shown["device_bytes"] = float(evidence.device_bytes)
    drop = Remedy(
        "drop the caches first (as root: echo 3 > /proc/sys/vm/drop_caches), or diagnose on files of your own"
    )
    if profile.cold is False:
        warm = 1 - shown.get("device_bytes", 0.0) / max(1.0, shown["requested_bytes"])
        yield Finding(
            "not_cold",
            "invalid",
            f"S could not be measured: caches could not be dropped, and {warm:.0%} of the reads came from memory.",
            _share(profile, profile.split.fetch_stall_s + profile.split.thrashing_s),
            shown,
            (drop,),
        )
    else:
        yield Finding(
            "coldness_unknown",
            "fact",
            "Whether S was measured with cold caches is not known: no counter here tells what came from the device.",
            0.0,
            shown,
            (drop,),
        )


def _not_in_memory(profile: Profile) -> Iterator[Finding]:
    evidence = profile.prep_evidence
    if profile.in_memory is False and evidence is not None:
        yield Finding(
            "not_in_memory",
            "invalid",
            "P is too low: the data was read from storage while it was measured.",
            _share(profile, profile.split.prep_stall_s),
            {"requested_bytes": float(evidence.requested_bytes), "device_bytes": float(evidence.device_bytes or 0)},
            (Remedy("diagnose with fewer steps, so that their data fits into memory"),),
        )
    elif profile.in_memory is None:
        yield Finding(
            "memory_unknown",
            "fact",
            "Whether the data was in memory while P was measured is not known: no counter here tells.",
            0.0,
            {},
        )


def _gpu_bound(profile: Profile) -> Iterator[Finding]:
    share = _share(profile, profile.split.compute_s)
    if share < GPU_BOUND:
        return
    yield Finding(
        "gpu_bound",
        "fact",
        f"The step takes {share:.0%} of the time: the data keeps up.",
        share,
        {"gpu_samples_per_s": profile.gpu_samples_per_s, "rate_samples_per_s": profile.rate_samples_per_s},
        (
            _remedy(profile, "a GPU twice as fast", gpu_factor=2.0),
            Remedy("more cores, memory or a faster disk bring nothing now"),
        ),
    )


def _prep_bound(profile: Profile) -> Iterator[Finding]:
    share = _share(profile, profile.split.prep_stall_s)
    if share < SMALL or not profile.workers:
        return
    evidence = {
        "prep_stall_s": profile.split.prep_stall_s,
        "prep_samples_per_s": profile.prep_samples_per_s,
        "gpu_samples_per_s": profile.gpu_samples_per_s,
    }
    total = sum(operator.s_per_sample for operator in profile.operators)
    remedies = list(_more_workers_or_cores(profile))
    if total > 0:
        worst = max(profile.operators, key=lambda operator: operator.s_per_sample)
        evidence["costliest_operator_share"] = worst.s_per_sample / total
        remedies.append(Remedy(f"{worst.name} is {worst.s_per_sample / total:.0%} of preparing: make it cheaper"))
    yield Finding(
        "prep_bound",
        "stall",
        f"The step waits for samples to be prepared, {share:.0%} of the time.",
        share,
        evidence,
        tuple(remedies),
    )


def _more_workers_or_cores(profile: Profile) -> Iterator[Remedy]:
    """The fewest workers that end the prep stall on these cores, or the fewest cores that do."""
    setup = replace(as_it_is(profile), cached_share=1.0)
    workers = workers_needed(profile, setup)
    if workers is not None and workers > profile.workers:
        yield _remedy(profile, f"{workers} workers for each rank instead of {profile.workers}", workers=workers)
    cores = cores_needed(profile, setup)
    if workers is None and cores is not None and cores > profile.cores:
        each = -(-cores // profile.ranks)
        yield _remedy(profile, f"{cores} cores instead of {profile.cores}, a worker on each", cores=cores, workers=each)


def _fetch_bound(profile: Profile) -> Iterator[Finding]:
    share = _share(profile, profile.split.fetch_stall_s)
    if share < SMALL:
        return
    evidence = {"fetch_stall_s": profile.split.fetch_stall_s}
    remedies = []
    if profile.storage_samples_per_s is not None:
        evidence["storage_samples_per_s"] = profile.storage_samples_per_s
        evidence["storage_bytes_per_s"] = profile.storage_bytes_per_s or 0.0
        needed = cache_needed_bytes(profile, never_evicting(profile))
        if needed:
            evidence["cache_needed_bytes"] = needed
            kept = f"a cache of {bytes_text(needed)} that never evicts"
            if profile.cache_bytes is not None and needed > profile.cache_bytes:
                kept += f" (memory leaves {bytes_text(profile.cache_bytes)} now)"
            remedies.append(_remedy(profile, kept, cached_share=cached_share(profile, needed)))
        remedies.append(_remedy(profile, "a disk twice as fast", storage_factor=2.0))
        if not profile.overlapped:
            remedies.append(
                _remedy(
                    profile, f"{2 * profile.workers} workers, so that more read at once", workers=2 * profile.workers
                )
            )
    yield Finding(
        "fetch_bound",
        "stall",
        f"The step waits for storage, {share:.0%} of the time.",
        share,
        evidence,
        tuple(sorted(remedies, key=lambda remedy: -(remedy.samples_per_s or 0.0))),
    )


def _thrashing(profile: Profile) -> Iterator[Finding]:
    share = _share(profile, profile.split.thrashing_s)
    if share < SMALL:
        return
    evidence = {"thrashing_s": profile.split.thrashing_s}
    if profile.read_amplification is not None:
        evidence["read_amplification"] = profile.read_amplification
    kept = f"ps.Loader(cache={bytes_text(profile.cache_bytes or 0).replace(' ', '')!r}) never evicts"
    yield Finding(
        "thrashing",
        "stall",
        f"The page cache evicts what the epoch still needs: reading it again takes {share:.0%} of the time.",
        share,
        evidence,
        (Remedy(kept, profile.rate_samples_per_s / (1 - share)),),
    )


def _read_amplification(profile: Profile) -> Iterator[Finding]:
    if profile.read_amplification is None or profile.read_amplification < AMPLIFIED:
        return
    yield Finding(
        "read_amplification",
        "stall",
        f"{profile.read_amplification:.2f} times the bytes that samples need are read from the device.",
        _share(profile, profile.split.fetch_stall_s) * (1 - 1 / profile.read_amplification),
        {"read_amplification": profile.read_amplification, "sample_bytes": profile.sample_bytes or 0.0},
        (
            Remedy(
                "store samples one after the other (tar shards), or read whole files: small reads fetch whole blocks"
            ),
        ),
    )


def _few_workers(profile: Profile) -> Iterator[Finding]:
    stalled = profile.split.prep_stall_s + profile.split.fetch_stall_s
    cores_each = int(profile.cores / profile.ranks)
    if _share(profile, stalled) < SMALL or profile.workers >= cores_each:
        return
    workers = max(1, cores_each)
    evidence = {"workers": float(profile.workers), "cores_for_each_rank": float(cores_each)}
    remedy = _remedy(profile, f"num_workers={workers}", workers=workers)
    if profile.workers == 0:
        yield Finding(
            "no_workers",
            "stall",
            "The training process prepares its batches itself, and computes nothing meanwhile.",
            _share(profile, stalled),
            evidence,
            (remedy,),
        )
    elif (remedy.samples_per_s or 0.0) > profile.rate_samples_per_s * (1 + SMALL):
        yield Finding(
            "few_workers",
            "stall",
            f"{profile.workers} workers cannot use {cores_each} cores.",
            1 - profile.rate_samples_per_s / (remedy.samples_per_s or 1.0),
            evidence,
            (remedy,),
        )


def _idle_workers(profile: Profile) -> Iterator[Finding]:
    """More workers than are of any use: they cost memory, and time where they get into each other's way."""
    fewer = [point for point in profile.prep if 0 < point.workers < profile.workers]
    best = max(fewer, key=lambda point: point.samples_per_s, default=None)
    if best is None or best.samples_per_s < profile.prep_samples_per_s * (1 + SMALL):
        return
    yield Finding(
        "idle_workers",
        "stall",
        f"{profile.workers} workers prepare less than {best.workers} do.",
        _share(profile, profile.split.prep_stall_s) * (1 - profile.prep_samples_per_s / best.samples_per_s),
        {"prep_samples_per_s": profile.prep_samples_per_s, "prep_samples_per_s_with_fewer": best.samples_per_s},
        (_remedy(profile, f"num_workers={best.workers}", workers=best.workers),),
    )


def _shared_cores(profile: Profile) -> Iterator[Finding]:
    setup = replace(as_it_is(profile), cached_share=1.0)
    found = predict(profile, setup)
    if found.limit != "cores":
        return
    yield Finding(
        "shared_cores",
        "stall",
        "The workers and the training process want more CPU time than the cores have.",
        max(0.0, 1 - found.samples_per_s / found.least_samples_per_s),
        {
            "cores": float(profile.cores),
            "prep_cpu_s": profile.prep_cpu_s,
            "step_cpu_s": profile.step_cpu_s,
        },
        (_remedy(profile, f"{2 * profile.cores} cores", cores=2.0 * profile.cores),),
    )


def _lock_loss(profile: Profile) -> Iterator[Finding]:
    share = _share(profile, profile.lock_wait_s or 0.0)
    if profile.lock_wait_s is None or share < SMALL:
        return
    yield Finding(
        "lock_loss",
        "stall",
        f"Other Python threads of the training process hold the interpreter, {share:.0%} of the time.",
        share,
        {"lock_wait_s": profile.lock_wait_s},
        (Remedy("move the work of these threads into another process (loaders with workers, not threads)"),),
    )


def _slow_copies(profile: Profile) -> Iterator[Finding]:
    """Copies that the step waits for: without them it is faster."""
    resident, rate = profile.resident_samples_per_s, profile.copy_bytes_per_s
    if resident is None or profile.copy_s is None or rate is None or resident <= profile.gpu_samples_per_s:
        return
    factor = resident / profile.gpu_samples_per_s
    share = _share(profile, profile.split.compute_s) * (1 - 1 / factor)
    if share < SMALL:
        return
    memory = " That is what pageable memory gives." if rate < PAGEABLE_BYTES_PER_S else ""
    yield Finding(
        "slow_copies",
        "stall",
        f"Steps wait until batches are copied to the GPU, {share:.0%} of the time: {bytes_per_s_text(rate)}.{memory}",
        share,
        {"copy_s": profile.copy_s, "copy_bytes_per_s": rate, "batch_bytes": float(profile.batch_bytes)},
        (
            _remedy(
                profile,
                "pin_memory=True and .to(device, non_blocking=True), or ps.Loader(device='cuda')",
                gpu_factor=factor,
            ),
        ),
    )


def _fits_in_memory(profile: Profile) -> Iterator[Finding]:
    if profile.dataset_bytes is None or profile.cache_bytes is None or profile.dataset_bytes > profile.cache_bytes:
        return
    yield Finding(
        "fits_in_memory",
        "fact",
        "The data set fits into memory: storage matters in the first epoch only.",
        0.0,
        {"dataset_bytes": profile.dataset_bytes, "cache_bytes": float(profile.cache_bytes)},
    )


def _unexplained(profile: Profile) -> Iterator[Finding]:
    """What the parts predict, from memory, is not what was seen."""
    seen = profile.warm_samples_per_s
    if seen is None or profile.in_memory is False:
        return
    predicted = predict(profile, replace(as_it_is(profile), cached_share=1.0)).samples_per_s
    if abs(predicted / seen - 1) < UNEXPLAINED:
        return
    yield Finding(
        "unexplained",
        "invalid" if predicted < seen else "stall",
        f"From memory the training does {seen:,.0f} samples/s, but its parts should give {predicted:,.0f}.",
        max(0.0, 1 - seen / predicted),
        {"warm_samples_per_s": seen, "predicted_samples_per_s": predicted},
        (Remedy("see whether something else uses the machine; diagnose again, with more steps for each phase"),),
    )


_FINDERS: tuple[Callable[[Profile], Iterator[Finding]], ...] = (
    _not_cold,
    _not_in_memory,
    _gpu_bound,
    _prep_bound,
    _fetch_bound,
    _thrashing,
    _read_amplification,
    _few_workers,
    _idle_workers,
    _shared_cores,
    _lock_loss,
    _slow_copies,
    _fits_in_memory,
    _unexplained,
)


def _share(profile: Profile, seconds: float) -> float:
    """Of a step."""
    split = profile.split
    step_s = split.compute_s + split.prep_stall_s + split.fetch_stall_s + split.thrashing_s
    return seconds / step_s if step_s > 0 else 0.0


def _remedy(profile: Profile, action: str, **changes: float) -> Remedy:
    """A change of the training as it is, with the rate that is predicted for it."""
    setup: Setup = replace(as_it_is(profile), **changes)  # type: ignore[arg-type]
    return Remedy(action, predict(profile, setup).samples_per_s)
