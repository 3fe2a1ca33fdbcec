"""What a stager must know of a JPEG: may the GPU's JPEG engine have it, how large is it, is the file whole.

    facts = examine(data)
    if facts.refusal is None: ...  # stage data[: facts.length] for the engine
    else: ...                      # decode on the CPU, which also says what is wrong, if something is

The engine reports no damage in the coded data, so files are walked to their end here; see native/facts.c. What only a
decoder can see (changed bits that are still codes) goes unseen.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from typing import NamedTuple

import numpy as np

from penstock.kernels.native import declare, lib
from penstock.kernels.table import Kind

__all__ = ["REFUSALS", "Facts", "examine"]

declare("ps_jpeg_facts", None, c_void_p, c_int64, c_void_p)

REFUSALS = (
    None,
    "it is no plain JPEG: another format, CMYK, 12 bits, arithmetic coding, an odd marker, or cut off",
    "it is longer than 2 GiB",
    "it is not baseline: progressive, extended, or with unusual markers",
    "its chroma is subsampled otherwise than 4:4:4, 4:2:2, 4:4:0 or 4:2:0",
    "its colours are not YCbCr",
    "its tables are not a baseline JPEG's, or damaged",
    "it has several scans, or an odd one",
    "its data does not agree with its header",
)
"""Why the engine is not to have a file."""


class Facts(NamedTuple):
    """Sizes are those stored, before any rotation. With the first of the refusals all else is 0."""

    refusal: str | None
    width: int
    height: int
    components: int
    sub_x: int
    """chroma's subsampling across: 1 or 2"""
    sub_y: int
    orientation: int
    """Exif's 1 to 8, or 0 when Pillow should be asked"""
    length: int
    """bytes up to the end of the image; files may go on after it"""

    @property
    def kind(self) -> Kind:
        """How the engine's planes will lie."""
        return Kind.GRAY if self.components == 1 else Kind.YCC


def examine(data: bytes | bytearray | memoryview) -> Facts:
    """The facts of an encoded image, whatever it holds."""
    found = (c_int32 * 8)()
    if isinstance(data, bytes):
        lib.ps_jpeg_facts(data, len(data), found)
    else:
        view = np.frombuffer(data, np.uint8)
        lib.ps_jpeg_facts(view.ctypes.data, view.size, found)
    refusal, *sizes = found
    return Facts(REFUSALS[refusal], *sizes)
