"""Runs a pipeline's operators over samples, in any process of any lane."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.batch import Collator
from penstock.cache.access import Opened
from penstock.cache.choice import Choice
from penstock.cache.either import EitherReader
from penstock.cache.pixels import PixelCache
from penstock.cache.reader import CachedReader
from penstock.disk import DiskPlan, DiskReader
from penstock.errors import SampleError
from penstock.graph import Graph, Operator, Reader, Sample
from penstock.kernels import native
from penstock.lanes.processes import die_with_parent
from penstock.seeding import seed_all
from penstock.stage import Recipe, Stage, StageShape
from penstock.stem import Stem, stem
from penstock.work import BadSample, Memory, Request, Result, Work, failure

__all__ = ["GraphWork", "OnError", "Staging"]

OnError = Literal["raise", "skip", "replace"]
_READ_STREAM = 0x4000
"""The stream of draws that seeds the user's code behind an opaque source; 0 is for operators, 1.. for replacements."""
_SURVIVED = 113
"""An exit code that no user's code ends its process with by itself."""
_PATIENCE_S = 60.0
"""A sample that is tried in a process of its own and takes longer hangs."""
_POLITE = 10
"""Beside a GPU lane, CPU lanes take what time its stagers and the training process leave."""
_ATTEMPTS = 16
"""How many samples are tried for one position with `replace` before the batch fails."""


Steps = Sequence[tuple[Operator, int, int]]
"""Operators, and which of a sample's draws each takes."""


def _sliced(operators: Sequence[Operator], start: int = 0) -> Steps:
    ends = itertools.accumulate((operator.units for operator in operators), initial=start)
    return [(operator, begin, begin + operator.units) for operator, begin in zip(operators, ends, strict=False)]


@dataclass(frozen=True)
class Staging:
    """What makes some of the workers stagers of a GPU lane: those from `first_stager` on."""

    recipe: Recipe
    shape: StageShape
    first_stager: int


@dataclass
class GraphWork(Work):
    """Runs a pipeline: read, then the operators, sample by sample; every sample a function of its position alone."""

    graph: Graph
    seed: int
    shuffle: bool
    on_error: OnError
    staging: Staging | None = None
    disk: DiskPlan | None = None
    """Where samples of a slow source are kept between it and the operators."""

    def open(self, worker: int) -> None:
        if self.staging is not None and worker < self.staging.first_stager:
            os.nice(_POLITE)
        self._reader: Reader = self.graph.source.open()
        self._disk = None if self.disk is None else DiskReader(self.disk, self._reader)
        if self._disk is not None:
            self._reader = self._disk
        self._collator = Collator(self.graph)
        self._steps = _sliced(self.graph.operators)
        self._either: EitherReader | None = None
        """Where samples may be cached as pixels."""

    def equip(self, cache: Opened) -> None:
        reader = CachedReader(self._reader, cache.shelf, cache.row, len(self.graph.source))
        self._reader = reader
        found = stem(self.graph) if cache.pixels is not None else ""
        if cache.pixels is not None and isinstance(found, Stem):
            pixels = PixelCache(cache.pixels, found, reader.stamp)
            self._rest = _sliced(pixels.rest, found.rest[0].units)
            first, _, _ = self._steps[0]
            self._either = EitherReader(reader, pixels, self._choice(cache), first, self._lasting)

    def _choice(self, cache: Opened) -> Choice | None:
        if cache.choice is None:
            return None
        return Choice(cache.choice, len(self.graph.source), cache.room)

    def _lasting(self) -> bool:
        """What was read last comes from there in later epochs too: not from a source that a disk is put before."""
        return self._disk is None or self._disk.hit

    def run(self, request: Request, memory: Memory) -> Result:
        prepare = self._prepare_rows if request.stage is None else self._stage
        result = prepare(request, memory)
        if self._disk is not None:
            result.tally, result.notes = self._disk.take()
        return result

    def _prepare_rows(self, request: Request, memory: Memory) -> Result:
        epoch, first = request.payload
        positions = [first + row for row in request.rows]
        units = native.units(self.seed, epoch, 0, positions, self.graph.units)
        ids = self._ids(epoch, positions)
        samples: list[Sample] = []
        rows: list[int] = []
        bad: list[BadSample] = []
        for row, position, id, unit in zip(request.rows, positions, ids, units, strict=True):
            sample, errors = self._sample(epoch, position, id, unit, request)
            bad += [BadSample(row, e.id, e.place, e.operator, e.reason) for e in errors]
            if sample is not None:
                samples.append(sample)
                rows.append(row)
            elif self.on_error != "skip":
                return Result(failure=failure(errors[-1]), failed_row=row, bad=bad)
        try:
            result = self._collator.store(samples, rows, request, memory)
        except Exception as error:  # the lane's border, as below
            result = Result(failure=failure(error), failed_row=request.rows[0])
        result.bad = bad
        return result

    def _stage(self, request: Request, memory: Memory) -> Result:
        """Prepare rows for a GPU lane, as many as fit. Those that fail are for the CPU lanes, which say why."""
        assert self.staging is not None
        assert memory.stage is not None
        epoch, first = request.payload
        positions = [first + row for row in request.rows]
        units = native.units(self.seed, epoch, 0, positions, self.graph.units)
        ids = self._ids(epoch, positions)
        stage = Stage(memory.stage, self.staging.shape)
        stage.begin()
        samples: list[Sample] = []
        rows: list[int] = []
        returned: list[int] = []
        left: tuple[int, ...] = ()
        for index, (row, position, id, unit) in enumerate(zip(request.rows, positions, ids, units, strict=True)):
            try:
                self._seed_source(epoch, position)
                stored = self._reader.read(id) if self._either is None else self._either.encoded(id)
                sample = {**stored, "id": id}
                fits = stage.add(self.staging.recipe, sample, unit, row)
            except Exception:  # whatever it is, the CPU lanes meet it again, and have words for it
                fits = None
            if fits is False:
                left = request.rows[index:]
                break
            if fits:
                sample["image"] = self.staging.recipe.blank
                samples.append(sample)
                rows.append(row)
            else:
                returned.append(row)
        return self._staged(samples, rows, returned, left, request, memory)

    def _staged(
        self,
        samples: list[Sample],
        rows: list[int],
        returned: list[int],
        left: tuple[int, ...],
        request: Request,
        memory: Memory,
    ) -> Result:
        result = Result()
        if samples:
            try:
                result = self._collator.store(samples, rows, request, memory, skip="image")
            except Exception:  # as above: fields that the source did not promise
                result = Result(refused=True)
        if result.refused:
            result, returned = Result(), [*returned, *rows]
        result.returned, result.left, result.missing = tuple(returned), left, ()
        return result

    def _seed_source(self, epoch: int, position: int) -> None:
        """What the user's code behind an opaque source draws follows from the position alone."""
        if self.graph.source.opaque:
            (chance,) = native.units(self.seed, epoch, _READ_STREAM, [position], 1)[0]
            seed_all(int(chance * 2**53))

    def _ids(self, epoch: int, positions: list[int]) -> list[int]:
        return native.order(self.seed, epoch, len(self.graph.source), positions) if self.shuffle else positions

    def _sample(
        self, epoch: int, position: int, id: int, unit: Sequence[float], request: Request
    ) -> tuple[Sample | None, list[SampleError]]:
        """The sample at a position; with `replace` another one in the stead of one that fails."""
        errors: list[SampleError] = []
        for attempt in range(_ATTEMPTS if self.on_error == "replace" else 1):
            if attempt:
                (chance,) = native.units(self.seed, epoch, attempt, [position], 1)[0]
                id = int(chance * len(self.graph.source))
            try:
                if request.crashed and len(request.rows) == 1 and not attempt:
                    raise self._deadly(id)
                self._seed_source(epoch, position)
                if request.crashed and not self._survives(id, unit):
                    raise self._deadly(id)
                return self._prepare(id, unit), errors
            except SampleError as error:
                errors.append(error)
        return None, errors

    def _prepare(self, id: int, unit: Sequence[float]) -> Sample:
        name = "read"
        try:
            sample, steps = self._read(id, unit)
            sample["id"] = id
            for operator, start, end in steps:
                name = operator.name
                sample = operator.apply(sample, unit[start:end])
            sample["id"] = id
            return sample
        except Exception as error:  # the border between operators, some of them the user's, and the lane
            reason = f"{type(error).__name__}: {error}"
            raise SampleError(reason, id=id, place=self._place(id), operator=name) from error

    def _read(self, id: int, unit: Sequence[float]) -> tuple[Sample, Steps]:
        """The sample, and the steps that it has still to go."""
        if self._either is None:
            return self._reader.read(id), self._steps
        sample, begun = self._either.begin(id, unit)
        return sample, self._rest if begun else self._steps

    def _deadly(self, id: int) -> SampleError:
        reason = "preparing it hung or killed the worker process every time it was tried"
        return SampleError(reason, id=id, place=self._place(id), operator="worker")

    def _survives(self, id: int, unit: Sequence[float]) -> bool:
        """Try a sample in a process of its own: where one of several has killed workers, this tells which."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                die_with_parent(parent)
                with contextlib.suppress(SampleError):
                    self._prepare(id, unit)
                os._exit(_SURVIVED)
            os._exit(1)
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(1000 * _PATIENCE_S):
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _SURVIVED

    def _place(self, id: int) -> str:
        try:
            return self.graph.source.place(id)
        except Exception:  # a source of the user's; the error on its way matters more
            return ""
