"""What Penstock is compared with: a map-style data set for torch's DataLoader, written as its users write them.

The crop is that of torchvision's RandomResizedCrop, which this machine may not have.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["PillowImages"]

Box = tuple[float, float, float, float]


class PillowImages(Dataset[tuple[Tensor, int]]):
    """Class folders; every image decoded, randomly cropped, resized to `side` squared and flipped by Pillow."""

    def __init__(self, root: Path, side: int, scale: tuple[float, float]) -> None:
        classes = sorted(path.name for path in root.iterdir())
        self._samples = [
            (path, label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())
        ]
        self._side = side
        self._scale = scale

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = _crop(image.width, image.height, self._scale)
        image = image.resize((self._side, self._side), Image.Resampling.BILINEAR, box=box)
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def _crop(width: int, height: int, scale: tuple[float, float]) -> Box:
    """A box of random area and shape that lies in the image; the middle if ten tries find none."""
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(*scale))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, ()))
            top = int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
