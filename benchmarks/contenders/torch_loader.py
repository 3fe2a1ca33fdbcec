"""What the contenders inside a torch DataLoader share. Not a contender itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.contenders import Job

__all__ = ["epochs", "transforms"]


def transforms(job: Job) -> list[v2.Transform]:
    """Crop, flip and RandAugment as torchvision's users write them; they take PIL images and tensors alike."""
    steps: list[v2.Transform] = [v2.RandomResizedCrop(job.size, antialias=True), v2.RandomHorizontalFlip()]
    return [*steps, v2.RandAugment()] if job.augment == "rand" else steps


def epochs(dataset: Dataset[Any], job: Job) -> Iterator[Any]:
    """The dataset's batches, shuffled, from workers that outlive an epoch."""
    torch.manual_seed(job.seed)
    loader = DataLoader(
        dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers, persistent_workers=job.workers > 0
    )
    while True:
        yield from loader
