"""A profile: what `diagnose` measured of a training, as plain numbers that `what-if` and the planner compute with.

Bytes are bytes, seconds are seconds, shares lie between 0 and 1. All rates are those of one rank, measured while every
rank of the host did the same. What could not be measured is None, never a guess; `notes` say why.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Self

from penstock.errors import DiagnosisError

__all__ = ["BatchPoint", "Evidence", "Operator", "PrepPoint", "Profile", "ReadPoint", "Split"]

VERSION = 1


@dataclass(frozen=True)
class Operator:
    """A part of preparing a sample, timed in one process with nothing beside it."""

    name: str
    s_per_sample: float


@dataclass(frozen=True)
class PrepPoint:
    """P with a number of workers (0: in the training process), data in memory, nothing else running."""

    workers: int
    samples_per_s: float
    efficiency: float
    """The rate for each busy core (the lesser of workers and cores), relative to that of one worker."""


@dataclass(frozen=True)
class ReadPoint:
    """Fetching alone, by a number of processes that read at once."""

    readers: int
    samples_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class BatchPoint:
    """G with another number of samples in a batch: replayed batches, cut."""

    batch_samples: int
    samples_per_s: float


@dataclass(frozen=True)
class Evidence:
    """What the counters said while a phase ran: this is how "cold" and "in memory" are known."""

    requested_bytes: int
    """Bytes that the reading calls returned."""
    device_bytes: int | None
    """Bytes that came from a device because of them; None where no counter tells."""
    counter: str
    """The counter that was read: "/proc/PID/io", "cgroup", "/sys/block"; empty where there is none."""


@dataclass(frozen=True)
class Split:
    """Mean seconds of a step, by what the training process did or waited for. The parts add up to the step."""

    compute_s: float
    prep_stall_s: float
    fetch_stall_s: float
    """Waiting for storage, as far as it would remain with a cache of the same size that never evicts."""
    thrashing_s: float
    """Waiting for storage beyond that: what was read again because it had been evicted."""


@dataclass(frozen=True)
class Profile:
    """One training on one machine, measured."""

    version: int

    # what was measured
    script: str
    """The script, or the step's name when diagnosed from Python."""
    loader: str
    """The loader's kind and data set, to be read by people."""
    steps_per_phase: int
    ranks: int
    """Ranks on this host, all measured at once."""

    # the machine
    cores: int
    """Cores that all ranks of this host may use together: affinity and cgroup quota."""
    memory_bytes: int
    """Memory that they may use together: the machine's, or the cgroup's limit."""
    cache_bytes: int | None
    """How much of the data can be cached now: the loader's cache, else what memory leaves to the page cache; None where
    the size of the data is not known."""
    gpu: str | None
    """The GPU's name; None where the step runs on the CPU."""
    gpus: int

    # the data
    dataset_samples: int | None
    """Samples of an epoch over all ranks; None for a stream of unknown length."""
    batch_samples: int
    """Samples of a batch on each rank."""
    workers: int
    """Worker processes of the loader on each rank; 0: the training process prepares batches itself."""
    overlapped: bool
    """A worker reads ahead while it prepares. False: it reads a sample, prepares it, and so on, as torch's do."""
    prefetch_batches: int
    """Batches that may be prepared ahead of the step."""
    sample_bytes: float | None
    """Mean bytes that a sample needs from storage."""
    dataset_bytes: float | None
    """Bytes of all samples of an epoch."""
    batch_bytes: int
    """Bytes of a prepared batch."""

    # the rates
    gpu_samples_per_s: float
    """G: the step alone, on batches that are replayed."""
    gpu_batches: tuple[BatchPoint, ...]
    """G at other batch sizes, and at this one; empty where batches cannot be cut."""
    step_cpu_s: float
    """CPU seconds of the training process for each of these steps, over all its threads."""
    prep_samples_per_s: float
    """P: the loader drained with its own workers, reading from memory, no step beside it. Reading is in it."""
    prep_cpu_s: float
    """CPU seconds for each of these samples, over all processes of the loader."""
    prep: tuple[PrepPoint, ...]
    """P at other numbers of workers, and at this one."""
    operators: tuple[Operator, ...]
    """P by operator; empty where the data set cannot be looked into."""
    memory_samples_per_s: float | None
    """C: fetching alone from memory, by as many readers as the loader has workers."""
    memory_bytes_per_s: float | None
    storage_samples_per_s: float | None
    """S: fetching alone from storage, by as many readers as the loader has workers, caches cold."""
    storage_bytes_per_s: float | None
    memory_cpu_s: float | None
    """CPU seconds of fetching a sample from memory; P has them in it."""
    storage_cpu_s: float | None
    """CPU seconds of fetching a sample from storage."""
    storage_wait_s: float | None
    """How long one reader waits for a sample that it asks for half as often as storage could give it. Below 1 / S where
    storage makes up for pauses: one that is limited to a rate by whoever lends it, or that reads ahead."""
    memory: tuple[ReadPoint, ...]
    """C at other numbers of readers."""
    storage: tuple[ReadPoint, ...]
    """S at other numbers of readers."""

    # the training as it is
    rate_samples_per_s: float
    """End to end, the script's loop with its loader, caches as they were."""
    warm_samples_per_s: float | None
    """End to end with the data in memory."""
    split: Split
    lock_wait_s: float | None
    """Seconds of a step that the training thread lost to other threads of its process, waiting for the interpreter."""
    copy_s: float | None
    """Seconds that copying a batch from host to device takes; None without a GPU."""
    copy_bytes_per_s: float | None
    resident_samples_per_s: float | None
    """G without these copies: the step on batches that lie on the device already; None where it cannot take them."""
    read_amplification: float | None
    """Bytes from the device over bytes that samples needed, while the script's loop ran."""
    waits_s: tuple[float, ...]
    """How long each observed step waited for its batch, in order."""
    steps_s: tuple[float, ...]
    """How long each of these steps took, its wait included."""
    gpu_steps_s: tuple[float, ...]
    """How long each step took on a batch that was replayed; G is the batch size over their mean."""
    prep_batches_s: tuple[float, ...]
    """The time between one batch and the next while P was measured."""

    # how it is known
    prep_evidence: Evidence | None
    """P, and C, were measured from memory if `device_bytes` is 0."""
    storage_evidence: Evidence | None
    """S was measured cold if `device_bytes` is about `requested_bytes`."""
    watch_evidence: Evidence | None
    in_memory: bool | None
    """The data was in memory while P was measured, as the counters show; None where none tells."""
    cold: bool | None
    """Caches were cold while S was measured, as the counters show; None where none tells or S was not measured."""
    notes: tuple[str, ...]
    """What could not be measured, and why; what qualifies the figures."""

    def to_json(self) -> str:
        """This profile as text that `from_json` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A profile that `to_json` wrote, checked."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DiagnosisError(
                f"a profile is JSON that `penstock diagnose --profile` wrote; this is not: {error}"
            ) from error
        found = data.get("version") if isinstance(data, dict) else None
        if found != VERSION:
            raise DiagnosisError(
                f"a profile of version {VERSION} is needed, not {found!r}; run `penstock diagnose` again"
            )
        profile: Self = _read(cls, data, "profile")
        return profile


def _read(wanted: Any, data: Any, place: str) -> Any:
    """The value of a field's type; the message names the place of what does not fit."""
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _read_object(wanted, data, place)
    parts = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return None if data is None else _read(parts[0], data, place)
    if typing.get_origin(wanted) is tuple:
        if not isinstance(data, list):
            raise _unfit(place, "a list", data)
        return tuple(_read(parts[0], item, f"{place}[{i}]") for i, item in enumerate(data))
    if wanted is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data) or data < 0:
            raise _unfit(place, "a finite number from 0", data)
        return float(data)
    if type(data) is not wanted or (wanted is int and data < 0):
        raise _unfit(
            place, {int: "a whole number from 0", float: "a number", str: "a text", bool: "true or false"}[wanted], data
        )
    return data


def _read_object(wanted: type[Any], data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        raise _unfit(place, "an object", data)
    hints = typing.get_type_hints(wanted)
    names = [field.name for field in fields(wanted)]
    lacking, unknown = [name for name in names if name not in data], [name for name in data if name not in names]
    if lacking or unknown:
        raise DiagnosisError(
            f"{place}: lacks {', '.join(lacking) or 'nothing'}; has unknown {', '.join(unknown) or 'nothing'}"
        )
    return wanted(**{name: _read(hints[name], data[name], f"{place}.{name}") for name in names})


def _unfit(place: str, expected: str, found: object) -> DiagnosisError:
    return DiagnosisError(f"{place}: expected {expected}, found {found!r}")
