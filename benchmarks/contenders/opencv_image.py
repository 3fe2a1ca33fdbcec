"""What the contenders that use OpenCV share: decode, random resized crop, flip. Not a contender itself."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

__all__ = ["NOTE", "crop_box", "load"]

NOTE = "OpenCV has no antialiased bilinear filter: INTER_AREA where it shrinks"


def crop_box(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width as torchvision's RandomResizedCrop draws them."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def load(path: str, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One augmented image, HWC RGB."""
    with open(path, "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
    top, left, h, w = crop_box(rng, image.shape[0], image.shape[1])
    shrinks = h > size or w > size
    crop = image[top : top + h, left : left + w]
    out = cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    return np.asarray(cv2.flip(out, 1) if rng.random() < 0.5 else out, np.uint8)
