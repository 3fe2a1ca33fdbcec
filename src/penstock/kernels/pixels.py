"""Colour and geometry over HWC uint8 images on the CPU: a chain of steps in one native call.

    steps = ((Op.SOLARIZE, (128.0,)), (Op.BRIGHTNESS, (1.27,)))
    image = apply(image, steps)

A step is plain numbers, decided beforehand, so that every lane can apply the same ones. On equal steps the bytes equal
those of Pillow, which torchvision's transforms use for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native import declare, lib

__all__ = ["FLAT", "Op", "Step", "apply", "normalize"]


class Op(IntEnum):
    """What a step does; its parameters follow the colon. The codes index the function table in `native/pixels.c`."""

    BRIGHTNESS = 0
    """factor: 0 is black, 1 the image"""
    CONTRAST = 1
    """factor: 0 is the mean grey, 1 the image"""
    SATURATION = 2
    """factor: 0 is greyscale, 1 the image"""
    HUE = 3
    """shift: 0 to 255, of a full turn of 256"""
    SHARPNESS = 4
    """factor: 0 is smoothed, 1 the image"""
    POSTERIZE = 5
    """bits: how many of each value's high bits stay"""
    SOLARIZE = 6
    """threshold: values from here on are inverted"""
    AUTOCONTRAST = 7
    EQUALIZE = 8
    INVERT = 9
    AFFINE = 10
    """six numbers of the matrix from output to input pixels, row by row; three of the fill. Nearest pixel"""
    AFFINE_BILINEAR = 11
    AFFINE_BICUBIC = 12
    ERASE = 13
    """top, left, bottom, right (the last two exclusive); three of the fill"""


Step = tuple[Op, tuple[float, ...]]

FLAT = 10
"""Numbers of a step in memory: its code, then its parameters, then zeros."""

declare("ps_augment", c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32)
declare("ps_normalize", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)

_ZEROS = (0.0,) * (FLAT - 1)
_FAULTS = {-1: ValueError, -2: MemoryError, -3: ValueError}


def _checked(image: NDArray[np.uint8]) -> tuple[int, int, int]:
    if image.ndim != 3 or image.shape[2] not in (1, 3) or image.dtype != np.uint8 or image.size == 0:
        raise ValueError(
            f"expected a uint8 image of height, width and 1 or 3 channels, found {image.dtype} of shape {image.shape}"
        )
    height, width, channels = image.shape
    return height, width, channels


def apply(image: NDArray[np.uint8], steps: Sequence[Step]) -> NDArray[np.uint8]:
    """The image after the steps, a new array; without steps the image itself."""
    if not steps:
        return image
    height, width, channels = _checked(image)
    image = np.ascontiguousarray(image)
    out = np.empty_like(image)
    flat: list[float] = []
    for op, parameters in steps:
        flat += (op, *parameters, *_ZEROS[len(parameters) :])
    numbers = (c_double * len(flat))(*flat)
    code = lib.ps_augment(image.ctypes.data, out.ctypes.data, height, width, channels, numbers, len(steps))
    if code:
        raise _FAULTS[code](
            f"cannot apply {steps!r} to an image of {height} x {width} x {channels} (native code {code})"
        )
    return out


def normalize(image: NDArray[np.uint8], scale: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """`image * scale + bias` per channel, in float32."""
    height, width, channels = _checked(image)
    if scale.shape != (channels,) or bias.shape != (channels,):
        raise ValueError(f"the image has {channels} channels, scale {scale.shape} and bias {bias.shape}")
    image = np.ascontiguousarray(image)
    scale, bias = np.ascontiguousarray(scale, np.float32), np.ascontiguousarray(bias, np.float32)
    out = np.empty(image.shape, np.float32)
    lib.ps_normalize(image.ctypes.data, out.ctypes.data, height * width, channels, scale.ctypes.data, bias.ctypes.data)
    return out
