"""Grain: a shuffled MapDataset over the files, OpenCV for the pixels, worker processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import grain
import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import Job, opencv_image

NOTE = opencv_image.NOTE
AUGMENTS = ("default",)
WORKERS = (0, 1)


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    cv2.setNumThreads(0)

    def load(file: tuple[str, int], rng: np.random.Generator) -> tuple[NDArray[np.uint8], int]:
        return opencv_image.load(file[0], job.size, rng), file[1]

    dataset = grain.MapDataset.source(job.files()).seed(job.seed).shuffle().random_map(load).repeat().batch(job.batch)
    batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=job.workers, prefetch_buffer_size=2 * job.workers))
    yield from batches
