"""Loads the C library. Calls release the interpreter lock; this module imports neither numpy nor torch.

`lib` is the library with argument types declared. Buffers are passed as addresses (`array.ctypes.data`, or a ctypes
array); every function's contract stands above its definition in `native/*.c`.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p

__all__ = ["FOLDER", "declare", "lib", "order", "units"]

FOLDER = os.path.dirname(__file__)
"""Where the built libraries lie."""


def _load() -> ctypes.CDLL:
    base = ctypes.CDLL(os.path.join(FOLDER, "_native.so"))
    fast = os.path.join(FOLDER, "_native_avx2.so")
    if os.path.exists(fast) and base.ps_has_avx2():
        return ctypes.CDLL(fast)
    return base


lib = _load()


def declare(name: str, result: type | None, *arguments: type) -> None:
    """Gives a function of the library its C types."""
    function = getattr(lib, name)
    function.restype = result
    function.argtypes = list(arguments)


declare("ps_philox", None, POINTER(c_uint32), c_uint32, c_uint32)
declare("ps_units", None, c_uint64, c_uint32, c_uint32, c_void_p, c_int64, c_int32, c_void_p)
declare("ps_order", c_int32, c_uint64, c_uint32, c_int64, c_void_p, c_int64, c_void_p)


def order(seed: int, epoch: int, n: int, positions: list[int]) -> list[int]:
    """The ids at these positions of an epoch's order over n samples."""
    count = len(positions)
    ids = (c_int64 * count)()
    if lib.ps_order(seed & 0xFFFFFFFFFFFFFFFF, epoch, n, (c_int64 * count)(*positions), count, ids):
        raise ValueError(
            f"positions of an epoch over {n} samples are 0 to {n - 1}, not {min(positions)} to {max(positions)}"
        )
    return list(ids)


def units(seed: int, epoch: int, stream: int, positions: list[int], width: int) -> list[list[float]]:
    """`width` uniform numbers in [0, 1) for each position; a function of (seed, epoch, stream, position) alone."""
    count = len(positions)
    out = (c_double * (count * width))()
    lib.ps_units(seed & 0xFFFFFFFFFFFFFFFF, epoch, stream, (c_int64 * count)(*positions), count, width, out)
    flat = list(out)
    return [flat[i * width : (i + 1) * width] for i in range(count)]
