"""How samples travel to a GPU lane: one row of plain numbers each, made on the host, read by the kernels.

A tiny-batch is a table of int32 [n, COLUMNS] and, where pixels change colour or place after the cut, steps of float64
[n, layers, FLAT] as in `pixels.py` (code, parameters, zeros; code -1 leaves the image as it is). Everything that chance
or the image's header decides stands in them; a kernel only applies. Imports nothing, so that any process can.

    row[Column.WIDTH], row[Column.HEIGHT] = 500, 375  # and all the others down to FILTER
    end = place(row, start, 224, 224)  # the cut's own memory, from byte `start` of the area on
"""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import IntEnum

__all__ = ["COLUMNS", "Column", "Kind", "place"]


class Kind(IntEnum):
    """How the pixels of a decoded image lie in memory."""

    RGB = 0
    """one plane, three bytes a pixel"""
    YCC = 1
    """three planes; the second and third (Cb, Cr) subsampled by SUB_X and SUB_Y"""
    GRAY = 2
    """one plane, one byte a pixel"""


class Column(IntEnum):
    """The columns of the table. Offsets and pitches are in bytes; offsets count from the start of the area, the memory
    on the device in which the images of a tiny-batch are decoded and cut. It has less than 2 GiB."""

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
    FILTER = 23
    """how the box is resized: the index in `resample.FILTERS`"""
    DOWN_FIRST = 24
    """1: the vertical pass before the horizontal one"""
    PIXELS = 25
    """where the cut keeps the pixels of the box"""
    BETWEEN = 26
    """those between its two passes"""
    ACROSS = 27
    """the weights of its horizontal pass"""
    DOWN = 28
    """of its vertical pass"""


COLUMNS = 32
"""Numbers of a row: those named and three spare ones, for alignment."""

_LINE = 128
_REACH = (0, 1, 2, 2, 4, 6)
"""Twice the support of each of `resample.FILTERS`: how many pixels of the larger image a pixel is made from."""


def place(row: MutableSequence[int], start: int, height: int, width: int, tall_first: bool = True) -> int:
    """Decide the order of passes and the places of what the cut of a sample to height x width pixels needs, one after
    the other from `start` on; returns where they end.

    `tall_first` is Pillow's rule since version 13: the vertical pass comes first where the height shrinks much more
    than the width. The box must be set, what it is resized to, and the filter.
    """
    box_height, box_width = row[Column.BOTTOM] - row[Column.TOP], row[Column.RIGHT] - row[Column.LEFT]
    shrinks = box_height - row[Column.RESIZED_HEIGHT]
    down_first = tall_first and shrinks > 0 and shrinks > 2 * (box_width - row[Column.RESIZED_WIDTH])
    row[Column.DOWN_FIRST] = int(down_first)
    between = height * box_width if down_first else box_height * width
    sizes = (
        (Column.PIXELS, box_height * box_width),
        (Column.BETWEEN, between),
        (Column.ACROSS, width * (2 + _taps(row[Column.FILTER], box_width, row[Column.RESIZED_WIDTH]))),
        (Column.DOWN, height * (2 + _taps(row[Column.FILTER], box_height, row[Column.RESIZED_HEIGHT]))),
    )
    for column, words in sizes:
        row[column] = start
        start += -(-4 * words // _LINE) * _LINE
    return start


def _taps(filter: int, size: int, resized: int) -> int:
    """The most source pixels of which one resized pixel is made: what rounding may add to the filter's reach is one."""
    return _REACH[filter] * max(size, resized) // resized + 1
