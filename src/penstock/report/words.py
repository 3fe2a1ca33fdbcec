"""What text and page call things: one word for one thing."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.profile import Profile, Split
from penstock.units import bytes_per_s_text, bytes_text
from penstock.whatif import Prediction

__all__ = ["duration", "evidence", "gain", "limit", "parts", "rate", "rates", "setting"]

_LIMITS = {
    "gpu": "the step: G",
    "prep": "preparing: P",
    "fetch": "storage: F",
    "workers": "workers read and prepare in turn",
    "cores": "cores, shared by workers and step",
}


def parts(split: Split) -> list[tuple[str, str, float]]:
    """Key, name and seconds of each part of a step."""
    return [
        ("compute", "compute", split.compute_s),
        ("prep", "waiting for preparation", split.prep_stall_s),
        ("fetch", "waiting for storage", split.fetch_stall_s),
        ("thrash", "waiting for what was evicted", split.thrashing_s),
    ]


def limit(prediction: Prediction) -> str:
    """What holds a prediction's rate."""
    return _LIMITS[prediction.limit]


def rate(samples_per_s: float) -> str:
    """Samples per second, to three digits or the unit."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 99.5 else f"{samples_per_s:.3g}"


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size_s in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:,.3g} {unit}"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def gain(after_per_s: float, before_per_s: float) -> str:
    """ "+34%", or "" for less than one per cent."""
    change = after_per_s / before_per_s - 1 if before_per_s > 0 else 0.0
    return f"{change:+.0%}" if abs(change) >= 0.01 else ""


def evidence(name: str, value: float) -> str:
    """A figure whose unit is in its name: "storage 132 MB/s" for storage_bytes_per_s."""
    for suffix, shown in (
        ("_samples_per_s", f"{rate(value)} samples/s"),
        ("_bytes_per_s", bytes_per_s_text(value)),
        ("_bytes", bytes_text(value)),
        ("_share", f"{value:.0%}"),
        ("_s", duration(value)),
    ):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {shown}"
    return f"{name.replace('_', ' ')} {value:.4g}"


def setting(profile: Profile) -> str:
    """The training and the machine, in a line."""
    ranks = f"{profile.ranks} ranks with " if profile.ranks > 1 else ""
    workers = f"{profile.workers} workers" if profile.workers else "no workers"
    return (
        f"{profile.loader}; {ranks}batches of {profile.batch_samples}, {workers}; {profile.cores} cores, "
        f"{bytes_text(profile.memory_bytes)} of memory, {profile.gpu or 'steps on the CPU'}"
    )


def rates(profile: Profile, now: Prediction) -> Iterator[tuple[str, float, str]]:
    """The rates of the parts: symbol, samples per second of a rank, what it is."""
    yield "G", profile.gpu_samples_per_s, "the step alone, on batches that are replayed"
    workers = f"{profile.workers} workers" if profile.workers else "the training process"
    yield "P", profile.prep_samples_per_s, f"preparing alone, from memory, by {workers}"
    if profile.memory_samples_per_s is not None:
        yield "C", profile.memory_samples_per_s, "reading alone, from memory"
    if profile.storage_samples_per_s is not None:
        speed = f", {bytes_per_s_text(profile.storage_bytes_per_s)}" if profile.storage_bytes_per_s else ""
        yield "S", profile.storage_samples_per_s, f"reading alone, from storage{speed}"
    if now.fetch_samples_per_s is not None:
        yield "F", now.fetch_samples_per_s, f"reading with {now.setup.cached_share:.0%} of the data from memory"
