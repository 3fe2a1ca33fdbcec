"""LitData: chunks of its own format, streamed by DataLoader workers, decoded by torchvision."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import litdata
from PIL import Image
from torchvision.transforms import v2

from benchmarks.contenders import Job
from benchmarks.contenders.torch_loader import transforms

NOTE = "shuffles within chunks of 16 MB"
AUGMENTS = ("default", "rand")
WORKERS = (0, 1)


def _sample(file: tuple[str, int]) -> dict[str, Any]:
    return {"image": Image.open(file[0]), "label": file[1]}


def prepare(job: Job) -> None:
    """Write the chunks, the samples in random order; a JPEG opened by Pillow is stored as its own bytes."""
    files = job.files()
    random.Random(job.seed).shuffle(files)
    litdata.optimize(_sample, files, str(job.own), num_workers=1, chunk_bytes="16MB", start_method="fork")


class _Images(litdata.StreamingDataset):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        super().__init__(str(job.own), shuffle=True, seed=job.seed)
        self.transform = v2.Compose(transforms(job))

    def __getitem__(self, index: Any) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        return self.transform(sample["image"]), sample["label"]


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    loader = litdata.StreamingDataLoader(
        _Images(job), batch_size=job.batch, num_workers=job.workers, persistent_workers=job.workers > 0
    )
    while True:
        yield from loader
