"""`penstock top`: what the loaders on this machine are doing, from two readings of their counters.

`rates` is arithmetic over two snapshots; `text` and `_Screen` only show its outcome.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.errors import OptionError
from penstock.lanes import called
from penstock.terminal import load_rich
from penstock.view import running

__all__ = ["LoaderRates", "WorkerRates", "rates", "run", "text"]

Snapshot = Mapping[str, Any]
Cells = tuple[str, ...]

_NOTHING = "no loader runs on this machine"
_HEADS = (
    "loader",
    "pid",
    "samples/s",
    "batches/s",
    "waited",
    "busy",
    "slots free",
    "held",
    "cached",
    "bad",
    "workers lost",
)
_ERRORS = 5
"""Bad samples shown of each loader; `loader.stats()` lists more."""


@dataclass(frozen=True)
class WorkerRates:
    """One worker between two readings."""

    number: int
    pid: int
    samples_per_s: float
    busy: float
    """Share of the time that it worked."""


@dataclass(frozen=True)
class LoaderRates:
    """One loader between two readings, with the later one's snapshot."""

    snapshot: Snapshot
    seconds: float
    samples_per_s: float
    batches_per_s: float
    waited: float
    """Share of the time that the training process waited for a batch."""
    cached: float | None
    """Share of the samples that came from the cache; None without one, or where none was read."""
    workers: tuple[WorkerRates, ...]


def rates(before: Iterable[Snapshot], after: Iterable[Snapshot]) -> list[LoaderRates]:
    """What happened between two readings. A loader that is new counts from its start."""
    earlier = dict(_keyed(before))
    return [_between(earlier.get(key), snapshot) for key, snapshot in _keyed(after)]


def _keyed(snapshots: Iterable[Snapshot]) -> Iterator[tuple[tuple[Any, ...], Snapshot]]:
    """A process may have several loaders of one name; they come in a fixed order."""
    counts: dict[tuple[Any, ...], int] = {}
    for snapshot in snapshots:
        key = (snapshot["pid"], snapshot["name"])
        counts[key] = counts.get(key, 0) + 1
        yield (*key, counts[key]), snapshot


def _between(before: Snapshot | None, after: Snapshot) -> LoaderRates:
    if before is None or before["uptime_s"] >= after["uptime_s"] or before["samples"] > after["samples"]:
        before = {"workers": []}  # another loader that came in its place
    seconds = max(after["uptime_s"] - before.get("uptime_s", 0.0), 1e-9)
    earlier = {worker["number"]: worker for worker in before["workers"]}

    def per_s(key: str) -> float:
        return float((after[key] - before.get(key, 0)) / seconds)

    def worker(now: Snapshot) -> WorkerRates:
        then = earlier.get(now["number"], {})
        samples, busy_s = (now[key] - then.get(key, 0) for key in ("samples", "busy_s"))
        return WorkerRates(now["number"], now["pid"], samples / seconds, min(1.0, busy_s / seconds))

    workers = tuple(worker(now) for now in after["workers"])
    waited = min(1.0, per_s("wait_s"))
    return LoaderRates(after, seconds, per_s("samples"), per_s("batches"), waited, _cached(before, after), workers)


def _cached(before: Snapshot, after: Snapshot) -> float | None:
    now, then = after.get("cache"), before.get("cache") or {}  # a loader of another version may have none
    if now is None:
        return None
    hits, misses = (now[key] - then.get(key, 0) for key in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None


def text(loaders: Sequence[LoaderRates]) -> str:
    """A table for people, without colour."""
    if not loaders:
        return _NOTHING
    table = [_HEADS, *(row for one in loaders for row in _rows(one))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]
    return "\n".join([*(line.rstrip() for line in lines), *(error for one in loaders for error in _errors(one))])


def _rows(one: LoaderRates) -> Iterator[Cells]:
    """A row for the loader, and one for each of its workers."""
    now = one.snapshot
    busy = sum(worker.busy for worker in one.workers) / max(1, len(one.workers))
    yield (
        now["name"] or "(no name)",
        str(now["pid"]),
        f"{one.samples_per_s:,.0f}",
        f"{one.batches_per_s:,.1f}",
        f"{one.waited:.0%}",
        f"{busy:.0%}",
        f"{now['slots_free']} of {now['slots']}",
        str(now["slots_held"]),
        "" if one.cached is None else f"{one.cached:.0%}",
        f"{now['bad_samples']:,}",
        str(now["workers_lost"]),
    )
    for worker in one.workers:
        cells = (
            f"  {called(worker.number, worker.pid)}",
            str(worker.pid),
            f"{worker.samples_per_s:,.0f}",
            "",
            "",
            f"{worker.busy:.0%}",
        )
        yield (*cells, *[""] * (len(_HEADS) - len(cells)))


def _errors(one: LoaderRates) -> Iterator[str]:
    """The bad samples, a line each."""
    loader = one.snapshot["name"] or f"process {one.snapshot['pid']}"
    errors = one.snapshot["errors"]
    for error in errors[:_ERRORS]:
        reason = error["reason"].partition("\n")[0]
        yield f"{loader}: {error['operator']} failed on sample {error['id']} at {error['place']}: {reason}"
    if len(errors) > _ERRORS:
        yield f"{loader}: and {len(errors) - _ERRORS:,} more; loader.stats() lists them"


def run(interval_s: float, form: Literal["live", "text", "json"]) -> None:
    """Read twice and print, or go on reading until Ctrl-C."""
    if not 0 < interval_s < math.inf:
        raise OptionError(f"the interval must be a positive number of seconds, not {interval_s}")
    if form == "live":
        _live(interval_s)
        return
    before = list(running())
    if before:
        time.sleep(interval_s)
    loaders = rates(before, running())
    print(text(loaders) if form == "text" else json.dumps([_plain(one) for one in loaders], indent=2))


def _plain(one: LoaderRates) -> dict[str, Any]:
    return {**asdict(one), "snapshot": dict(one.snapshot)}


def _live(interval_s: float) -> None:
    """The table, redrawn, in place of the terminal's content until Ctrl-C."""
    if not sys.stdout.isatty():
        raise OptionError("the live view needs a terminal; --once and --json print one reading")
    rich = load_rich()
    before: Sequence[Snapshot] = []
    with rich.live.Live(screen=True, auto_refresh=False) as screen:
        while True:
            after = list(running())
            screen.update(_drawn(rich, rates(before, after)), refresh=True)
            before = after
            time.sleep(interval_s)


def _drawn(rich: Any, loaders: Sequence[LoaderRates]) -> Any:
    if not loaders:
        return f"{_NOTHING}; waiting for one. Ctrl-C ends."
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for index, head in enumerate(_HEADS):
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    for one in loaders:
        for index, row in enumerate(_rows(one)):
            table.add_row(*row, style="dim" if index else "")
    errors = [rich.text.Text(error, style="red") for one in loaders for error in _errors(one)]
    return rich.console.Group(table, *errors)
