"""FFCV: its own file, read by memory map; compiled decode and crop in threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

from benchmarks.contenders import Job

NOTE = "OpenCV's INTER_AREA filter; holds the files' own JPEG bytes"
AUGMENTS = ("default",)
WORKERS = (0,)


class _OwnBytes(RGBImageField):  # type: ignore[misc]
    """FFCV encodes anew what it writes; the files' own bytes keep the decoding work equal for all contenders."""

    def encode(self, destination: Any, image: str, malloc: Any) -> None:
        data = np.fromfile(image, np.uint8)
        with Image.open(image) as header:
            destination["width"], destination["height"] = header.size
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(data.nbytes)
        storage[:] = data


def prepare(job: Job) -> None:
    """Write the file."""
    writer = DatasetWriter(str(job.own / "photos.beton"), {"image": _OwnBytes(), "label": IntField()}, num_workers=1)
    writer.from_indexed_dataset(job.files())


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    crop = RandomResizedCropRGBImageDecoder((job.size, job.size))
    loader = Loader(
        str(job.own / "photos.beton"),
        batch_size=job.batch,
        num_workers=job.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        seed=job.seed,
        custom_fields={"image": _OwnBytes},
        pipelines={"image": [crop, RandomHorizontalFlip(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    while True:
        for images, labels in loader:
            yield images, labels.flatten()
