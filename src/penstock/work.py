"""What a worker does, whatever the lane: given rows of a batch and memory, prepare them and say how it went.

`penstock.graphwork` runs pipelines, `penstock.torchwork` torch datasets.
"""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from penstock.cache.access import Opened

__all__ = ["DISK_TALLY", "SMALL_BYTES", "BadSample", "Failure", "Memory", "Request", "Result", "Work", "failure"]


SMALL_BYTES = 1 << 15
"""Batches this small travel in messages, without a slot."""


DISK_TALLY = (
    "samples",
    "bytes",
    "kept_samples",
    "kept_bytes",
    "damaged",
    "source_samples",
    "source_bytes",
    "source_s",
)
"""What a reader counts that has a disk in front of its source: read from the disk; kept there; found damaged there;
read from the source, and the time of that."""


@dataclass(frozen=True)
class Request:
    """Rows of one batch to prepare. `payload` is what the loader said of the batch, `total` its number of rows."""

    seq: int
    rows: tuple[int, ...]
    total: int
    whole: bool
    crashed: bool
    payload: Any
    stage: tuple[int, int] | None = None
    """The stage slot to prepare them in for a GPU lane (see stage.py), instead of preparing them wholly."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be prepared, as `stats()` lists it."""

    row: int
    id: int
    place: str
    operator: str
    reason: str


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the user: itself where it can be pickled, and its text in any case."""

    pickled: bytes
    text: str


@dataclass
class Result:
    """How a request went. Exactly one of: `layout` (rows lie in memory under it; packed), `tree` (a batch of any kind),
    `failure`, `refused` (these rows cannot be prepared apart from the rest of the batch), `ended` (so is a stream)."""

    layout: bytes | None = None
    loose: bytes = b""
    tree: bytes = b""
    spans: tuple[tuple[int, int], ...] = ()
    failure: Failure | None = None
    failed_row: int = 0
    refused: bool = False
    ended: bool = False
    inline: tuple[bytes, ...] = ()
    """The memory of a small batch: that under its layout, or the buffers of its tree, which then has no `spans`."""
    nbytes: int = 0
    """Memory the whole batch takes."""
    own: bool = False
    """The result lies in memory of its own, not in the batch's slot; the lane sets this."""
    bad: list[BadSample] = field(default_factory=list)
    """Samples that failed; with `skip` their rows are missing from the batch, with `replace` they are filled."""
    missing: tuple[int, ...] = ()
    """Rows that hold nothing."""
    returned: tuple[int, ...] = ()
    """Rows that a GPU lane cannot take, for the CPU lanes."""
    left: tuple[int, ...] = ()
    """Rows that did not fit into the stage slot any more."""
    tally: dict[str, float] = field(default_factory=dict)
    """What the reader counted since the last result, by name."""
    notes: tuple[str, ...] = ()
    """What the user must be told, once however many say it."""


class Memory(ABC):
    """The memory of one batch, as a worker sees it."""

    slot: memoryview | None = None
    """All of the batch's slot, where it has one."""
    stage: memoryview | None = None
    """The stage slot, where the request names one."""

    @abstractmethod
    def reserve(self, nbytes: int, whole: bool) -> memoryview | None:
        """Writable memory of that size: the batch's slot. Where it has none that is large enough, memory of its own
        when the batch is prepared `whole`, else None."""


class Work(ABC):
    """Picklable where it can be; `open` is called once in every process that works."""

    def load(self) -> Work:
        """Called once in the template, before workers are forked from it: the work that they do."""
        return self

    @abstractmethod
    def open(self, worker: int) -> None:
        """Open files, seed, call the user's start function."""

    def equip(self, cache: Opened) -> None:
        """Read through a cache from now on; called after `open` where the loader has one."""
        raise NotImplementedError(f"{type(self).__name__} reads through no cache")

    @abstractmethod
    def run(self, request: Request, memory: Memory) -> Result:
        """Prepare the rows. Raises nothing but what kills a worker."""

    def describe(self, request: Request) -> str:
        """The samples of a request, for messages."""
        return f"batch {request.seq}, rows {list(request.rows)}"


def failure(error: BaseException) -> Failure:
    """An exception made fit for travel."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # what a user's exception does when pickled is anyone's guess
        pickled = b""
    return Failure(pickled, text)
