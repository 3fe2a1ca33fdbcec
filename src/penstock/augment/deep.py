"""Deep AutoAugment (Zheng et al., ICLR 2022): layers of operators, one drawn from each by learned probabilities.

    policy = load_deep_policy("policy_DeepAA_imagenet_1.npz")    # as the authors publish them
    pipe.deep_auto_augment(policy)

The published policies are data files of the authors' repository and are not shipped. Ranges and operators are those of
its evaluation code. Two of its operators differ here, since an image keeps its size: RandResizeCrop enlarges its crop
bilinearly, and cutouts are cut on images of any size.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.augment.base import MovingOperator, number, rgb, whole
from penstock.augment.steps import Frame, step
from penstock.errors import GraphError
from penstock.graph import Units
from penstock.kernels.pixels import Op, Step

__all__ = ["DeepAutoAugment", "DeepPolicy", "load_deep_policy", "uniform_policy"]

DeepPolicy = tuple[tuple[tuple[str, float, float], ...], ...]
"""Per layer, per choice: the operator's name, its magnitude from 0 to 1 within its range, its probability."""

_GREY = (125.0, 123.0, 114.0)  # the authors fill crops and cutouts with this
_DRAWS = 5  # per layer: the choice, then at most four for its operator


@dataclass(frozen=True)
class DeepAutoAugment(MovingOperator):
    """One operator from each layer of a policy, in order."""

    policy: DeepPolicy

    name = "deep_auto_augment"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "policy", _checked(self.policy))

    @property
    def units(self) -> int:
        """Five for each layer."""
        return _DRAWS * len(self.policy)

    @property
    def layers(self) -> int:
        return len(self.policy)

    @cached_property
    def _bounds(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(accumulate(choice[2] for choice in layer)) for layer in self.policy)

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """At most one step per layer."""
        frame = Frame(height, width, self.sampler, rgb(self.fill))
        steps: list[Step | None] = []
        for k, (layer, bounds) in enumerate(zip(self.policy, self._bounds, strict=True)):
            name, level, _ = layer[bisect_right(bounds, units[_DRAWS * k] * bounds[-1])]
            steps.append(_OPERATORS[name](level, units[_DRAWS * k + 1 : _DRAWS * (k + 1)], frame))
        return tuple(one for one in steps if one is not None)


def uniform_policy(layers: int = 5) -> DeepPolicy:
    """Every operator with equal probability, at each of twelve magnitudes where it has one.

    An untrained policy, as good as a learned one for measuring speed. Leaves out what only suits large images."""
    whole("uniform_policy", "layers", layers, 1)
    fixed = [(name, 0.5, 1.0) for name in _WITHOUT if name not in ("RandCutout60", "RandResizeCrop_imagenet")]
    ranged = [(name, level / 12, 1 / 12) for name in _WITH_MAGNITUDE for level in range(13) if level != 6]
    return (tuple(fixed + ranged),) * layers


def load_deep_policy(path: str | os.PathLike[str]) -> DeepPolicy:
    """A policy from a file as the authors' search writes it (`policy_port/*.npz` of their repository)."""
    with np.load(path, allow_pickle=False) as data:
        missing = {"policy_probs", "l_mags", "ops", "mags", "op_names"} - set(data.files)
        if missing:
            raise GraphError(
                f"{os.fspath(path)} lacks {', '.join(sorted(missing))}; expected a Deep AutoAugment policy"
            )
        names = [str(name).split(":")[0] for name in data["op_names"]]
        ops, levels = data["ops"].reshape(-1), data["mags"].reshape(-1) / (int(data["l_mags"]) - 1)
        layers = data["policy_probs"]
    return tuple(
        tuple((names[op], float(level), float(chance)) for op, level, chance in zip(ops, levels, layer, strict=True))
        for layer in layers
    )


def _checked(policy: object) -> DeepPolicy:
    layers = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else ()
    if not layers or not all(isinstance(layer, Sequence) and layer for layer in layers):
        raise GraphError(
            "deep_auto_augment: policy must be layers of (operator, magnitude, probability); "
            f"load_deep_policy(path) reads a published one; found {policy!r}"
        )
    checked = tuple(tuple(_checked_choice(choice) for choice in layer) for layer in layers)
    if any(sum(chance for _, _, chance in layer) == 0 for layer in checked):
        raise GraphError("deep_auto_augment: the probabilities of a layer must not all be 0")
    return checked


def _checked_choice(choice: Any) -> tuple[str, float, float]:
    triple = isinstance(choice, Sequence) and len(choice) == 3
    if not (triple and number(choice[1]) and 0 <= choice[1] <= 1 and number(choice[2]) and choice[2] >= 0):
        raise GraphError(
            "deep_auto_augment: a choice is an operator, a magnitude from 0 to 1 and a probability of 0 or more, "
            f"not {choice!r}"
        )
    if choice[0] not in _OPERATORS:
        raise GraphError(f"deep_auto_augment: unknown operator {choice[0]!r}; there are {', '.join(_OPERATORS)}")
    return choice[0], float(choice[1]), float(choice[2])


# ---- the operators, at a level from 0 to 1 with up to four draws ----

_Operator = Callable[[float, Units, Frame], Step | None]


def _ranged(name: str, low: float, high: float, mirrored: bool = False) -> _Operator:
    """torchvision's operator `name` over the authors' range; `mirrored` takes either sign with equal chance."""

    def build(level: float, draws: Units, frame: Frame) -> Step | None:
        value = level * (high - low) + low
        return step(name, -value if mirrored and draws[0] > 0.5 else value, frame)

    return build


def _translated(horizontal: bool) -> _Operator:
    def build(level: float, draws: Units, frame: Frame) -> Step | None:
        value = (level * 0.9 - 0.45) * (-1.0 if draws[0] > 0.5 else 1.0)
        right, down = (value * frame.width, 0.0) if horizontal else (0.0, value * frame.height)
        return frame.sampler, (1.0, 0.0, right, 0.0, 1.0, down, *frame.fill)

    return build


def _flip(level: float, draws: Units, frame: Frame) -> Step | None:
    if draws[0] <= 0.5:
        return None
    return Op.AFFINE, (-1.0, 0.0, float(frame.width), 0.0, 1.0, 0.0, *frame.fill)


def _crop(level: float, draws: Units, frame: Frame) -> Step | None:
    """Shifted by up to four pixels each way."""
    right, down = (float(int(draw * 9) - 4) for draw in draws[:2])
    return Op.AFFINE, (1.0, 0.0, right, 0.0, 1.0, down, *_GREY)


def _cutout(size: float, draws: Units, frame: Frame) -> Step | None:
    """Both ends included, as Pillow draws rectangles."""
    y, x, half = draws[0] * frame.height, draws[1] * frame.width, size // 2
    top, left = (float(int(max(0.0, at - half))) for at in (y, x))
    bottom, right = min(frame.height, int(y + half) + 1), min(frame.width, int(x + half) + 1)
    return Op.ERASE, (top, left, float(bottom), float(right), *_GREY)


def _resized_crop(level: float, draws: Units, frame: Frame) -> Step | None:
    """One try, then the central crop, as the authors' code has it."""
    height, width = frame.height, frame.width
    area = height * width * (0.08 + 0.92 * draws[0])
    ratio = math.exp(math.log(3 / 4) + draws[1] * (math.log(4 / 3) - math.log(3 / 4)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
        top, left = int(draws[2] * (height - h + 1)), int(draws[3] * (width - w + 1))
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - h) // 2, (width - w) // 2
    return Op.AFFINE_BILINEAR, (w / width, 0.0, float(left), 0.0, h / height, float(top), *frame.fill)


_WITH_MAGNITUDE: dict[str, _Operator] = {
    "ShearX": _ranged("ShearX", -0.3, 0.3, mirrored=True),
    "ShearY": _ranged("ShearY", -0.3, 0.3, mirrored=True),
    "TranslateX": _translated(horizontal=True),
    "TranslateY": _translated(horizontal=False),
    "Rotate": _ranged("Rotate", -30.0, 30.0, mirrored=True),
    "Solarize": _ranged("Solarize", 0.0, 256.0),
    "Posterize": _ranged("Posterize", 4.0, 8.0),
    "Contrast": _ranged("Contrast", 0.1 - 1.0, 1.9 - 1.0),
    "Color": _ranged("Color", 0.1 - 1.0, 1.9 - 1.0),
    "Brightness": _ranged("Brightness", 0.1 - 1.0, 1.9 - 1.0),
    "Sharpness": _ranged("Sharpness", 0.1 - 1.0, 1.9 - 1.0),
    "Cutout": lambda level, draws, frame: _cutout(level * 0.2 * frame.width, draws, frame) if level > 0 else None,
}
_WITHOUT: dict[str, _Operator] = {
    "Identity": lambda level, draws, frame: None,
    "AutoContrast": _ranged("AutoContrast", 0.0, 1.0),
    "Invert": _ranged("Invert", 0.0, 1.0),
    "Equalize": _ranged("Equalize", 0.0, 1.0),
    "RandFlip": _flip,
    "RandCrop": _crop,
    "RandCutout": lambda level, draws, frame: _cutout(16.0, draws, frame),
    "RandCutout60": lambda level, draws, frame: _cutout(60.0, draws, frame),
    "RandResizeCrop_imagenet": _resized_crop,
}
_OPERATORS = {**_WITH_MAGNITUDE, **_WITHOUT}
