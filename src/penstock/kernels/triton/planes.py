"""Decoded planes to RGB, of each sample only the part of its box that the cut reads: chroma interpolated and colours
computed as libjpeg-turbo does it (jdsample.c, jdcolor.c), so that the same planes give the same pixels, bit for bit.

    convert(area, table, n, 224, 224)  # after `axes.weigh`, before `cut.cut`

The result stands upright, row upon row without gaps, one int32 per pixel: red in the low byte, then green, then blue.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.table import COLUMNS, Column, Kind
from penstock.kernels.triton.axes import axis_of

__all__ = ["TILE", "convert", "programs"]

TILE = (32, 16)
"""Columns and rows that a program of four warps makes at once. Columns stand first, for Triton's compiler gives a warp
the first axis where it cannot tell which of them is contiguous."""

_COLUMNS = tl.constexpr(COLUMNS)
_KIND, _ORIENTATION = tl.constexpr(Column.KIND.value), tl.constexpr(Column.ORIENTATION.value)
_WIDTH, _HEIGHT = tl.constexpr(Column.WIDTH.value), tl.constexpr(Column.HEIGHT.value)
_SUB_X, _SUB_Y = tl.constexpr(Column.SUB_X.value), tl.constexpr(Column.SUB_Y.value)
_PLANE0, _PLANE1, _PLANE2 = (tl.constexpr(c.value) for c in (Column.PLANE0, Column.PLANE1, Column.PLANE2))
_PITCH0, _PITCH1 = tl.constexpr(Column.PITCH0.value), tl.constexpr(Column.PITCH1.value)
_LEFT, _TOP, _PIXELS = (tl.constexpr(c.value) for c in (Column.LEFT, Column.TOP, Column.PIXELS))
_RGB, _YCC = tl.constexpr(Kind.RGB.value), tl.constexpr(Kind.YCC.value)


@triton.jit
def _clip(value: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(value, 0), 255)


@triton.jit
def _packed(red: tl.tensor, green: tl.tensor, blue: tl.tensor) -> tl.tensor:
    return red | (green << 8) | (blue << 16)


@triton.jit
def _neighbour(at: tl.tensor, sub: tl.tensor, size: tl.tensor, smooth: tl.tensor) -> tl.tuple:
    """The chroma sample that pixels lie in, and the one they lie next to; the same where nothing is interpolated."""
    near = at >> (sub >> 1)
    far = tl.minimum(tl.maximum(near + 2 * (at & 1) - 1, 0), size - 1)
    return near, tl.where(smooth, far, near)


@triton.jit
def _chroma(plane: tl.tensor, places: tl.tuple, bias: tl.tensor) -> tl.tensor:
    """Three quarters of the nearer and a quarter of the farther column, of both columns' rows likewise; less 128."""
    near_near, far_near, near_far, far_far = places
    near = 3 * tl.load(plane + near_near).to(tl.int32) + tl.load(plane + far_near)
    far = 3 * tl.load(plane + near_far).to(tl.int32) + tl.load(plane + far_far)
    return ((3 * near + far + bias) >> 4) - 128


@triton.jit
def _image(area: tl.tensor, row: tl.tensor) -> tl.tuple:
    """What the table says of the stored image; loaded once, because a tile's work is no more than a few loads."""
    kind, pitch, plane = tl.load(row + _KIND), tl.load(row + _PITCH0), area + tl.load(row + _PLANE0)
    pitch1, plane1, plane2 = tl.load(row + _PITCH1), area + tl.load(row + _PLANE1), area + tl.load(row + _PLANE2)
    sub_x, sub_y = tl.load(row + _SUB_X), tl.load(row + _SUB_Y)
    wide = (tl.load(row + _WIDTH) + sub_x - 1) >> (sub_x >> 1)  # 1, 2 and 4 are shifts by 0, 1 and 2
    high = (tl.load(row + _HEIGHT) + sub_y - 1) >> (sub_y >> 1)
    return kind, pitch, plane, pitch1, plane1, plane2, sub_x, sub_y, wide, high


@triton.jit
def _colours(image: tl.tuple, y: tl.tensor, r: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Pixels of brightness y at rows r and columns c of the stored image."""
    _, _, _, pitch, plane1, plane2, sub_x, sub_y, wide, high = image
    # libjpeg-turbo interpolates 2:1 only, along both axes or neither, and across only if there are three samples
    smooth_x = (sub_x == 2) & (sub_y <= 2) & (wide > 2)
    smooth_y = (sub_y == 2) & ((sub_x == 1) | smooth_x)
    near_c, far_c = _neighbour(c, sub_x, wide, smooth_x)
    near_r, far_r = _neighbour(r, sub_y, high, smooth_y)
    # its rounding, in sixteenths: 8 and 7 by turns where both are interpolated, else 4 and 8
    bias_c = tl.where(smooth_x, tl.where(smooth_y, 8 - (c & 1), 4 + 4 * (c & 1)), 0)
    bias = bias_c + tl.where(smooth_y & ~smooth_x, 4 + 4 * (r & 1), 0)
    near_r, far_r = near_r * pitch, far_r * pitch
    places = near_r + near_c, far_r + near_c, near_r + far_c, far_r + far_c
    cb, cr = _chroma(plane1, places, bias), _chroma(plane2, places, bias)
    red = _clip(y + ((91881 * cr + 32768) >> 16))
    green = _clip(y + ((32768 - 22554 * cb - 46802 * cr) >> 16))
    blue = _clip(y + ((116130 * cb + 32768) >> 16))
    return _packed(red, green, blue)


@triton.jit
def _pixels(image: tl.tuple, r: tl.tensor, c: tl.tensor) -> tl.tensor:
    """The pixels at rows r and columns c of the stored image; one lies along the first axis, one along the second."""
    kind, pitch, plane, _, _, _, _, _, _, _ = image
    if kind == _RGB:
        place = plane + (r * pitch + 3 * c)
        red, green = tl.load(place).to(tl.int32), tl.load(place + 1).to(tl.int32)
        pixels = _packed(red, green, tl.load(place + 2).to(tl.int32))
    else:
        y = tl.load(plane + (r * pitch + c)).to(tl.int32)
        pixels = _packed(y, y, y)
        if kind == _YCC:
            pixels = _colours(image, y, r, c)
    return pixels


@triton.jit
def _mirrored(at: tl.tensor, last: tl.tensor, mirror: tl.tensor) -> tl.tensor:
    return tl.where(mirror, last - at, at)


@triton.jit(do_not_specialize=["height", "width"], do_not_specialize_on_alignment=["area", "table"])
def _convert(
    area: tl.tensor,
    table: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * _COLUMNS
    image = _image(area, row)
    _, _, _, left, right = axis_of(area, row, width, False)
    _, _, _, top, bottom = axis_of(area, row, height, True)
    columns = right - left
    out = (area + tl.load(row + _PIXELS)).to(tl.pointer_type(tl.int32), bitcast=True)
    box_left, box_top, turn = tl.load(row + _LEFT), tl.load(row + _TOP), tl.load(row + _ORIENTATION)
    last_r, last_c = tl.load(row + _HEIGHT) - 1, tl.load(row + _WIDTH) - 1
    from_below = (turn == 3) | (turn == 4) | (turn == 6) | (turn == 7)
    from_right = (turn == 2) | (turn == 3) | (turn == 7) | (turn == 8)
    across = tl.cdiv(columns, tile_columns)
    for tile in range(tl.program_id(1), across * tl.cdiv(bottom - top, tile_rows), tl.num_programs(1)):
        x = ((tile % across) * tile_columns + tl.arange(0, tile_columns))[:, None]
        y = ((tile // across) * tile_rows + tl.arange(0, tile_rows))[None, :]
        place, mask = y * columns + x, (x < columns) & (y < bottom - top)
        x, y = box_left + tl.minimum(left + x, right - 1), box_top + tl.minimum(top + y, bottom - 1)
        if turn < 5:  # as `decode.oriented`: mirror what is stored, then turn it
            pixels = _pixels(image, _mirrored(y, last_r, from_below), _mirrored(x, last_c, from_right))
        else:
            pixels = _pixels(image, _mirrored(x, last_r, from_below), _mirrored(y, last_c, from_right))
        tl.store(out + place, pixels, mask=mask)


def programs(n: int) -> int:
    """Into how many programs a sample is split: enough to fill a GPU, few enough to do more than to start."""
    return max(16, 2048 // n)


def convert(area: torch.Tensor, table: torch.Tensor, n: int, height: int, width: int) -> None:
    """Converts what `cut` needs for results of height x width, of the samples in the first n rows of the table."""
    grid = (n, programs(n))
    _convert[grid](area, table, height, width, *TILE, num_warps=4, num_stages=1)
