"""SPDL: threads that demux, decode, crop and scale through FFmpeg's filters, without the interpreter lock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import spdl.io
from spdl.pipeline import PipelineBuilder
from torch import Tensor

from benchmarks.contenders import Job
from benchmarks.contenders.opencv_image import crop_box

NOTE = "FFmpeg scales from YCbCr, its bilinear filter widened where it shrinks"
AUGMENTS = ("default",)
WORKERS = (0, 1)


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    files = job.files()
    order = random.Random(job.seed)

    def source() -> Iterator[list[tuple[str, int]]]:
        while True:
            order.shuffle(files)
            for start in range(0, len(files), job.batch):
                yield files[start : start + job.batch]

    def load(batch: list[tuple[str, int]]) -> tuple[Tensor, list[int]]:
        rng = np.random.default_rng()
        frames = [_frame(path, job.size, rng) for path, _ in batch]
        return spdl.io.to_torch(spdl.io.convert_frames(frames)), [label for _, label in batch]

    pipeline = (
        PipelineBuilder()
        .add_source(source())
        .pipe(load, concurrency=job.workers, output_order="completion")
        .add_sink(4)
        .build(num_threads=job.workers)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _frame(path: str, size: int, rng: np.random.Generator) -> Any:
    packets = spdl.io.demux_image(path)
    top, left, h, w = crop_box(rng, packets.height, packets.width)
    flip = ",hflip" if rng.random() < 0.5 else ""
    steps = f"crop={w}:{h}:{left}:{top}:exact=1,scale={size}:{size}:flags=bilinear,format=pix_fmts=rgb24{flip}"
    return spdl.io.decode_packets(packets, filter_desc=steps)
