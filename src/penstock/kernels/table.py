"""How samples travel to a GPU lane: one row of plain numbers each, made on the host, read by the kernels.

A tiny-batch is a table of int32 [n, COLUMNS] and, where pixels change colour or place after the cut, steps of float64
[n, layers, FLAT] as in `pixels.py` (code, parameters, zeros; code -1 leaves the image as it is). Everything that chance
or the image's header decides stands in them; a kernel only applies. Imports nothing, so that any process can.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["COLUMNS", "Column", "Kind"]


class Kind(IntEnum):
    """How the pixels of a decoded image lie in memory."""

    RGB = 0
    """one plane, three bytes a pixel"""
    YCC = 1
    """three planes; the second and third (Cb, Cr) subsampled by SUB_X and SUB_Y"""
    GRAY = 2
    """one plane, one byte a pixel"""


class Column(IntEnum):
    """The columns of the table. Offsets and pitches are in bytes; offsets count from the start of the workspace."""

    DATA = 0
    """where the encoded bytes begin, from the start of the staged data"""
    LENGTH = 1
    """how many encoded bytes"""
    KIND = 2
    WIDTH = 3
    """of the stored image, before EXIF turns it"""
    HEIGHT = 4
    SUB_X = 5
    """horizontal subsampling of chroma: 1, 2 or 4"""
    SUB_Y = 6
    ORIENTATION = 7
    """EXIF's 1 to 8; the box is in pixels of the upright image"""
    PLANE0 = 8
    PLANE1 = 9
    PLANE2 = 10
    PITCH0 = 11
    PITCH1 = 12
    """of both chroma planes"""
    LEFT = 13
    """the box that is cut out: left, top, right, bottom"""
    TOP = 14
    RIGHT = 15
    BOTTOM = 16
    RESIZED_HEIGHT = 17
    """what the box is resized to"""
    RESIZED_WIDTH = 18
    WINDOW_LEFT = 19
    """the part of the resized box that is kept begins here; its size is that of the output"""
    WINDOW_TOP = 20
    FLIP = 21
    """1 mirrors left and right, after all else"""
    ROW = 22
    """of the batch, where the sample goes"""


COLUMNS = 24
"""Numbers of a row: those named and two spare ones, for alignment."""
