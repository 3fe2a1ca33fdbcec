"""What `penstock what-if` asks of a saved profile, from its options to predictions."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from penstock.errors import DiagnosisError, OptionError
from penstock.profile import Profile
from penstock.report.text import cases_text, remote_text
from penstock.units import bytes_text, parse_bytes, parse_bytes_per_s, parse_factor, parse_share
from penstock.whatif import Case, Remote, Setup, as_it_is, cached_share, never_evicting, predict, remote, with_cores

__all__ = ["MOST", "OPTIONS", "answer", "answers", "load"]

MOST = 200
"""Predictions in one table; more than that nobody reads."""

Change = Callable[[Setup], Setup]
"""What one value of an option makes of a setup."""


def load(path: Path) -> Profile:
    """A profile that `penstock diagnose` saved, alone or within a diagnosis."""
    text = path.read_text()
    try:
        data = json.loads(text)
    except ValueError:
        data = None  # Profile.from_json says what is wrong
    inner = data.get("profile") if isinstance(data, dict) else None
    try:
        return Profile.from_json(text if inner is None else json.dumps(inner))
    except DiagnosisError as error:
        raise DiagnosisError(f"{path}: {error}") from error


def answers(profile: Profile, asked: Mapping[str, str]) -> list[Case]:
    """The training as it is; each value of each option alone; and, with several options, all their combinations."""
    changes = [list(_changes(profile, name, text)) for name, text in asked.items()]
    singly = [(value,) for values in changes for value in values]
    together = list(itertools.product(*changes)) if len(changes) > 1 else []
    if len(singly) + len(together) > MOST:
        raise OptionError(f"these options make {len(singly) + len(together)} predictions; at most {MOST} fit a table")
    now = as_it_is(profile)
    cases = [Case("as it is", predict(profile, now))]
    for parts in [*singly, *together]:
        setup = now
        for _, change in parts:
            setup = change(setup)
        cases.append(Case(", ".join(label for label, _ in parts), predict(profile, setup)))
    return cases


def _changes(profile: Profile, name: str, text: str) -> Iterator[tuple[str, Change]]:
    for value in text.split(","):
        yield OPTIONS[name](profile, value.strip())


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"--{name} is one or more whole numbers from 1, such as 8,16; not {text!r}")
    return int(text)


def _cores(profile: Profile, text: str) -> tuple[str, Change]:
    cores = _whole("cores", text)
    return f"{cores} cores", lambda setup: with_cores(setup, cores)


def _workers(profile: Profile, text: str) -> tuple[str, Change]:
    workers = _whole("workers", text)
    return f"{workers} workers", lambda setup: replace(setup, workers=workers)


def _cache(profile: Profile, text: str) -> tuple[str, Change]:
    if text.endswith("%"):
        share, label = parse_share(text, "--cache"), text
    else:
        count = parse_bytes(text, "--cache")
        share, label = cached_share(profile, count), bytes_text(count)
    return f"cache {label}", lambda setup: replace(setup, cached_share=share)


def _gpu(profile: Profile, text: str) -> tuple[str, Change]:
    factor = parse_factor(text, "--gpu")
    return f"GPU {factor:g}x", lambda setup: replace(setup, gpu_factor=factor)


def _disk(profile: Profile, text: str) -> tuple[str, Change]:
    if profile.storage_bytes_per_s is None:
        raise DiagnosisError(f"{profile.script}: S was not measured, so another disk cannot be predicted")
    if text.endswith("x"):
        factor = parse_factor(text, "--disk")
        return f"disk {factor:g}x", lambda setup: replace(setup, storage_factor=factor)
    per_s = parse_bytes_per_s(text, "--disk")
    if per_s <= 0:
        raise OptionError(f"--disk is a rate above 0, not {text!r}")
    factor = per_s / (profile.storage_bytes_per_s * profile.ranks)
    return f"disk {bytes_text(per_s)}/s", lambda setup: replace(setup, storage_factor=factor)


def _gpus(profile: Profile, text: str) -> tuple[str, Change]:
    ranks = _whole("gpus", text)
    return f"{ranks} GPU{'s' if ranks > 1 else ''}", lambda setup: replace(setup, ranks=ranks)


def _batch(profile: Profile, text: str) -> tuple[str, Change]:
    size = _whole("batch", text)
    return f"batch {size}", lambda setup: replace(setup, batch_samples=size)


def _lane(profile: Profile, text: str) -> tuple[str, Change]:
    rate, slash, lost = text.partition("/")
    if not slash:
        raise OptionError(
            "--lane is samples per second that the GPU prepares, and the share of its own rate that this costs, "
            f"such as 15000/9%; not {text!r}"
        )
    per_s, cost = _whole("lane", rate), parse_share(lost, "--lane, after the /,")
    return f"GPU lane {per_s:,}/s", lambda setup: replace(setup, lane_samples_per_s=float(per_s), lane_cost=cost)


OPTIONS: dict[str, Callable[[Profile, str], tuple[str, Change]]] = {
    "cores": _cores,
    "workers": _workers,
    "cache": _cache,
    "gpu": _gpu,
    "disk": _disk,
    "gpus": _gpus,
    "batch": _batch,
    "lane": _lane,
}
"""By name, in the order in which they are applied: the workers that come with cores yield to workers asked for."""


def answer(options: argparse.Namespace) -> str:
    """What the command prints."""
    profile = load(options.profile)
    asked = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    far = _far(profile, options.remote, options.download)
    cases = answers(profile, asked) if asked or far is None else []
    if options.json:
        plain = {"cases": [asdict(case) for case in cases], "remote": None if far is None else asdict(far)}
        return json.dumps(plain, indent=2) + "\n"
    return "\n".join([*([cases_text(cases)] if cases else []), *([remote_text(far)] if far else [])])


def _far(profile: Profile, remote_rate: str | None, download_rate: str | None) -> Remote | None:
    if remote_rate is None and download_rate is None:
        return None
    if remote_rate is None or download_rate is None:
        raise OptionError("--remote and --download are compared with each other; give both, such as 100MB/s and 1GB/s")
    rates = parse_bytes_per_s(remote_rate, "--remote"), parse_bytes_per_s(download_rate, "--download")
    if min(rates) <= 0:
        raise OptionError("--remote and --download are rates above 0")
    return remote(profile, never_evicting(profile), *rates)
