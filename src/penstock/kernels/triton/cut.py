"""The cut of a tiny-batch: boxes of RGB pixels resized in two passes with 8 bits between them, as native/resample.c and
Pillow do it, their windows mirrored or not.

    weigh(area, table, n, 224, 224)    # axes.py: the weights
    convert(area, table, n, 224, 224)  # planes.py: the pixels that they apply to
    cut(area, table, n, out)           # out: uint8 [n or more, 224, 224, 3]

Integer sums are exact, so on the same planes the result is the CPU's, but for what sin and cos differ by in the filters
that use them: a unit of a weight's last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.table import COLUMNS, Column
from penstock.kernels.triton.axes import ONE, axis_of
from penstock.kernels.triton.planes import TILE, programs

__all__ = ["cut"]

_COLUMNS = tl.constexpr(COLUMNS)
_DOWN_FIRST = tl.constexpr(Column.DOWN_FIRST.value)
_PIXELS, _BETWEEN = tl.constexpr(Column.PIXELS.value), tl.constexpr(Column.BETWEEN.value)


@triton.jit
def _rounded(sum: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum((sum + ONE // 2) >> 22, 0), 255)


@triton.jit
def _blend(source: tl.tensor, step: tl.tensor, others: tl.tensor, axis: tl.tuple, at: tl.tensor) -> tl.tuple:
    """Red, green and blue of the outputs `at` of an axis. The pixels that it reads lie `step` apart, and `others` says
    where along the other axis."""
    weights, outputs, taps, low, end = axis
    first, count = tl.load(weights + at), tl.load(weights + outputs + at)
    red = at * 0 + others * 0
    green, blue = red, red
    for tap in range(taps):
        weight = tl.load(weights + (2 + tap) * outputs + at, mask=tap < count, other=0)
        pixel = tl.load(source + (tl.minimum(first + tap, end - 1) - low) * step + others)
        red += weight * (pixel & 255)
        green += weight * ((pixel >> 8) & 255)
        blue += weight * (pixel >> 16)
    return _rounded(red), _rounded(green), _rounded(blue)


@triton.jit
def _sweep(
    source: tl.tensor,
    pitch: tl.tensor,
    axis: tl.tuple,
    target: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_down: tl.constexpr,
    is_last: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    """One pass of one sample, from rows of `pitch` pixels into `rows` x `columns`."""
    across = tl.cdiv(columns, tile_columns)
    for tile in range(tl.program_id(1), across * tl.cdiv(rows, tile_rows), tl.num_programs(1)):
        x = ((tile % across) * tile_columns + tl.arange(0, tile_columns))[:, None]
        y = ((tile // across) * tile_rows + tl.arange(0, tile_rows))[None, :]
        place, mask = y * columns + x, (y < rows) & (x < columns)
        y, x = tl.minimum(y, rows - 1), tl.minimum(x, columns - 1)
        if is_down:
            red, green, blue = _blend(source, pitch, x, axis, y)
        else:
            red, green, blue = _blend(source, 1, y * pitch, axis, x)
        if is_last:
            tl.store(target + 3 * place, red.to(tl.uint8), mask=mask)
            tl.store(target + 3 * place + 1, green.to(tl.uint8), mask=mask)
            tl.store(target + 3 * place + 2, blue.to(tl.uint8), mask=mask)
        else:
            tl.store(target + place, red | (green << 8) | (blue << 16), mask=mask)


@triton.jit(do_not_specialize=["height", "width"], do_not_specialize_on_alignment=["area", "table", "out"])
def _pass(
    area: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    is_last: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * _COLUMNS
    across, down = axis_of(area, row, width, False), axis_of(area, row, height, True)
    pixels = (area + tl.load(row + _PIXELS)).to(tl.pointer_type(tl.int32), bitcast=True)
    between = (area + tl.load(row + _BETWEEN)).to(tl.pointer_type(tl.int32), bitcast=True)
    image = out + tl.program_id(0).to(tl.int64) * height * width * 3
    box_rows, box_columns = down[4] - down[3], across[4] - across[3]
    if tl.load(row + _DOWN_FIRST) != 0:
        if is_last:
            _sweep(between, box_columns, across, image, height, width, False, True, tile_columns, tile_rows)
        else:
            _sweep(pixels, box_columns, down, between, height, box_columns, True, False, tile_columns, tile_rows)
    elif is_last:
        _sweep(between, width, down, image, height, width, True, True, tile_columns, tile_rows)
    else:
        _sweep(pixels, box_columns, across, between, box_rows, width, False, False, tile_columns, tile_rows)


def cut(area: torch.Tensor, table: torch.Tensor, n: int, out: torch.Tensor) -> None:
    """Writes the cuts of the samples in the first n rows of the table to the first n images of `out`, dense."""
    height, width = out.shape[1:3]
    for is_last in (False, True):
        _pass[(n, programs(n))](area, table, out, height, width, is_last, *TILE, num_warps=4, num_stages=1)
