"""8-bit levels to floats through a table per channel: any arithmetic on single levels, exactly; see native/levels.c."""

from __future__ import annotations

from ctypes import c_int, c_int32, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native import declare, lib
from penstock.kernels.resample import address

__all__ = ["look_up"]

declare("ps_levels", c_int, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_int32, c_void_p)


def look_up(image: NDArray[np.uint8], table: NDArray[np.float32], planar: bool) -> NDArray[np.float32]:
    """`table[channel, level]` for every level of an HWC image of three channels; HWC, or CHW where `planar`."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"expected a uint8 image of height, width and 3 channels, not {image.dtype} {image.shape}")
    if table.shape != (3, 256) or table.dtype != np.float32 or not table.flags.c_contiguous:
        raise ValueError(f"expected a dense float32 table of 3 x 256 entries, not {table.dtype} {table.shape}")
    height, width, _ = image.shape
    if image.strides[1:] != (3, 1) or image.strides[0] < 3 * width:
        image = np.ascontiguousarray(image)
    out = np.empty((3, height, width) if planar else (height, width, 3), np.float32)
    stride = image.strides[0] if height > 1 else 3 * width  # numpy gives a single row any stride
    problem = lib.ps_levels(address(image), stride, height, width, address(table), planar, address(out))
    if problem:
        raise ValueError(f"cannot look up an image of shape {image.shape} with strides {image.strides}")
    return out
