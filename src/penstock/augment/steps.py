"""From torchvision's operator names and magnitudes to steps: ranges, bins, and the matrices of the geometric ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from penstock.kernels.pixels import Op, Step

__all__ = ["AUTO", "RAND", "TRIVIAL", "Frame", "Span", "magnitude", "step"]


class Span(NamedTuple):
    """The magnitudes of one operator: from the first bin to the last, either sign where `signed`.

    `of` scales the last by the image's size; `bits` rounds to whole bits.
    """

    first: float
    last: float
    signed: bool = False
    of: Literal["width", "height", None] = None
    bits: bool = False


class Frame(NamedTuple):
    """What the geometric steps need to know beyond their magnitude."""

    height: int
    width: int
    sampler: Op = Op.AFFINE
    fill: tuple[float, float, float] = (0.0, 0.0, 0.0)


Space = Mapping[str, Span | None]
"""Operators in torchvision's order, for the index that is drawn; None for those without magnitude."""


def _space(shear: float, shift: tuple[Span, Span], turn: float, strength: float, bits: float) -> dict[str, Span | None]:
    enhance = Span(0.0, strength, True)
    return {
        "Identity": None,
        "ShearX": Span(0.0, shear, True),
        "ShearY": Span(0.0, shear, True),
        "TranslateX": shift[0],
        "TranslateY": shift[1],
        "Rotate": Span(0.0, turn, True),
        "Brightness": enhance,
        "Color": enhance,
        "Contrast": enhance,
        "Sharpness": enhance,
        "Posterize": Span(8.0, bits, bits=True),
        "Solarize": Span(255.0, 0.0),
        "AutoContrast": None,
        "Equalize": None,
    }


_RELATIVE = (Span(0.0, 150.0 / 331.0, True, "width"), Span(0.0, 150.0 / 331.0, True, "height"))
_PIXELS = (Span(0.0, 32.0, True), Span(0.0, 32.0, True))

RAND: Space = _space(0.3, _RELATIVE, 30.0, 0.9, 4.0)
TRIVIAL: Space = _space(0.99, _PIXELS, 135.0, 0.99, 2.0)
AUTO: Space = {**{name: span for name, span in RAND.items() if name != "Identity"}, "Invert": None}


def _single(value: float) -> float:
    return float(np.float32(value))


def magnitude(span: Span | None, bin: int, bins: int, height: int, width: int) -> float:
    """The magnitude of a bin, to the bit what `torch.linspace` gives torchvision on a processor with fused operations:
    single precision, counted from the nearer end."""
    if span is None:
        return 0.0
    if span.bits:
        return span.first - round(_single(bin / ((bins - 1) / (span.first - span.last))))
    last = _single(span.last * {"width": width, "height": height, None: 1}[span.of])
    stride = _single((last - span.first) / (bins - 1))
    return _single(span.first + stride * bin if bin < bins // 2 else last - stride * (bins - 1 - bin))


def _shear_x(value: float, frame: Frame) -> tuple[float, ...]:
    return (1.0, math.tan(_angle(value)), 0.0, 0.0, 1.0, 0.0)


def _shear_y(value: float, frame: Frame) -> tuple[float, ...]:
    return (1.0, 0.0, 0.0, math.sin(_angle(value)) / math.cos(_angle(value)), 1.0, 0.0)


def _angle(value: float) -> float:
    """torchvision takes shears through degrees, which costs the last bit."""
    return math.radians(math.degrees(math.atan(value)))


def _translate_x(value: float, frame: Frame) -> tuple[float, ...]:
    return (1.0, 0.0, -float(int(value)), 0.0, 1.0, 0.0)


def _translate_y(value: float, frame: Frame) -> tuple[float, ...]:
    return (1.0, 0.0, 0.0, 0.0, 1.0, -float(int(value)))


def _rotate(value: float, frame: Frame) -> tuple[float, ...]:
    """As Pillow's `Image.rotate`, about the centre; the rounding makes right angles exact."""
    angle = -math.radians(value % 360.0)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = frame.width / 2, frame.height / 2
    right = cosine * -x + sine * -y + 0.0 + x
    down = round(-math.sin(angle), 15) * -x + cosine * -y + 0.0 + y
    return (cosine, sine, right, -sine, cosine, down)


_MATRICES = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Rotate": _rotate,
}
_FACTORS = {
    "Brightness": Op.BRIGHTNESS,
    "Color": Op.SATURATION,
    "Contrast": Op.CONTRAST,
    "Sharpness": Op.SHARPNESS,
}
_PLAIN = {"AutoContrast": Op.AUTOCONTRAST, "Equalize": Op.EQUALIZE, "Invert": Op.INVERT}


def step(name: str, value: float, frame: Frame) -> Step | None:
    """The step of an operator at a (signed) magnitude; None for Identity."""
    if name in _MATRICES:
        return frame.sampler, (*_MATRICES[name](value, frame), *frame.fill)
    if name in _FACTORS:
        return _FACTORS[name], (1.0 + value,)
    if name == "Posterize":
        return Op.POSTERIZE, (float(int(value)),)
    if name == "Solarize":
        return Op.SOLARIZE, (value,)
    return (_PLAIN[name], ()) if name in _PLAIN else None
