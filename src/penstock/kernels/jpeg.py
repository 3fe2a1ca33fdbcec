"""Decodes whole JPEG images or regions of them, with the very library that Pillow decodes with; see native/jpeg.c.

Pillow's wheels bring libjpeg-turbo. It is found through Pillow's own extension module, so pixels are Pillow's. Where
that is not possible (a libjpeg of another interface version), `PROBLEM` says why, and callers decode with Pillow.
"""

from __future__ import annotations

from ctypes import c_char_p, c_int, c_int32, c_int64, c_void_p, create_string_buffer
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import _imaging

from penstock.kernels.native import declare, lib
from penstock.kernels.resample import FILTERS, Window, address, target

__all__ = ["PROBLEM", "Box", "Encoded", "Header", "decode", "decode_resized", "header"]

Encoded = bytes | bytearray | memoryview
Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels of the stored image."""

_REASON = 200  # libjpeg's JMSG_LENGTH_MAX

declare("ps_jpeg_bind", c_int, c_char_p, c_char_p)
declare("ps_jpeg_header", None, c_void_p, c_int64, c_void_p)
declare("ps_jpeg_decode", c_int, c_void_p, c_int64, *(5 * [c_int32]), c_void_p, c_int64, c_char_p)
declare("ps_jpeg_resize", c_int, c_void_p, c_int64, *(13 * [c_int32]), c_void_p, c_int64, c_char_p)


class Header(NamedTuple):
    """What stands before the first scan. Sizes are those stored, before any rotation."""

    width: int
    height: int
    components: int
    orientation: int
    """Exif's 1 to 8, or 0 when Pillow should be asked."""


def _bind() -> str | None:
    reason = create_string_buffer(_REASON)
    if lib.ps_jpeg_bind(_imaging.__file__.encode(), reason):
        return reason.value.decode(errors="replace")
    return None


PROBLEM = _bind()
"""Why Pillow's JPEG library cannot be used directly; None when it can."""


def _bytes(data: Encoded) -> tuple[bytes | int, int, object]:
    """Something that ctypes passes as an address, the size, and what must stay alive meanwhile."""
    if isinstance(data, bytes):
        return data, len(data), data
    view = np.frombuffer(data, np.uint8)
    return address(view), view.size, view


def header(data: Encoded) -> Header | None:
    """The header, or None when the data is better given to Pillow.

    That is: anything but an 8-bit Huffman-coded JPEG of 1 or 3 components, one with unusual markers before its first
    scan, one without an end-of-image marker after it (most truncated files).
    """
    place, size, _alive = _bytes(data)
    found = (c_int32 * 5)()
    lib.ps_jpeg_header(place, size, found)
    plain, width, height, components, orientation = found
    return Header(width, height, components, orientation) if plain else None


def decode(data: Encoded, box: Box, channels: int = 3, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """A region as RGB (channels 3) or as Pillow's "L" (channels 1): the pixels that a full decode has there.

    Raises ValueError when the data up to the region's last row is corrupt; what follows is not looked at.
    """
    left, top, right, bottom = box
    result = target(out, bottom - top, right - left, channels)
    reason = create_string_buffer(_REASON)
    place, size, _alive = _bytes(data)
    code = lib.ps_jpeg_decode(place, size, *box, channels, address(result), result.strides[0], reason)
    return _checked(code, result, reason.value, f"box {box}")


def decode_resized(
    data: Encoded,
    box: Box,
    height: int,
    width: int,
    filter: str,
    window: Window,
    flip: bool,
    channels: int = 3,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """`decode` of the box, then `resample.resize` of that; only what the window needs is decoded."""
    result = target(out, window[3] - window[1], window[2] - window[0], channels)
    reason = create_string_buffer(_REASON)
    place, size, _alive = _bytes(data)
    code = lib.ps_jpeg_resize(
        *(place, size, *box, channels, height, width, FILTERS.index(filter), *window, flip),
        *(address(result), result.strides[0], reason),
    )
    return _checked(code, result, reason.value, f"box {box}, size {height} x {width}, window {window}")


def _checked(code: int, result: NDArray[np.uint8], reason: bytes, request: str) -> NDArray[np.uint8]:
    if code == -1:
        raise ValueError(f"corrupt JPEG: {reason.decode(errors='replace')}")
    if code == -2:
        raise MemoryError(f"no memory to decode a JPEG, {request}")
    if code:
        raise ValueError(f"senseless request to the JPEG decoder: {request}")
    return result
