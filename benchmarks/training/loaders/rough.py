"""The least that uses the GPU's JPEG engine: a thread around torchvision's `decode_jpeg`, and one batched crop.

It shows what is there for the taking, not what is wanted: bilinear without antialiasing, no RandAugment. No settings.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop

from benchmarks.training.loaders import Batches, Job
from benchmarks.training.loaders.common import normalised

NOTE = "not antialiased, never RandAugment"
KINDS = ("image",)

AHEAD = 2
"""Batches that wait to be taken."""
AREA, RATIO = [0.08, 1.0], [3 / 4, 4 / 3]


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    ready: queue.Queue[_Ready] = queue.Queue(AHEAD)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(job, ready, stop), daemon=True)
    thread.start()
    try:
        while True:
            yield _taken(ready.get())
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                ready.get_nowait()
        thread.join()


class _Ready:
    """A batch, and when it will be there; or why there is none."""

    def __init__(self, images: Tensor | None, labels: Tensor | None, error: BaseException | None = None) -> None:
        self.tensors, self.error = (images, labels), error
        self.event = torch.cuda.Event() if images is not None and images.is_cuda else None
        if self.event is not None:
            self.event.record()


def _taken(batch: _Ready) -> tuple[Tensor, Tensor]:
    if batch.error is not None:
        raise batch.error
    images, labels = batch.tensors
    assert images is not None
    assert labels is not None
    if batch.event is not None:
        stream = torch.cuda.current_stream()
        stream.wait_event(batch.event)
        images.record_stream(stream)
        labels.record_stream(stream)
    return images, labels


def _run(job: Job, ready: queue.Queue[_Ready], stop: threading.Event) -> None:
    try:
        stream = torch.cuda.Stream() if job.device == "cuda" else None
        with torch.cuda.stream(stream):
            for batch in _prepared(job):
                if not _put(ready, batch, stop):
                    return
    except BaseException as error:  # it is raised again where batches are taken
        _put(ready, _Ready(None, None, error), stop)


def _put(ready: queue.Queue[_Ready], batch: _Ready, stop: threading.Event) -> bool:
    while not stop.is_set():
        with contextlib.suppress(queue.Full):
            ready.put(batch, timeout=0.1)
            return True
    return False


def _prepared(job: Job) -> Iterator[_Ready]:
    paths, labels = job.files()
    order = list(range(len(paths)))
    rng = np.random.default_rng(job.seed)
    chosen: list[int] = []
    while True:
        random.Random(int(rng.integers(2**32))).shuffle(order)
        chosen += order
        while len(chosen) >= job.batch:
            now, chosen = chosen[: job.batch], chosen[job.batch :]
            encoded = [torch.from_numpy(np.fromfile(paths[index], np.uint8)) for index in now]
            images = decode_jpeg(encoded, mode=ImageReadMode.RGB, device=job.device)
            tags = torch.tensor([labels[index] for index in now]).to(job.device, non_blocking=True)
            yield _Ready(normalised(_cropped(images, job.size, rng)), tags)


def _cropped(images: list[Tensor], size: int, rng: np.random.Generator) -> Tensor:
    """Random resized crops, half of them mirrored, of CHW images: all in a few launches, by four gathers."""
    flat = torch.cat([image.reshape(-1) for image in images])
    sizes = np.array([image.shape[1:] for image in images])
    boxes = np.array([RandomResizedCrop.get_params(image, AREA, RATIO) for image in images])
    first = np.concatenate([[0], np.cumsum(3 * sizes.prod(1))[:-1]])
    mirrored = rng.random(len(images)) < 0.5
    columns = np.column_stack([first, sizes, boxes, mirrored]).astype(np.float64)
    table = torch.from_numpy(columns).to(flat.device, non_blocking=True)
    start, height, width, top, left, h, w, mirror = (column[:, None] for column in table.unbind(1))
    unit = (torch.arange(size, device=flat.device)[None] + 0.5) / size
    y, y0, y1 = _between(top + unit * h - 0.5, height)
    x, x0, x1 = _between(left + torch.where(mirror > 0, 1 - unit, unit) * w - 0.5, width)
    corners = [flat[_places(start, height, width, row, column)].float() for row in (y0, y1) for column in (x0, x1)]
    y, x = y[:, None, :, None], x[:, None, None, :]
    over, under = (left + (right - left) * x for left, right in (corners[:2], corners[2:]))
    return (over + (under - over) * y).round_().to(torch.uint8)


def _between(place: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far from one pixel to the next, and the two."""
    place = torch.minimum(place.clamp_min(0), length - 1)
    low = place.floor()
    return (place - low).float(), low, torch.minimum(low + 1, length - 1)


def _places(start: Tensor, height: Tensor, width: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """[n, 3, size, size]: where in the flat pixels each one stands."""
    plane = torch.arange(3, device=start.device)[None, :] * height * width + start
    return (plane[:, :, None, None] + (row * width)[:, None, :, None] + column[:, None, None, :]).long()
