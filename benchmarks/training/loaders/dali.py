"""NVIDIA DALI with the GPU's JPEG engine, as its ResNet-50 example is written, on its dynamic executor.

Settings: the share of images that the engine decodes (`hw_decoder_load`; 0.65 is what DALI ships with), and "crop" to
decode only the crop's region: "1.0", "0.12,crop". On the CPU neither means anything.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.rand_augment import rand_augment
from nvidia.dali.backend import ReleaseUnusedMemory

from benchmarks.training.loaders import Batches, Job
from benchmarks.training.loaders.common import MEAN, STD

NOTE = "shuffles within a buffer of 1,024"
KINDS = ("image",)

SHIPPED = "0.65"
AREA, RATIO = [0.08, 1.0], [3 / 4, 4 / 3]


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    gpu = job.device == "cuda"
    pipeline = _pipeline(
        job,
        setting.split(","),
        batch_size=job.batch,
        num_threads=job.cores,
        device_id=torch.cuda.current_device() if gpu else None,
        seed=job.seed,
    )
    pipeline.build()
    try:
        while True:
            images, labels = pipeline.run(torch.cuda.current_stream()) if gpu else pipeline.run()
            yield _tensor(images).permute(0, 3, 1, 2), _tensor(labels).flatten()
    finally:
        images = labels = pipeline = None
        gc.collect()
        ReleaseUnusedMemory()


def _tensor(batch: Any) -> torch.Tensor:
    """Without a copy: batches of the dynamic executor live as long as something refers to them."""
    return torch.from_dlpack(batch.as_tensor())


@pipeline_def(enable_conditionals=True, exec_dynamic=True)  # type: ignore[untyped-decorator]
def _pipeline(job: Job, setting: list[str]) -> tuple[Any, Any]:
    gpu = job.device == "cuda"
    paths, classes = job.files()
    encoded, labels = fn.readers.file(files=paths, labels=classes, random_shuffle=True, initial_fill=1024, name="files")
    images = _cropped(encoded, job, setting)
    if job.augment == "rand":
        nearest = types.INTERP_NN
        images = rand_augment(images, n=2, m=9, shape=(job.size, job.size), fill_value=0, interp_type=nearest)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="HWC",
        mean=[255 * level for level in MEAN],
        std=[255 * level for level in STD],
        mirror=fn.random.coin_flip(),
    )
    return images, fn.cast(labels.gpu() if gpu else labels, dtype=types.INT64)


def _cropped(encoded: Any, job: Job, setting: list[str]) -> Any:
    """Decoded and cut out, as 8-bit HWC of the wanted size."""
    load, crop = (setting[0] or SHIPPED), "crop" in setting
    decoder: dict[str, Any] = {"output_type": types.RGB, "device": "cpu"}
    if job.device == "cuda":
        decoder |= {"device": "mixed", "hw_decoder_load": float(load)}
    resize = {"size": (job.size, job.size), "interp_type": types.INTERP_LINEAR, "antialias": True}
    if crop:
        images = fn.decoders.image_random_crop(encoded, random_area=AREA, random_aspect_ratio=RATIO, **decoder)
        return fn.resize(images, **resize)
    images = fn.decoders.image(encoded, **decoder)
    return fn.random_resized_crop(images, random_area=AREA, random_aspect_ratio=RATIO, **resize)
