"""The phases of a diagnosis, one after another, while a training takes its batches.

`batches` is what the training iterates. It yields the loader's own batches and times what happens between (the watch),
then the same batches again and again (G). While the training waits for the next one, it measures preparing (P), then
yields batches that are known to be in memory (the training without storage), and measures reading (S, C). Each phase
takes a fixed number of steps, never a fixed time, so that the ranks of a distributed training stay in step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.diagnosis.batches import cut, fresh, nbytes, on_device, on_host, rows
from penstock.diagnosis.children import apart
from penstock.diagnosis.counters import Counters, counters
from penstock.diagnosis.interpreter import LockWatch
from penstock.diagnosis.machine import Machine
from penstock.diagnosis.ranks import here
from penstock.diagnosis.reads import Reads, look, read_pieces
from penstock.diagnosis.storage import Fetching, measure
from penstock.diagnosis.target import Batches, Parts, Target
from penstock.errors import DiagnosisError, OptionError
from penstock.profile import BatchPoint, Operator, PrepPoint

__all__ = ["Drained", "Loop", "Measured", "Session", "Settings"]

_KEPT = 2
"""Batches that are replayed. Of Penstock's, more would have to be copied."""
_MEMORY_SHARE = 0.5
"""Of the free memory, what data may take that is to stay in memory."""
_MOST_SAMPLES = 8192
"""Samples that are fetched to measure S and C."""
_OPERATOR_SAMPLES = 64
_QUIET_S = 3.0
_COPIES = 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a diagnosis is told."""

    steps: int = 50
    """Of each phase."""
    skip: int = 0
    """Steps that pass before the first phase, such as an epoch, so that caches are as they are in training."""
    keep_on: bool = False
    """Let the training go on after the last phase, and leave out what a script may not survive."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 4), ("skip", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")


@dataclass(frozen=True)
class Loop:
    """So many steps of the training's own loop."""

    samples: int
    seconds: float
    steps_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    cpu_s: float
    """Of the training process alone."""
    counted: Counters

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True)
class Drained:
    """So many batches taken without a step between."""

    samples: int
    seconds: float
    gaps_s: tuple[float, ...]
    counted: Counters

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


@dataclass
class Measured:
    """What the phases found, as far as they have come."""

    passed: int = 0
    """Steps before the watch."""
    watch: Loop | None = None
    lock_share: float | None = None
    batch_bytes: int = 0
    batch_samples: int = 0
    replay: Loop | None = None
    reads: Reads | None = None
    prep: Drained | None = None
    prep_points: tuple[PrepPoint, ...] = ()
    operators: tuple[Operator, ...] = ()
    warm: Loop | None = None
    storage: Fetching | None = None
    memory: Fetching | None = None
    batch_points: list[BatchPoint] = field(default_factory=list)
    copy_s: float | None = None
    copy_bytes: int = 0
    resident: Loop | None = None
    notes: list[str] = field(default_factory=list)


class Session:
    """A diagnosis of one loader. `begin` is called with the training's iterator, then `next` gives each batch."""

    def __init__(self, target: Target, settings: Settings, finish: Callable[[Measured, Machine], None]) -> None:
        self.target = target
        self.measured = Measured()
        self.machine = Machine.here()
        self.phase = "not begun"
        self.optional = False
        """What runs now may be more than the script survives; all that is needed has been measured."""
        self._settings = settings
        self._finish = finish
        self._steps: Iterator[Any] = iter(())
        self._kept: list[Any] = []
        workers = max(1, target.workers)
        self._count = -(-settings.steps // workers) * workers
        """Steps of a phase: a multiple of the workers, who finish their batches at about the same time."""
        self._lead = max(2, workers, settings.steps // 5 // workers * workers)
        """Steps of a phase that do not count."""

    def begin(self, own: Batches, passed: int) -> None:
        """From here on batches come from this session."""
        self.measured.passed = passed
        self._steps = self._phases(own)

    def __next__(self) -> Any:
        return next(self._steps)

    @property
    def steps_needed(self) -> int:
        """Steps of the training's loop that all that is needed takes."""
        return 3 * (self._lead + self._count)

    def _phases(self, own: Batches) -> Iterator[Any]:
        self.phase = "watching the training as it is"
        with LockWatch() as lock:
            self.measured.watch = yield from self._timed(self._epochs(own), keep=True)
        self.measured.lock_share = lock.share
        del own
        _until_quiet()
        self.phase = "replaying batches (G)"
        self.measured.replay = yield from self._timed(map(fresh, itertools.cycle(self._kept)))
        self.phase = "preparing alone (P)"
        self._prepare()
        self.phase = "training from memory"
        with self.target.chosen() as batches:
            self.measured.warm = yield from self._timed(batches)
        self.phase = "reading alone (S, C)"
        self._fetch()
        if not self._settings.keep_on:
            self.optional = True
            yield from self._cut()
            yield from self._resident()
        self._finish(self.measured, self.machine)
        yield from self.target.own()

    def _timed(self, batches: Batches, keep: bool = False, steps: int | None = None) -> Generator[Any, None, Loop]:
        """Yield batches to the training, some to warm up, then those that count; the outcome is a Loop."""
        steps = steps or self._count
        for _ in range(self._lead):
            yield next(batches)
        _synchronize()
        before, cpu_s = counters(), time.process_time()
        asked: list[float] = []
        waits: list[float] = []
        samples = 0
        for number in range(steps):
            asked.append(time.perf_counter())
            batch = next(batches)
            waits.append(time.perf_counter() - asked[-1])
            samples += rows(batch) or self.target.batch_samples
            if keep and number >= steps - _KEPT:
                self._kept.append(fresh(batch))
            yield batch
        _synchronize()
        asked.append(time.perf_counter())
        durations = tuple(after - before for before, after in itertools.pairwise(asked))
        cpu_s = time.process_time() - cpu_s
        return Loop(samples, asked[-1] - asked[0], durations, tuple(waits), cpu_s, counters().since(before))

    def _epochs(self, own: Batches) -> Iterator[Any]:
        """Batches of the loader as the script has it, beyond the end of an epoch."""
        yield from own
        for epoch in itertools.count(1):
            empty = True
            for batch in self.target.own():
                empty = False
                yield batch
            if empty:
                raise DiagnosisError(f"{self.target.name} yields no batch; there is nothing to diagnose")
            if epoch == 1:
                self._note("the epoch ended while it was watched, and was begun again: the time its start takes counts")

    def _prepare(self) -> None:
        """P, by number of workers and by operator, from data in memory."""
        measured, target = self.measured, self.target
        measured.batch_bytes = max(map(nbytes, self._kept))
        measured.batch_samples = max(rows(batch) or 0 for batch in self._kept) or target.batch_samples
        count = self._lead + self._count + max(target.prefetch_batches, target.workers)
        target.choose(count)
        reads = measured.reads = look(target.fetcher, target.ids(_MOST_SAMPLES), target.stream)
        self._keep_in_memory(reads, count)
        measured.prep = self._drain(None, self._count)
        measured.prep_points = self._prep_points(measured.prep)
        measured.operators = self._operators(reads)

    def _keep_in_memory(self, reads: Reads, count: int) -> None:
        """Have the chosen batches' data in memory; where they would not fit, choose fewer that repeat."""
        if reads.sample_bytes:
            fit = int(_MEMORY_SHARE * self.machine.free_bytes / (reads.sample_bytes * self.target.batch_samples))
            if fit < count:
                self.target.choose(max(1, fit))
                self._note(f"P was measured with {max(1, fit)} different batches, as many as memory holds for sure")
        if (
            reads.known
            and not self.target.stream
            and set(reads.ids) >= set(self.target.ids(count * self.target.batch_samples))
        ):
            for pieces in reads.samples:
                read_pieces(pieces)
        else:
            self._drain(None, self._count)

    def _drain(self, workers: int | None, steps: int) -> Drained:
        processes = self.target.workers if workers is None else workers
        lead = max(1, processes)
        with self.target.chosen(workers) as batches:
            for _ in range(lead):
                next(batches)
            before = counters()
            times = [time.perf_counter()]
            samples = 0
            for _ in range(max(steps // lead, 1) * lead):
                samples += rows(next(batches)) or self.target.batch_samples
                times.append(time.perf_counter())
            counted = counters().since(before)
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return Drained(samples, times[-1] - times[0], gaps, counted)

    def _prep_points(self, own: Drained) -> tuple[PrepPoint, ...]:
        """P with one worker and with one for each core, beside the loader's own number."""
        rates = {self.target.workers: own.samples_per_s}
        cores = max(1, self.machine.cores // here().on_host)
        for workers in sorted({1, cores} - rates.keys()):
            try:
                rates[workers] = self._drain(workers, max(8, self._count // 2)).samples_per_s
            except Exception as error:  # a data set may not work in workers, if the script has none
                self._note(f"P with {workers} workers could not be measured: {type(error).__name__}: {error}")
        one = rates.get(1, own.samples_per_s / max(1, min(self.target.workers, cores)))
        busy = {workers: max(1, min(workers, cores)) for workers in rates}
        return tuple(PrepPoint(w, rates[w], rates[w] / busy[w] / one) for w in sorted(rates))

    def _operators(self, reads: Reads) -> tuple[Operator, ...]:
        parts = self.target.parts()
        ids = (reads.ids or tuple(self.target.ids(_OPERATOR_SAMPLES)))[:_OPERATOR_SAMPLES]
        if parts is None or not ids:
            self._note("P by operator cannot be told: the data set is a stream")
            return ()
        try:
            return apart(lambda: _by_operator(parts, ids))
        except DiagnosisError as error:
            self._note(f"P by operator could not be measured: {error}")
            return ()

    def _fetch(self) -> None:
        """S from cold caches, C from memory, each with several numbers of readers."""
        reads, target = self.measured.reads, self.target
        assert reads is not None
        if not reads.known:
            self._note(f"S and C were not measured: {reads.problem}")
            return
        assert reads.sample_bytes is not None
        most = max(1, int(_MEMORY_SHARE * self.machine.free_bytes / max(1.0, reads.sample_bytes)))
        ids = reads.ids[: min(_MOST_SAMPLES, most)]
        own = max(1, target.workers)
        readers = [own, *sorted({1, 2 * own} - {own})]
        fetch = target.task if target.fetches_apart else None
        chosen = Reads(ids, reads.samples[: len(ids)], reads.files, reads.sample_bytes, "")
        try:
            self.measured.storage = measure(chosen, fetch, readers, cold=True)
            self.measured.memory = measure(chosen, fetch, readers, cold=False)
        except (DiagnosisError, OSError) as error:
            self._note(f"S and C could not be measured: {error}")

    def _cut(self) -> Iterator[Any]:
        """G with batches of half the size."""
        size = self.measured.batch_samples // 2
        halves = [part for part in (cut(batch, size) for batch in self._kept) if part is not None] if size else []
        if not halves:
            self._note("G at another batch size was not measured: batches cannot be cut")
            return
        self.phase = "replaying halved batches"
        loop = yield from self._timed(map(fresh, itertools.cycle(halves)), steps=max(4, self._count // 2))
        self.measured.batch_points.append(BatchPoint(size, loop.samples_per_s))

    def _resident(self) -> Iterator[Any]:
        """What copying takes, and G on batches that are on the device already."""
        device = _device()
        if device is None or not on_host(self._kept):
            return
        self.phase = "replaying batches that lie on the GPU"
        try:
            self.measured.copy_s = _copy_s(self._kept[-1], device)
            self.measured.copy_bytes = nbytes(self._kept[-1])
            copies = [on_device(batch, device) for batch in self._kept]
        except torch.OutOfMemoryError:
            self._note("copies to the GPU were not measured: it has no memory left")
            return
        self.measured.resident = yield from self._timed(map(fresh, itertools.cycle(copies)))

    def _note(self, text: str) -> None:
        self.measured.notes.append(text)


def _by_operator(parts: Parts, ids: Sequence[int]) -> tuple[Operator, ...]:
    """In a child. Parts may lie within others, whose own time is then what remains."""
    spent: dict[str, float] = {}
    inner = [0.0]

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        inner.append(0.0)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        spent[name] = spent.get(name, 0.0) + seconds - inner.pop()
        inner[-1] += seconds

    parts.prepare(ids, timed)  # warms up: imports, tables
    spent.clear()
    parts.prepare(ids, timed)
    return tuple(Operator(name, seconds / len(ids)) for name, seconds in spent.items())


def _until_quiet() -> None:
    """Wait until what was begun ahead for an epoch that is given up has ended."""
    deadline = time.monotonic() + _QUIET_S
    busy = counters().cpu_s
    while time.monotonic() < deadline:
        time.sleep(0.1)
        busy, before = counters().cpu_s, busy
        if busy - before < 0.02:
            return


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if _uses_gpu() else None


def _synchronize() -> None:
    if _uses_gpu():
        torch.cuda.synchronize()


def _copy_s(batch: Any, device: torch.device) -> float:
    on_device(batch, device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_COPIES):
        on_device(batch, device)
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / _COPIES
