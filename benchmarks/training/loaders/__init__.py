"""What feeds a training: one module per contender, each as its own users would tune it, all doing the same work.

A module has `batches(job, setting)`, an endless iterator of (inputs, labels) on the job's device. Images are
normalised, float32, [batch, 3, size, size] with channels last in memory; waveforms are float32, [batch, 1, LENGTH];
labels are int64. Every batch is full. The device's work for a batch precedes whatever the caller launches on its
current stream. Closing the iterator ends everything that the contender started. Beside it stand

- `NOTE`: what differs from the common work, for the table; empty where nothing does;
- `KINDS`: "image", "audio", which of them it can feed.

On command lines a contender is NAME or NAME:SETTING; the module says what its settings are.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOADERS", "Batches", "Contender", "Job", "contender", "opened"]

LOADERS = ("synthetic", "torch", "rough", "dali", "penstock", "process", "ablation")

Batches = Generator[tuple["Tensor", "Tensor"], None, None]


@dataclass(frozen=True)
class Job:
    """The work, the same for every contender."""

    root: Path
    """A folder per class, JPEG or WAV files in them."""
    kind: Literal["image", "audio"]
    samples: int
    """Of an epoch, for loaders that pause between epochs: as in a large data set, the files repeat to so many."""
    batch: int
    size: int
    cores: int
    """That this process may use; workers or threads are as many."""
    augment: Literal["default", "rand"]
    device: Literal["cuda", "cpu"]
    seed: int

    def files(self) -> tuple[list[str], list[int]]:
        """Paths and classes, in a stable order."""
        classes = sorted(folder for folder in self.root.iterdir() if folder.is_dir())
        pairs = [(str(path), label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
        return [path for path, _ in pairs], [label for _, label in pairs]


class Contender(Protocol):
    """What a module of this package offers."""

    NOTE: str
    KINDS: tuple[str, ...]

    def batches(self, job: Job, setting: str) -> Batches:
        """Inputs and labels, without end."""


def contender(name: str) -> Contender:
    """The module behind NAME or NAME:SETTING."""
    module = name.partition(":")[0]
    if module not in LOADERS:
        raise ValueError(f"there is no loader {module!r}; there are {', '.join(LOADERS)}")
    return cast(Contender, importlib.import_module(f"benchmarks.training.loaders.{module}"))


def opened(name: str, job: Job) -> Batches:
    """The contender's batches."""
    module = contender(name)
    if job.kind not in module.KINDS:
        raise ValueError(f"{name} has no way with {job.kind} here")
    return module.batches(job, name.partition(":")[2])
