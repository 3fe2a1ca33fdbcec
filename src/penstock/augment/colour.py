"""Operators that leave pixels where they are: ColorJitter, Cutout, Normalize."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.augment.base import Fill, StepOperator, colour, number, rgb, whole
from penstock.errors import GraphError
from penstock.graph import Spec, Units
from penstock.image import ImageOperator, Pixels
from penstock.kernels import pixels as kernel
from penstock.kernels.pixels import Op, Step

__all__ = ["ColorJitter", "Cutout", "Normalize"]

Range = float | tuple[float, float]
_JITTERS = {"brightness": Op.BRIGHTNESS, "contrast": Op.CONTRAST, "saturation": Op.SATURATION, "hue": Op.HUE}
_ORDERS = tuple(permutations(range(len(_JITTERS))))


@dataclass(frozen=True)
class ColorJitter(StepOperator):
    """Brightness, contrast, saturation and hue changed by random factors, in random order.

    A number x stands for factors from max(0, 1 - x) to 1 + x, for hue from -x to x turns; a pair states the range.
    """

    brightness: Range = 0.0
    contrast: Range = 0.0
    saturation: Range = 0.0
    hue: Range = 0.0

    name = "color_jitter"
    units = 5  # the order, and one factor each
    layers = len(_JITTERS)

    def __post_init__(self) -> None:
        for argument in _JITTERS:
            value = getattr(self, argument)
            object.__setattr__(self, argument, tuple(value) if isinstance(value, Sequence) else value)
            self._range(argument)

    def _range(self, argument: str) -> tuple[float, float]:
        value = getattr(self, argument)
        center, least, most = (0.0, -0.5, 0.5) if argument == "hue" else (1.0, 0.0, math.inf)
        if number(value) and value >= 0:
            pair = (center - value, center + value)
            pair = pair if argument == "hue" else (max(0.0, pair[0]), pair[1])
        elif isinstance(value, tuple) and len(value) == 2 and all(map(number, value)):
            pair = value
        else:
            raise GraphError(
                f"{self.name}: {argument} must be a number of at least 0, or a pair of them, not {value!r}"
            )
        if not least <= pair[0] <= pair[1] <= most:
            raise GraphError(f"{self.name}: {argument} must lie in [{least}, {most}], low before high; it is {pair}")
        return pair

    @cached_property
    def _factors(self) -> tuple[tuple[Op, float, float] | None, ...]:
        """Operator, least and greatest factor; None where nothing would change."""
        found = []
        for argument, op in _JITTERS.items():
            low, high = self._range(argument)
            still = low == high == (0.0 if op is Op.HUE else 1.0)
            found.append(None if still else (op, low, high))
        return tuple(found)

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """Up to four steps."""
        steps = []
        for index in _ORDERS[int(units[0] * len(_ORDERS))]:
            factor = self._factors[index]
            if factor is None:
                continue
            op, low, high = factor
            value = low + (high - low) * units[1 + index]
            steps.append((op, (float(int(value * 255) & 255) if op is Op.HUE else value,)))
        return tuple(steps)


@dataclass(frozen=True)
class Cutout(StepOperator):
    """`n` squares of `length` pixels, centred anywhere and clipped at the border, are overwritten (DeVries, 2017)."""

    length: int
    n: int = 1
    fill: Fill = 0

    name = "cutout"

    def __post_init__(self) -> None:
        whole(self.name, "length", self.length, 1)
        whole(self.name, "n", self.n, 1)
        object.__setattr__(self, "fill", colour(self.name, self.fill))

    @property
    def units(self) -> int:
        """Row and column of each centre."""
        return 2 * self.n

    @property
    def layers(self) -> int:
        return self.n

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """n steps."""
        steps = []
        for k in range(self.n):
            top = int(units[2 * k] * height) - self.length // 2
            left = int(units[2 * k + 1] * width) - self.length // 2
            box = (max(0, top), max(0, left), min(height, top + self.length), min(width, left + self.length))
            steps.append((Op.ERASE, (*map(float, box), *rgb(self.fill))))
        return tuple(steps)


@dataclass(frozen=True)
class Normalize(ImageOperator):
    """(image / 255 - mean) / std per channel, as float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    name = "normalize"

    def __post_init__(self) -> None:
        for argument in ("mean", "std"):
            value = getattr(self, argument)
            values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
            if len(values) not in (1, 3) or not all(map(number, values)):
                raise GraphError(f"{self.name}: {argument} must be one number per channel (1 or 3), not {value!r}")
            object.__setattr__(self, argument, tuple(map(float, values)))
        if len(self.mean) != len(self.std):
            raise GraphError(
                f"{self.name}: mean has {len(self.mean)} numbers, std {len(self.std)}; they must be as many"
            )
        if min(self.std) <= 0:
            raise GraphError(f"{self.name}: std must be greater than 0, not {self.std}")

    def check(self, spec: Spec) -> Spec:
        """Needs decoded uint8 pixels of as many channels; they become float32."""
        after = super().check(spec)
        image = after["image"]
        channels = None if image.shape is None else image.shape[-1]
        if channels not in (None, len(self.mean)):
            raise GraphError(f"{self.name}: mean and std have {len(self.mean)} numbers, the images {channels} channels")
        return after if image.kind == "any" else {**after, "image": replace(image, dtype="float32")}

    @cached_property
    def scale_and_bias(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Per channel, so that image * scale + bias is the outcome."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (1.0 / (255.0 * std)).astype(np.float32), (-mean / std).astype(np.float32)

    def decide(self, units: Units, height: int, width: int) -> None:
        """Nothing to decide."""

    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        """float32, one multiplication and one addition each: within 1e-6 of the formula for the usual mean and std."""
        return kernel.normalize(image, *self.scale_and_bias)
