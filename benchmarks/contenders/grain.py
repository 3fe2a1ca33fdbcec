"""Grain: a shuffled MapDataset over the files, OpenCV for the pixels, worker processes of its own.

Processes, as with Grain's reading threads two busy cores gave 452 images/s instead of 564.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import grain
import numpy as np
from absl import flags
from numpy.typing import NDArray

from benchmarks.contenders import Job, opencv_image

NOTE = opencv_image.NOTE
AUGMENTS = ("default",)
WORKERS = (0, 1)


class _Load(grain.transforms.RandomMap):  # type: ignore[misc]
    def __init__(self, size: int) -> None:
        self.size = size

    def random_map(self, element: tuple[str, int], rng: np.random.Generator) -> tuple[NDArray[np.uint8], int]:
        cv2.setNumThreads(0)
        return opencv_image.load(element[0], self.size, rng), element[1]


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    flags.FLAGS(["benchmark"])  # Grain's worker processes want absl's flags parsed
    samples = grain.MapDataset.source(job.files()).seed(job.seed).shuffle().random_map(_Load(job.size)).repeat()
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    processes = grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=4)
    yield from samples.batch(job.batch).to_iter_dataset(reading).mp_prefetch(processes)
