"""nvJPEG on a GPU: on the GPU's JPEG engine, where there is one; see native/engine.c, and decoder.py for its use.

cuda.load()
load()
with cuda.device(0), Engine(0) as engine, Decoder(engine, batch=64) as decoder:
    ...
"""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p, create_string_buffer
from enum import IntEnum
from typing import NamedTuple, Self

from penstock.errors import LaneError, MissingExtraError
from penstock.kernels import cuda
from penstock.kernels.native import declare, lib

__all__ = ["Backend", "Counts", "Engine", "find", "load"]

_OLDEST = 12  # major CUDA version whose nvJPEG has all the functions
_NO_ENGINE = 7

declare("ps_engine_bind", c_int, c_char_p, c_char_p)
declare("ps_engine_open", c_int, c_int32, c_int32, c_uint32, c_int64, c_void_p, c_char_p)
declare("ps_engine_close", None, c_void_p)
declare("ps_engine_counts", None, c_void_p, c_void_p)
declare("ps_engine_supports", c_int, c_void_p, c_char_p, c_int64)


def load(path: str | None = None) -> None:
    """Take nvJPEG from where it lies, or from this path. Call after `cuda.load`; again does no harm."""
    place = path or find(cuda.version()[0])
    reason = create_string_buffer(cuda.REASON)
    if lib.ps_engine_bind(place.encode(), reason):
        raise LaneError(
            f"nvJPEG at {place} cannot be used: {reason.value.decode(errors='replace')}. "
            f"It must be of CUDA {_OLDEST} or newer: pip install --upgrade 'penstock[cuda]'"
        )


def find(newest: int) -> str:
    """The path of the newest nvJPEG for a driver of at most that major CUDA version."""
    for major in range(newest, _OLDEST - 1, -1):
        for folder in _folders(major):
            path = os.path.join(folder, f"libnvjpeg.so.{major}")
            if os.path.exists(path):
                return path
    remedy = "pip install 'penstock[cuda]' brings it (the package nvidia-nvjpeg)"
    if newest < 13:
        remedy = "This driver takes the one of CUDA 12: pip install nvidia-nvjpeg-cu12"
    raise MissingExtraError(
        f"decoding JPEGs on the GPU needs NVIDIA's nvJPEG, and no libnvjpeg.so.{newest} (or older, from {_OLDEST} on) "
        f"is among Python's packages or in the system's CUDA. {remedy}"
    )


def _folders(major: int) -> Iterator[str]:
    """Where libraries of that CUDA version may lie: Python's packages, then the system's."""
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations if package else None) or ():
        yield os.path.join(root, f"cu{major}", "lib")
        yield os.path.join(root, "nvjpeg", "lib")
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    yield from (os.path.join(os.environ[name], "lib64") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    yield os.path.join(sys.prefix, "lib")
    for pattern in ("/usr/local/cuda/lib64", f"/usr/local/cuda-{major}*/lib64", "/usr/lib64", "/usr/lib/*-linux-gnu"):
        yield from sorted(glob.glob(pattern), reverse=True)


class Backend(IntEnum):
    """Where nvJPEG decodes."""

    PROCESSORS = 2
    """the GPU's processors, which training wants too"""
    ENGINE = 3


class Counts(NamedTuple):
    """What an engine has taken of memory, and what it is."""

    allocations: int
    frees: int
    device_bytes: int
    pinned_bytes: int
    most_device_bytes: int
    major: int
    """of nvJPEG's version"""
    minor: int
    patch: int
    engines: int
    cores: int
    """in each engine"""


class Engine:
    """nvJPEG on one GPU. May be shared by threads that are within `cuda.device`."""

    def __init__(
        self, device: int, backend: Backend | None = None, *, flags: int = 0, memory_bytes: int = 1 << 30
    ) -> None:
        """Without a backend: the JPEG engine, or the processors where the GPU has none.

        `flags` are nvJPEG's. nvJPEG may take `memory_bytes` of the GPU for itself.
        """
        self.handle: int | None = None
        for choice in [backend] if backend else [Backend.ENGINE, Backend.PROCESSORS]:
            handle, reason = c_void_p(), create_string_buffer(cuda.REASON)
            problem = lib.ps_engine_open(device, choice, flags, memory_bytes, byref(handle), reason)
            if not problem:
                self.handle, self.backend = handle.value, choice
                return
            if problem != _NO_ENGINE:
                break
        missing = "it has no JPEG engine" if problem == _NO_ENGINE else reason.value.decode(errors="replace")
        raise LaneError(f"nvJPEG cannot decode on GPU {device}: {missing}")

    def counts(self) -> Counts:
        """Up to now."""
        numbers = (c_int64 * 10)()
        lib.ps_engine_counts(self.handle, numbers)
        return Counts(*numbers)

    def supports(self, data: bytes) -> bool:
        """Whether nvJPEG itself says, by the header, that it can decode this in a batch."""
        return bool(lib.ps_engine_supports(self.handle, data, len(data)))

    def close(self) -> None:
        """Let go of it. Decoders on it must be closed."""
        if self.handle:
            lib.ps_engine_close(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
