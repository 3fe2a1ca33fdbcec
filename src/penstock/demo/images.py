"""The demonstration's data set: photographs of nothing, one folder per class, the same on every machine.

A picture shows one shape on a coarse texture. The class is the shape; its colour leans towards the class, its place,
size, angle and the texture are chance. So a small network learns it within an epoch or two, but not from one pixel.
"""

from __future__ import annotations

import colorsys
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

__all__ = ["CLASSES", "generate", "picture", "place"]

CLASSES = ("cross", "disc", "ring", "square", "star", "triangle")
SIZES = ((500, 375), (375, 500), (480, 360), (640, 480), (400, 400))
"""Width and height, as photographs of the usual data sets have them."""
_VERSION = 1
"""Stands in the folder's name; another number when pictures would differ."""

Point = tuple[float, float]


def place(root: Path, per_class: int) -> Path:
    """Where `generate` puts the pictures."""
    return root / f"penstock-demo-{_VERSION}-{per_class}"


def generate(root: Path, per_class: int, done: Callable[[int], None] = lambda pictures: None) -> Path:
    """`root/penstock-demo-.../{train,val}/CLASS/NNNN.jpg`; one picture in ten is for validation.

    A folder that is there is used again: it appears only when it is complete. `done` hears of every picture.
    """
    target = place(root, per_class)
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".penstock-demo-", dir=root))
    try:
        _write(fresh, per_class, done)
        fresh.rename(target)
    except OSError:
        if not target.is_dir():  # else another run was quicker
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _write(root: Path, per_class: int, done: Callable[[int], None]) -> None:
    def one(label: int, number: int) -> None:
        part = "val" if number % 10 == 9 else "train"
        path = root / part / CLASSES[label] / f"{number:04}.jpg"
        picture(label, number).save(path, quality=90)

    for part in ("train", "val"):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
    root.chmod(0o755)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow lets go of the interpreter lock while it encodes
        jobs = [pool.submit(one, label, number) for label in range(len(CLASSES)) for number in range(per_class)]
        for job in jobs:
            job.result()
            done(1)


def picture(label: int, number: int) -> Image.Image:
    """Picture `number` of a class."""
    rng = np.random.default_rng((_VERSION, label, number))
    width, height = SIZES[rng.integers(len(SIZES))]
    radius = min(width, height) * rng.uniform(0.22, 0.4)
    centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
    image = _texture(rng, width, height)
    mask = Image.new("L", image.size)
    _SHAPES[CLASSES[label]](ImageDraw.Draw(mask), centre, radius, rng.uniform(0, math.tau))
    image.paste(_colour(rng, label), mask=mask)
    return image


def _texture(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Noise of three scales over one another, about as hard to compress as a photograph."""
    image = Image.new("RGB", (width, height), tuple(rng.integers(40, 216, 3).tolist()))
    for cells, share in ((6, 0.5), (40, 0.3), (160, 0.2)):
        noise = rng.integers(0, 256, (cells * height // width, cells, 3), dtype=np.uint8)
        layer = Image.fromarray(noise).resize(image.size, Image.Resampling.BILINEAR)
        image = Image.blend(image, layer, share)
    return image


def _colour(rng: np.random.Generator, label: int) -> tuple[int, ...]:
    """Of any lightness; of a hue that is likely, not certain, for the class."""
    hue = (label / len(CLASSES) + rng.normal(0, 0.07)) % 1.0
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, rng.uniform(0.5, 1), rng.uniform(0.4, 1)))


def _corners(centre: Point, angle: float, *radii: float) -> list[Point]:
    """A polygon about a centre, its corners at these distances, evenly turned."""
    turns = [angle + math.tau * k / len(radii) for k in range(len(radii))]
    return [(centre[0] + r * math.cos(t), centre[1] + r * math.sin(t)) for r, t in zip(radii, turns, strict=True)]


def _disc(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    draw.circle(centre, radius * 0.9, fill=_OPAQUE)


def _ring(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    draw.circle(centre, radius, outline=_OPAQUE, width=round(radius * 0.35))


def _square(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    draw.polygon(_corners(centre, angle, *[radius] * 4), fill=_OPAQUE)


def _triangle(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    draw.polygon(_corners(centre, angle, *[radius] * 3), fill=_OPAQUE)


def _star(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    draw.polygon(_corners(centre, angle, *[radius, radius * 0.4] * 5), fill=_OPAQUE)


def _cross(draw: ImageDraw.ImageDraw, centre: Point, radius: float, angle: float) -> None:
    for turn in (0.0, math.pi / 2):
        ends = _corners(centre, angle + turn, radius, radius)
        draw.line(ends, fill=_OPAQUE, width=round(radius * 0.4))


_OPAQUE = 220
"""Some of the texture shines through."""
_SHAPES = {"cross": _cross, "disc": _disc, "ring": _ring, "square": _square, "star": _star, "triangle": _triangle}
