"""Antialiased resizing of uint8 images, bit for bit as Pillow resizes them; see native/resample.c."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from penstock.kernels.native import declare, lib

__all__ = ["FILTERS", "Window", "address", "resize"]

FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
"""Pillow's names in lower case; the index is the native code's number."""

Window = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels of the output."""

declare(
    "ps_resize",
    c_int,
    *(c_void_p, c_int64, c_int32, c_int32, c_int32, c_float, c_float, c_float, c_float, c_int32, c_int32),
    *(c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int64),
)


# Pillow's order of passes changed with version 13; pixels follow the Pillow that is installed.
declare("ps_resize_tall_first", None, c_int32)
lib.ps_resize_tall_first(int(PIL.__version__.split(".")[0]) >= 13)


def address(array: NDArray[Any]) -> int:
    """Where an array's first element lies; half the price of `array.ctypes.data`."""
    place: int = array.__array_interface__["data"][0]
    return place


def target(out: NDArray[np.uint8] | None, height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """`out` if rows can be written into it, a fresh array if it is None."""
    if out is None:
        return np.empty((height, width, channels), np.uint8)
    rows_only = out.strides[1:] == (channels, 1) and out.flags.writeable
    if out.dtype != np.uint8 or out.shape != (height, width, channels) or not rows_only:
        raise ValueError(
            f"the output must be writable uint8 {(height, width, channels)} with whole rows, "
            f"not {out.dtype} {out.shape} with strides {out.strides}"
        )
    return out


def resize(
    image: NDArray[np.uint8],
    height: int,
    width: int,
    filter: str = "bilinear",
    *,
    box: tuple[float, float, float, float] | None = None,
    window: Window | None = None,
    flip: bool = False,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """The image (HWC with 1 or 3 channels), or its `box`, at another size, as `PIL.Image.resize` gives it.

    Of the result only `window` is computed and returned, mirrored if `flip`. Rows of `out` may be any distance apart.
    """
    if image.ndim != 3 or image.dtype != np.uint8 or image.shape[2] not in (1, 3):
        raise ValueError(f"resizing works on uint8 HWC images of 1 or 3 channels, not {image.dtype} {image.shape}")
    rows, columns, channels = image.shape
    if image.strides[1:] != (channels, 1) or image.strides[0] < columns * channels:
        image = np.ascontiguousarray(image)
    left, top, right, bottom = window or (0, 0, width, height)
    result = target(out, bottom - top, right - left, channels)
    problem = lib.ps_resize(
        *(address(image), image.strides[0], rows, columns, channels, *(box or (0, 0, columns, rows)), height, width),
        *(FILTERS.index(filter), left, top, right, bottom, flip, address(result), result.strides[0]),
    )
    if problem == -2:
        raise MemoryError(f"no memory to resize {image.shape} to {height} x {width}")
    if problem:
        raise ValueError(f"cannot resize {image.shape} to {height} x {width}, box {box}, window {window}")
    return result
