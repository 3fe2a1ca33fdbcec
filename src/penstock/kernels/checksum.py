"""A checksum for data at rest: XXH64, several gigabytes a second, so that checking costs little beside reading."""

from __future__ import annotations

from ctypes import c_int64, c_uint64, c_void_p

import numpy as np

from penstock.kernels.native import declare, lib

__all__ = ["checksum"]

declare("ps_checksum", c_uint64, c_void_p, c_int64, c_uint64)


def checksum(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The 64-bit checksum of the data; another one for every seed."""
    if isinstance(data, bytes):
        place: bytes | int = data
    else:
        view = np.frombuffer(data, np.uint8)
        place = view.ctypes.data
    found: int = lib.ps_checksum(place, len(data), seed)
    return found
