"""One measuring process: the model is built and compiled once, then the contenders feed it in turn, round after round.

A turn of a contender is: G (the model alone, one batch of the device replayed), the loader alone, the training. So
every ratio has its own G, measured seconds before. Each turn is written to the log, a JSON line, as soon as it is over.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Measured
from benchmarks.training import loaders, meters
from benchmarks.training.loaders import Job
from benchmarks.training.loaders.common import LENGTH
from benchmarks.training.models import Trainer

Batch = tuple[Tensor, Tensor]

WARM_STEPS = 6
"""Of G, and of training at least: cuDNN tries its algorithms in the first, a captured graph is warm after three."""
PATIENCE_S = 90
"""For a contender to start, beyond the seconds that it is measured."""


def run(request: Measured) -> Measured:
    """Take the turns that are asked for, until the time is up."""
    trial = Trial(request)
    trial.write({"machine": meters.machine(trial.job.device)})
    failed: set[str] = set()
    for number, name in request["turns"]:
        if time.time() + trial.longest_s > request["until"]:
            break
        if name not in failed and not trial.turn(number, name):
            failed.add(name)
    return {}


def compiled(request: Measured) -> Measured:
    """Fill the compiler's cache on disk, for processes with fewer cores."""
    Trial(request)
    return {}


class Trial:
    """The model, the work, and where measurements go."""

    def __init__(self, request: Measured) -> None:
        self.request = request
        self.job = Job(**{**request["job"], "root": Path(request["job"]["root"])})
        self.longest_s = 0.0
        self.trainer: Trainer | None = None
        if self.job.device == "cuda":
            torch.cuda.init()
        if request["model"] != "none":
            self.trainer = Trainer(request["model"], request["classes"], self.job.device, request["compile"])
            self.replayed = next(loaders.opened("synthetic", self.job))
            self._train(itertools.repeat(self.replayed), 0.0)
            self.trainer.freeze_graphs()

    def write(self, line: Measured) -> None:
        """Append to the log, on a line of its own even after one that a dead process cut off."""
        with open(self.request["log"], "a") as file:
            file.write(f"\n{json.dumps(line)}\n")

    def turn(self, number: int, name: str) -> bool:
        """Measure a contender; False if it failed."""
        start = time.perf_counter()
        self.write({"begun": name})
        faulthandler.dump_traceback_later(PATIENCE_S + 4 * self.request["seconds"], exit=True)
        try:
            measured = self._measured(name)
            self.write({"name": name, "note": loaders.contender(name).NOTE, "round": number, **measured})
        except Exception:
            self.write({"failed": name, "error": traceback.format_exc()[-3000:]})
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._tidy()
            self.longest_s = max(self.longest_s, time.perf_counter() - start)
        return True

    def _measured(self, name: str) -> Measured:
        seconds, trainer, device = self.request["seconds"], self.trainer, self.job.device
        measured: Measured = {}
        if trainer is not None:
            self._train(itertools.repeat(self.replayed), 0.0)
            alone = self._train(itertools.repeat(self.replayed), seconds / 2)
            measured |= {"g": alone["images_per_s"], "g_cores": alone["cores"]}
        before = meters.in_use_mib(device)
        start = time.perf_counter()
        with contextlib.closing(loaders.opened(name, self.job)) as batches:
            self._check(next(batches))
            measured["first_batch_s"] = time.perf_counter() - start
            if name != "synthetic":  # which has no rate
                self._alone(batches, self.request["warm"])
                measured |= {f"alone_{key}": value for key, value in self._alone(batches, seconds / 2).items()}
            if trainer is not None:
                self._train(batches, self.request["warm"])
                measured |= self._training(batches, seconds)
                measured |= self._shares(measured, trainer)
            measured["loader_gpu_mib"] = meters.in_use_mib(device) - before
            measured["gpu_mib"] = meters.in_use_mib(device)
        return measured

    def _shares(self, measured: Measured, trainer: Trainer) -> Measured:
        """Where the training's time went: to the model, to waiting, the rest to all that made its steps slower."""
        ratio = measured["images_per_s"] / measured["g"]
        slowed = 1 - ratio - measured["waited_share"]
        return {"ratio": ratio, "slowed_share": slowed, "loss": float(trainer.loss)}

    def _training(self, batches: Iterator[Batch], seconds: float) -> Measured:
        """The training, with torch's peaks of memory."""
        if self.job.device != "cuda":
            return self._train(batches, seconds)
        torch.cuda.reset_peak_memory_stats()
        measured = self._train(batches, seconds)
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return measured | {"allocated_mib": peaks[0] / 2**20, "reserved_mib": peaks[1] / 2**20}

    def _train(self, batches: Iterator[Batch], seconds: float) -> Measured:
        """Steps for so long, WARM_STEPS at least; all that was launched counts, and the time until it is done."""
        trainer, device = self.trainer, self.job.device
        assert trainer is not None
        meters.synchronise(device)
        cpu, start, asked, steps = meters.cpu_seconds(os.getpid()), time.perf_counter(), 0.0, 0
        pace = meters.pace(device)
        while steps < WARM_STEPS or time.perf_counter() - start < seconds:
            before = time.perf_counter()
            inputs, labels = next(batches)
            asked += time.perf_counter() - before
            pace.ready()
            trainer.step(inputs, labels)
            pace.done()
            steps += 1
        waited = pace.finish()
        meters.synchronise(device)
        wall = time.perf_counter() - start
        return {
            "images_per_s": steps * self.job.batch / wall,
            "cores": (meters.cpu_seconds(os.getpid()) - cpu) / wall,
            "waited_share": waited / wall,
            "asked_share": asked / wall,
            "steps": steps,
        }

    def _alone(self, batches: Iterator[Batch], seconds: float) -> Measured:
        """Batches taken as fast as they come and dropped."""
        device = self.job.device
        meters.synchronise(device)
        cpu, start, taken = meters.cpu_seconds(os.getpid()), time.perf_counter(), 0
        while taken < 2 or time.perf_counter() - start < seconds:
            next(batches)
            taken += 1
        meters.synchronise(device)
        wall = time.perf_counter() - start
        cores = (meters.cpu_seconds(os.getpid()) - cpu) / wall
        return {"images_per_s": taken * self.job.batch / wall, "cores": cores}

    def _check(self, batch: Batch) -> None:
        """Raise unless the batch is what the work asks for."""
        job, (inputs, labels) = self.job, batch
        shape = (job.batch, 3, job.size, job.size) if job.kind == "image" else (job.batch, 1, LENGTH)
        found = (tuple(inputs.shape), inputs.dtype, inputs.device.type, tuple(labels.shape), labels.dtype)
        wanted = (shape, torch.float32, job.device, (job.batch,), torch.int64)
        if found != wanted or labels.device.type != job.device:
            raise ValueError(f"expected {wanted}, got {found} and labels on {labels.device.type}")
        if job.kind == "image" and not inputs.is_contiguous(memory_format=torch.channels_last):
            raise ValueError(f"expected channels last in memory, got strides {inputs.stride()}")
        if not torch.isfinite(inputs).all() or inputs.std() < 0.1 * (job.kind == "image"):
            raise ValueError("the first batch holds no picture")
        if job.batch >= 8 and len(labels.unique()) < 2:
            raise ValueError(f"expected a shuffled batch, got labels {labels.tolist()}")

    def _tidy(self) -> None:
        gc.collect()
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
