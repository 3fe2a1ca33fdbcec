"""The plots of a diagnosis: rate against cache and against workers, waiting step by step, preparing by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.profile import Profile
from penstock.report.svg import Axis, Chart
from penstock.report.words import duration, rate
from penstock.units import bytes_text
from penstock.whatif import Prediction, Setup, as_it_is, predict

__all__ = ["Check", "by_cache", "by_operator", "by_workers", "waiting"]

_STEPS = 60
"""Points of a predicted curve."""
_COLUMNS = 120
"""Columns of the timeline; with more steps than that, several share one."""


@dataclass(frozen=True)
class Check:
    """A rate that was measured in some setup, to be shown beside its prediction."""

    cached_share: float
    workers: int
    samples_per_s: float
    """Of a rank."""


def by_cache(profile: Profile, checks: Sequence[Check] = ()) -> str | None:
    """Rate against the size of a cache that never evicts; None where storage or the data set's size is unknown."""
    size = profile.dataset_bytes
    if profile.storage_samples_per_s is None or not size:
        return None
    now = as_it_is(profile)
    curve = [predict(profile, replace(now, cached_share=step / _STEPS)) for step in range(_STEPS + 1)]
    measured = [
        (check.cached_share, check.samples_per_s, _measured(check.samples_per_s, f"{check.cached_share:.0%} cached"))
        for check in checks
        if check.workers == profile.workers
    ]
    warm = profile.warm_samples_per_s
    if not measured and warm is not None:
        measured = [(1.0, warm, _measured(warm, "all cached"))]
    seen = profile.rate_samples_per_s
    gpu, prep = curve[0].gpu_samples_per_s, curve[0].prep_samples_per_s
    top = max(gpu, prep) if max(gpu, prep) < 1.6 * min(gpu, prep) else min(gpu, prep)
    top = 1.1 * max([top, seen, *(per_s for _, per_s, _ in measured)])
    plot = Chart(
        "Rate against cache size",
        f"Predicted from {rate(curve[0].samples_per_s)} samples per second with nothing cached to "
        f"{rate(curve[-1].samples_per_s)} with everything cached.",
        Axis(f"share of the data in memory (all of it: {bytes_text(size)})", 0.0, 1.0, percent=True),
        Axis("samples/s", 0.0, top),
    )
    _level(plot, gpu, top, "compute", "G")
    _level(plot, prep, top, "prep", "P")
    plot.line(_below(_shares(curve, [one.fetch_samples_per_s or 0.0 for one in curve]), top), "fetch", "F", "dashed")
    plot.line(_shares(curve, [one.samples_per_s for one in curve]), "best", "predicted", "strong")
    plot.points(measured, "ink", "measured")
    plot.points([(now.cached_share, seen, _measured(seen, "as it is"))], "ink", "as it is", "hollow")
    return plot.text()


def _shares(curve: Sequence[Prediction], values: Sequence[float]) -> list[tuple[float, float]]:
    return [(one.setup.cached_share, value) for one, value in zip(curve, values, strict=True)]


def _below(points: Sequence[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """The part of a rising line that lies in the plot."""
    shown = [point for point in points if point[1] <= top]
    if len(shown) < len(points) and shown:
        (x, y), (right, high) = shown[-1], points[len(shown)]
        shown.append((x + (right - x) * (top - y) / (high - y), top))
    return shown or [(points[0][0], top), (points[-1][0], top)]


def _level(plot: Chart, per_s: float, top: float, colour: str, label: str) -> None:
    if per_s <= top:
        plot.line([(plot.x.low, per_s), (plot.x.high, per_s)], colour, label, "dashed")


def _measured(per_s: float, where: str) -> str:
    return f"measured, {where}: {rate(per_s)} samples/s"


def by_workers(profile: Profile, checks: Sequence[Check] = ()) -> str | None:
    """Rate against workers of each rank; None where the training process prepares its batches itself."""
    if not profile.workers:
        return None
    now = as_it_is(profile)
    most = max(
        2 * profile.workers, round(1.5 * profile.cores / profile.ranks), *(point.workers for point in profile.prep)
    )
    counts = sorted({max(1, round(most * step / _STEPS)) for step in range(1, _STEPS + 1)})
    warm = [predict(profile, replace(now, workers=count, cached_share=1.0)) for count in counts]
    prep = [
        (point.workers, point.samples_per_s, f"P, {point.workers} workers: {rate(point.samples_per_s)} samples/s")
        for point in profile.prep
        if point.workers
    ]
    measured = [
        (check.workers, check.samples_per_s, _measured(check.samples_per_s, f"{check.workers} workers"))
        for check in checks
    ] or [(profile.workers, profile.rate_samples_per_s, _measured(profile.rate_samples_per_s, "as it is"))]
    gpu = profile.gpu_samples_per_s
    shown = [one.prep_samples_per_s for one in warm if one.prep_samples_per_s <= 1.25 * gpu]
    top = 1.12 * max([gpu if gpu < 3 * max(shown, default=gpu) else 0.0, *shown, *(per_s for _, per_s, _ in measured)])
    top = max(top, 1.05 * max((per_s for _, per_s, _ in prep if per_s < 1.5 * gpu), default=0.0))
    plot = Chart(
        "Rate against workers",
        f"Predicted with {counts[0]} to {counts[-1]} workers for each rank, on {profile.cores} cores.",
        Axis(f"workers of each rank, on {profile.cores} cores", 0.0, float(most), whole=True),
        Axis("samples/s", 0.0, top),
    )
    _level(plot, gpu, top, "compute", "G")
    plot.line(_below([(one.setup.workers, one.prep_samples_per_s) for one in warm], top), "prep", "P", "dashed")
    if profile.storage_samples_per_s is not None and now.cached_share < 1:
        plot.line(_workers(warm), "best", "predicted, all cached", "line")
        plot.line(_workers(_with(profile, now, counts)), "fetch", "predicted, cache as it is", "strong")
    else:
        plot.line(_workers(warm), "best", "predicted", "strong")
    plot.points([point for point in prep if point[1] <= top], "prep", "P measured", "hollow")
    plot.points(measured, "ink", "measured end to end")
    return plot.text()


def _with(profile: Profile, setup: Setup, counts: Sequence[int]) -> list[Prediction]:
    return [predict(profile, replace(setup, workers=count)) for count in counts]


def _workers(curve: Sequence[Prediction]) -> list[tuple[float, float]]:
    return [(one.setup.workers, one.samples_per_s) for one in curve]


def waiting(profile: Profile) -> str | None:
    """How long each observed step waited for its batch, and how long it computed."""
    count = len(profile.steps_s)
    if not count:
        return None
    each = -(-count // _COLUMNS)
    columns = []
    for first in range(0, count, each):
        steps, waits = profile.steps_s[first : first + each], profile.waits_s[first : first + each]
        columns.append((first, first + len(steps), 1e3 * sum(steps) / len(steps), 1e3 * sum(waits) / len(steps)))
    top = 1.08 * max(step for _, _, step, _ in columns)
    together = f", means of {each}" if each > 1 else ""
    plot = Chart(
        "Waiting, step by step",
        f"{count} observed steps that waited for {sum(profile.waits_s) / sum(profile.steps_s):.0%} of their time.",
        Axis(f"step of those observed{together}", 0.0, float(count), whole=True),
        Axis("milliseconds", 0.0, top),
    )
    bars = [
        (left + 0.12 * (right - left), right - 0.12 * (right - left), step, wait) for left, right, step, wait in columns
    ]
    plot.bars([(left, right, 0.0, step - wait) for left, right, step, wait in bars], "compute", "computing")
    plot.bars([(left, right, step - wait, step) for left, right, step, wait in bars], "wait", "waiting")
    return plot.text()


def by_operator(profile: Profile) -> list[tuple[str, float, str]]:
    """Name, share and time of each operator, costliest first."""
    total = sum(operator.s_per_sample for operator in profile.operators)
    ranked = sorted(profile.operators, key=lambda operator: -operator.s_per_sample)
    return [(one.name, one.s_per_sample / total, duration(one.s_per_sample)) for one in ranked if total > 0]
