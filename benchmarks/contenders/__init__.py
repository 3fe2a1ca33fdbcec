"""One module per contender, each tuned as its own users would tune it, all doing the same work.

A module has `batches(job)`, an endless iterator of (images, labels) over epoch after epoch; images are 8-bit RGB, NHWC
or NCHW, in arrays that torch can take without a copy. Beside it stand

- `NOTE`: what differs from the common work, for the table; empty where nothing does;
- `AUGMENTS`: which of the job's augmentations it can do ("default": random resized crop and flip; "rand": RandAugment
  after these);
- `WORKERS`: how many workers (processes or threads) to try, as additions to the number of cores; the fastest in an
  untimed round is measured;
- `prepare(job)`, where the contender reads a form of its own: writes it to `job.own`, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["CONTENDERS", "Contender", "Job"]

CONTENDERS = (
    "torch_pillow",
    "torch_opencv",
    "torchvision",
    "webdataset",
    "litdata",
    "grain",
    "spdl",
    "ffcv",
    "dali",
    "penstock",
)
"""In the order of the table; the first is the one the others are compared to."""


@dataclass(frozen=True)
class Job:
    """The work, the same for every contender."""

    root: Path
    """A folder per class, JPEG files in them."""
    own: Path
    """Where the contender finds what its `prepare` wrote."""
    samples: int
    batch: int
    size: int
    workers: int
    augment: Literal["default", "rand"]
    seed: int

    def files(self) -> list[tuple[str, int]]:
        """Path and class of every sample, in a stable order."""
        classes = sorted(folder for folder in self.root.iterdir())
        return [(str(path), label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]


class Contender(Protocol):
    """What a module of this package offers."""

    NOTE: str
    AUGMENTS: tuple[str, ...]
    WORKERS: tuple[int, ...]

    def batches(self, job: Job) -> Iterator[tuple[Any, Any]]:
        """Images and labels, without end."""
