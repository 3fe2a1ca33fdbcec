"""What the augmentations share: images changed by steps, and the arguments of those that move pixels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GraphError
from penstock.graph import Spec, Units
from penstock.image import ImageOperator, Pixels
from penstock.kernels import pixels as kernel
from penstock.kernels.pixels import Op, Step

__all__ = ["Fill", "Interpolation", "MovingOperator", "StepOperator", "colour", "number", "whole"]

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Fill = float | tuple[float, ...] | None
"""The colour of what comes from outside the image, 0 to 255: for all channels, for each of three, or None for black."""

_SAMPLERS = {"nearest": Op.AFFINE, "bilinear": Op.AFFINE_BILINEAR, "bicubic": Op.AFFINE_BICUBIC}


def whole(operator: str, argument: str, value: object, least: int) -> None:
    """Raises GraphError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GraphError(f"{operator}: {argument} must be a whole number of at least {least}, not {value!r}")


def number(value: object) -> bool:
    """A finite int or float (bool is neither)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def colour(operator: str, value: object) -> Fill:
    """A fill as given, with lists made tuples; GraphError when it is none."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    good = all(number(v) and 0 <= v <= 255 for v in values) and len(values) in (1, 3)
    if value is not None and not good:
        raise GraphError(f"{operator}: fill must be a number from 0 to 255, or three, not {value!r}")
    return values if isinstance(value, Sequence) else value  # type: ignore[return-value]


def rgb(fill: Fill) -> tuple[float, float, float]:
    """A fill as three whole levels, rounded down as torchvision does for images."""
    values = fill if isinstance(fill, tuple) else (fill or 0,)
    red, green, blue = values if len(values) == 3 else values * 3
    return float(int(red)), float(int(green)), float(int(blue))


@dataclass(frozen=True)
class StepOperator(ImageOperator):
    """An operator whose decision is a tuple of steps."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """The most steps that are decided for one image."""

    @abstractmethod
    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """The steps for one image of this size."""

    def check(self, spec: Spec) -> Spec:
        """Needs decoded uint8 pixels of 1 or 3 channels."""
        after = super().check(spec)
        shape = spec["image"].shape
        if shape is not None and shape[-1] not in (1, 3, None):
            raise GraphError(f"{self.name} works on images of 1 or 3 channels, not {shape[-1]}")
        return after

    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        """The image after the steps."""
        return kernel.apply(image, decision)


@dataclass(frozen=True, kw_only=True)
class MovingOperator(StepOperator):
    """Steps among which are shear, translation and rotation. Boxes would not move along: with them it is an error."""

    interpolation: Interpolation = "nearest"
    fill: Fill = None

    def __post_init__(self) -> None:
        if self.interpolation not in _SAMPLERS:
            raise GraphError(
                f"{self.name}: interpolation must be one of {', '.join(_SAMPLERS)}, not {self.interpolation!r}"
            )
        object.__setattr__(self, "fill", colour(self.name, self.fill))

    @property
    def sampler(self) -> Op:
        """The affine step with this interpolation."""
        return _SAMPLERS[self.interpolation]

    def check(self, spec: Spec) -> Spec:
        """Needs decoded uint8 pixels, and no boxes."""
        if "boxes" in spec:
            raise GraphError(f"{self.name} moves pixels and cannot move boxes along; use color_jitter, flip or crops")
        return super().check(spec)

    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        """The image after the steps."""
        if image.shape[-1] == 1 and len(set(rgb(self.fill))) > 1:
            raise ValueError(f"fill {self.fill!r} has three levels, the image one channel; give one number")
        return super().pixels(image, decision)

    def boxes(self, boxes: NDArray[np.float32], decision: Any, height: int, width: int) -> NoReturn:
        """Always an error."""
        raise ValueError(f"{self.name} moves pixels and cannot move boxes along; use color_jitter, flip or crops")
