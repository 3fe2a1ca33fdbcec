"""torch DataLoader over OpenCV, the usual recipe of those who find Pillow slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from benchmarks.contenders import Job, opencv_image
from benchmarks.contenders.torch_loader import epochs

NOTE = opencv_image.NOTE
AUGMENTS = ("default",)
WORKERS = (0, 1)


class _Images(Dataset[tuple[NDArray[np.uint8], int]]):
    def __init__(self, job: Job) -> None:
        self.files, self.size = job.files(), job.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        path, label = self.files[index]
        return opencv_image.load(path, self.size, np.random.default_rng()), label


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    cv2.setNumThreads(0)  # the workers are the parallelism
    return epochs(_Images(job), job)
