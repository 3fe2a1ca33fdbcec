"""NVIDIA DALI on the CPU: decodes only the crop's region, threads of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.rand_augment import rand_augment
from torch.utils.dlpack import from_dlpack

from benchmarks.contenders import Job

NOTE = "shuffles within a buffer of 1,024"
AUGMENTS = ("default", "rand")
WORKERS = (0, 1)


@pipeline_def(enable_conditionals=True, exec_dynamic=True, prefetch_queue_depth=2)  # type: ignore[untyped-decorator]
def _pipeline(job: Job) -> tuple[Any, Any]:
    files = job.files()
    encoded, labels = fn.readers.file(
        files=[path for path, _ in files],
        labels=[label for _, label in files],
        random_shuffle=True,
        initial_fill=1024,
        name="files",
    )
    images = fn.decoders.image_random_crop(
        encoded, output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    images = fn.resize(images, size=(job.size, job.size), interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    if job.augment == "rand":
        nearest = types.INTERP_NN
        images = rand_augment(images, n=2, m=9, shape=(job.size, job.size), fill_value=0, interp_type=nearest)
    return images, labels


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    pipeline = _pipeline(job, batch_size=job.batch, num_threads=job.workers, device_id=None, seed=job.seed)
    pipeline.build()
    while True:
        images, labels = pipeline.run()
        yield from_dlpack(images.as_tensor()), from_dlpack(labels.as_tensor()).flatten()
