"""A diagnosis and predictions for a terminal, without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from penstock.findings import Finding, findings
from penstock.profile import Profile
from penstock.report.words import duration, evidence, gain, limit, parts, rate, rates, setting
from penstock.units import bytes_text
from penstock.whatif import Case, Prediction, Remote, as_it_is, outlook, predict

__all__ = ["cases_text", "diagnosis_text", "remote_text"]

_WIDTH = 110
_BAR = 40


def diagnosis_text(profile: Profile) -> str:
    """Where the time goes, the rates of the parts, the findings, what else could be."""
    now = predict(profile, as_it_is(profile))
    sections = [
        [profile.script, f"  {setting(profile)}"],
        ["Where the time goes", *_split(profile)],
        ["Rates (samples/s of each rank)" if profile.ranks > 1 else "Rates (samples/s)", *_rates(profile, now)],
        ["Findings", *_findings(profile, findings(profile))],
        ["What if", *("  " + line for line in _table(outlook(profile)))],
    ]
    if profile.notes:
        sections.append(["Notes", *(line for note in profile.notes for line in _wrapped(note, "  - "))])
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _split(profile: Profile) -> Iterator[str]:
    step_s = sum(seconds for _, _, seconds in parts(profile.split))
    for _, name, seconds in parts(profile.split):
        share = seconds / step_s if step_s > 0 else 0.0
        yield f"  {name:<28} {duration(seconds):>8} {share:>5.0%}  {'█' * round(share * _BAR)}".rstrip()
    yield f"  {'a step':<28} {duration(step_s):>8}"


def _rates(profile: Profile, now: Prediction) -> Iterator[str]:
    for symbol, per_s, what in rates(profile, now):
        yield f"  {symbol}  {rate(per_s):>9}  {what}"
    yield f"     {rate(profile.rate_samples_per_s):>9}  measured end to end, caches as they were"
    if profile.warm_samples_per_s is not None:
        yield f"     {rate(profile.warm_samples_per_s):>9}  measured end to end, from memory"


def _findings(profile: Profile, found: Sequence[Finding]) -> Iterator[str]:
    if not found:
        yield "  Nothing to improve was found."
    for number, finding in enumerate(found, 1):
        yield from _wrapped(finding.what, f"  {number}. ")
        if finding.evidence:
            yield from _wrapped("; ".join(evidence(*figure) for figure in finding.evidence.items()), "     ")
        for remedy in finding.remedies:
            after = ""
            if remedy.samples_per_s is not None:
                change = gain(remedy.samples_per_s, profile.rate_samples_per_s)
                after = f": {rate(remedy.samples_per_s)} samples/s" + (f" ({change})" if change else "")
            yield from _wrapped(remedy.action + after, "     -> ")


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def cases_text(cases: Sequence[Case]) -> str:
    """A table of predictions, with what holds each of them."""
    return "\n".join(_table(cases)) + "\n"


def _table(cases: Sequence[Case]) -> Iterator[str]:
    base = cases[0].prediction.total_samples_per_s
    rows: list[tuple[str, ...]] = [("", "workers", "cached", "G", "P", "F", "samples/s", "", "held by")]
    rows += [_row(case.label, case.prediction, base) for case in cases]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *middle, row[-1]]).rstrip()
    if any(case.prediction.setup.ranks > 1 for case in cases):
        yield "G, P and F are those of one rank; samples/s is all ranks'."
    for note in dict.fromkeys(note for case in cases for note in case.prediction.notes):
        yield f"Note: {note}."


def _row(label: str, found: Prediction, base_per_s: float) -> tuple[str, ...]:
    return (
        label,
        str(found.setup.workers),
        f"{found.setup.cached_share:.0%}",
        rate(found.gpu_samples_per_s),
        rate(found.prep_samples_per_s),
        "" if found.fetch_samples_per_s is None else rate(found.fetch_samples_per_s),
        rate(found.total_samples_per_s),
        gain(found.total_samples_per_s, base_per_s),
        limit(found),
    )


def remote_text(found: Remote) -> str:
    """Remote storage beside downloading first."""
    pays = (
        "Downloading first never pays."
        if found.pays_from_epochs is None
        else f"Downloading first pays from epoch {found.pays_from_epochs} on."
    )
    return (
        f"remote, {bytes_text(found.remote_bytes_per_s)}/s: first epoch {duration(found.remote_first_epoch_s)}, "
        f"each later one {duration(found.remote_epoch_s)}\n"
        f"downloading, {bytes_text(found.download_bytes_per_s)}/s: {duration(found.download_s)}, then first epoch "
        f"{duration(found.local_first_epoch_s)}, each later one {duration(found.local_epoch_s)}\n{pays}\n"
    )
