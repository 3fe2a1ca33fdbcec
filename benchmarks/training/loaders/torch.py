"""torch's DataLoader over files: Pillow decodes, torchvision transforms, pinned memory, persistent workers.

Settings: "v2" (the default) or "v1", torchvision's transforms.
"""

from __future__ import annotations

import importlib
import itertools
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.training.data import FILE_RATE
from benchmarks.training.loaders import Batches, Job
from benchmarks.training.loaders.common import LENGTH, RATE, normalised

NOTE = ""
KINDS = ("image", "audio")

TRANSFORMS = {"": "torchvision.transforms.v2", "v1": "torchvision.transforms", "v2": "torchvision.transforms.v2"}


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, job: Job, setting: str) -> None:
        self.paths, self.labels = job.files()
        kit: Any = importlib.import_module(TRANSFORMS[setting])
        steps = [kit.RandomResizedCrop(job.size, antialias=True), kit.RandomHorizontalFlip()]
        steps += [kit.RandAugment()] if job.augment == "rand" else []
        self.transform = kit.Compose([*steps, kit.PILToTensor()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with open(self.paths[index], "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), self.labels[index]


class _Waveforms(Dataset[tuple[Tensor, int]]):
    def __init__(self, job: Job) -> None:
        from torchaudio.transforms import Resample

        self.paths, self.labels = job.files()
        self.resample = Resample(FILE_RATE, RATE)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with wave.open(self.paths[index]) as file:
            levels = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        sound = self.resample(torch.from_numpy(levels.astype(np.float32) / 32768)[None])
        start = int(torch.randint(sound.shape[1] - LENGTH + 1, ()))
        return sound[:, start : start + LENGTH], self.labels[index]


class _Endless(Sampler[int]):
    """Epoch after epoch without the pause that a DataLoader makes between two: a large data set seldom has one."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(torch.randperm(self.samples).tolist() for _ in itertools.repeat(None))


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    dataset: Dataset[tuple[Tensor, int]] = _Images(job, setting) if job.kind == "image" else _Waveforms(job)
    torch.manual_seed(job.seed)
    loader = DataLoader(
        dataset,
        batch_size=job.batch,
        sampler=_Endless(len(dataset)),  # type: ignore[arg-type]
        num_workers=job.cores,
        persistent_workers=True,
        pin_memory=job.device == "cuda",
    )
    for inputs, labels in loader:
        inputs, labels = (tensor.to(job.device, non_blocking=True) for tensor in (inputs, labels))
        yield normalised(inputs) if job.kind == "image" else inputs, labels
