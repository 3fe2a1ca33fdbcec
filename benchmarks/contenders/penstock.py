"""Penstock, as its README writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import penstock as ps
from benchmarks.contenders import Job

NOTE = ""
AUGMENTS = ("default", "rand")
WORKERS = (0,)


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    pipe = ps.files(str(job.root)).decode().random_resized_crop(job.size).flip()
    if job.augment == "rand":
        pipe = pipe.rand_augment(n=2, m=9)
    with ps.Loader(pipe.batch(job.batch), workers=job.workers, seed=job.seed) as loader:
        while True:
            for batch in loader:
                yield batch["image"], batch["label"]
