"""The weights of a tiny-batch's resizes, per sample and axis, as native/resample.c makes them: in doubles, then rounded
to 22 bits. Along an axis that keeps its size, and for the filter that picks pixels, that is one weight of 1.

    weigh(area, table, n, 224, 224)  # before `planes.convert`, which reads from them what the cut needs

In memory, an axis of some outputs (224 here) is int32: the first source pixel of each output, how many there are, then
the first weight of each output, the second, and so on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.resample import FILTERS
from penstock.kernels.table import COLUMNS, Column

__all__ = ["ONE", "axis_of", "weigh"]

ONE = tl.constexpr(1 << 22)
"""As a weight."""

_OUTPUTS = 32
"""Of one axis, for one program of one warp: many small programs, since each walks through the taps one by one."""

_COLUMNS = tl.constexpr(COLUMNS)
_LEFT, _TOP, _RIGHT, _BOTTOM = (tl.constexpr(c.value) for c in (Column.LEFT, Column.TOP, Column.RIGHT, Column.BOTTOM))
_RESIZED_WIDTH, _RESIZED_HEIGHT = tl.constexpr(Column.RESIZED_WIDTH.value), tl.constexpr(Column.RESIZED_HEIGHT.value)
_WINDOW_LEFT, _WINDOW_TOP = tl.constexpr(Column.WINDOW_LEFT.value), tl.constexpr(Column.WINDOW_TOP.value)
_FLIP, _FILTER = tl.constexpr(Column.FLIP.value), tl.constexpr(Column.FILTER.value)
_ACROSS, _DOWN = tl.constexpr(Column.ACROSS.value), tl.constexpr(Column.DOWN.value)
_NEAREST, _BOX, _BILINEAR, _HAMMING, _BICUBIC, _LANCZOS = (tl.constexpr(i) for i in range(len(FILTERS)))
_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _weights(area: tl.tensor, row: tl.tensor, is_down: tl.constexpr) -> tl.tensor:
    """Where an axis begins; `row` points to the sample's row of the table."""
    place = tl.load(row + (_DOWN if is_down else _ACROSS))
    return (area + place).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _sizes(row: tl.tensor, is_down: tl.constexpr) -> tl.tuple:
    """Pixels of the box along an axis, and of what it is resized to."""
    if is_down:
        size = tl.load(row + _BOTTOM) - tl.load(row + _TOP)
        resized = tl.load(row + _RESIZED_HEIGHT)
    else:
        size = tl.load(row + _RIGHT) - tl.load(row + _LEFT)
        resized = tl.load(row + _RESIZED_WIDTH)
    return size, resized


@triton.jit
def axis_of(area: tl.tensor, row: tl.tensor, outputs: tl.tensor, is_down: tl.constexpr) -> tl.tuple:
    """An axis with its weights: where it is, its outputs, the most taps that one has, the first source pixel that it
    reads and the one after the last."""
    axis = _weights(area, row, is_down)
    one, other = tl.load(axis), tl.load(axis + outputs - 1)  # the first and the last, or mirrored the other way round
    end = tl.maximum(one + tl.load(axis + outputs), other + tl.load(axis + 2 * outputs - 1))
    size, resized = _sizes(row, is_down)
    filter = tl.load(row + _FILTER)
    reach = tl.where(filter == _LANCZOS, 6, tl.where(filter == _BICUBIC, 4, tl.where(filter == _BOX, 1, 2)))
    taps = reach * tl.maximum(size, resized) // resized + 1  # as `table.place` reckons
    taps = tl.where((filter == _NEAREST) | (size == resized), 1, taps)
    return axis, outputs, taps, tl.minimum(one, other), end


@triton.jit
def _sinc(x: tl.tensor) -> tl.tensor:
    turned = tl.where(x == 0.0, 1.0, x * _PI)
    return tl.where(x == 0.0, 1.0, tl.sin(turned) / turned)


@triton.jit
def _curve(filter: tl.tensor, x: tl.tensor) -> tl.tensor:
    """The filter's height at x."""
    far = tl.abs(x)
    height = tl.where(far < 1.0, 1.0 - far, 0.0)
    if filter == _BOX:
        height = tl.where((x > -0.5) & (x <= 0.5), 1.0, far * 0.0)
    elif filter == _HAMMING:
        window = 0.54000002145767211914 + 0.46000000834465026855 * tl.cos(far * _PI)  # floats, in Pillow
        height = tl.where(far < 1.0, tl.where(far == 0.0, 1.0, _sinc(far) * window), 0.0)
    elif filter == _BICUBIC:
        outer = tl.where(far < 2.0, (((far - 5) * far + 8) * far - 4) * -0.5, 0.0)
        height = tl.where(far < 1.0, (1.5 * far - 2.5) * far * far + 1, outer)
    elif filter == _LANCZOS:
        height = tl.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)
    return height


@triton.jit
def _pick(
    axis: tl.tensor, i: tl.tensor, at: tl.tensor, size: tl.tensor, resized: tl.tensor, outputs: tl.tensor
) -> None:
    """One tap of weight 1 for output `at`, kept as the i-th. Pillow adds up its steps, so the rounding does too."""
    step = size.to(tl.float64) / resized
    place = at.to(tl.float64) * 0.0 + step * 0.5
    if size == resized:
        place += at
    else:
        for done in range(tl.max(at, axis=0)):
            place = tl.where(done < at, place + step, place)
    mask = i < outputs
    tl.store(axis + i, tl.minimum(place.to(tl.int32), size - 1), mask=mask)
    tl.store(axis + outputs + i, 1, mask=mask)
    tl.store(axis + 2 * outputs + i, ONE, mask=mask)


@triton.jit
def _spread(
    axis: tl.tensor,
    i: tl.tensor,
    at: tl.tensor,
    size: tl.tensor,
    resized: tl.tensor,
    outputs: tl.tensor,
    filter: tl.tensor,
) -> None:
    """The taps of output `at`, kept as the i-th."""
    scale = size.to(tl.float64) / resized
    wide = tl.where(scale < 1.0, 1.0, scale)
    half = tl.where(filter == _LANCZOS, 3.0, tl.where(filter == _BICUBIC, 2.0, tl.where(filter == _BOX, 0.5, 1.0)))
    support, narrow, center = half * wide, 1.0 / wide, (at.to(tl.float64) + 0.5) * scale
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    mask = i < outputs
    count = tl.where(mask, tl.maximum(tl.minimum((center + support + 0.5).to(tl.int32), size) - first, 0), 0)
    tl.store(axis + i, first, mask=mask)
    tl.store(axis + outputs + i, count, mask=mask)
    most = tl.max(count, axis=0)
    total = center * 0.0
    for tap in range(most):
        height = _curve(filter, (tap + first - center + 0.5) * narrow)
        total += tl.where(tap < count, height, 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    for tap in range(most):
        weight = _curve(filter, (tap + first - center + 0.5) * narrow) / total
        rounded = tl.where(weight < 0, -0.5, 0.5) + weight * ONE
        tl.store(axis + (2 + tap) * outputs + i, rounded.to(tl.int32), mask=mask & (tap < count))


@triton.jit
def _weigh_axis(
    area: tl.tensor, row: tl.tensor, outputs: tl.tensor, is_down: tl.constexpr, block: tl.constexpr
) -> None:
    axis = _weights(area, row, is_down)
    size, resized = _sizes(row, is_down)
    filter = tl.load(row + _FILTER)
    i = tl.program_id(1) * block + tl.arange(0, block)
    at = i
    if not is_down:
        at = tl.where(tl.load(row + _FLIP) != 0, outputs - 1 - i, i)
    at += tl.load(row + (_WINDOW_TOP if is_down else _WINDOW_LEFT))
    if (filter == _NEAREST) | (size == resized):
        _pick(axis, i, at, size, resized, outputs)
    else:
        _spread(axis, i, at, size, resized, outputs, filter)


@triton.jit(do_not_specialize=["height", "width"], do_not_specialize_on_alignment=["area", "table"])
def _weigh(area: tl.tensor, table: tl.tensor, height: tl.tensor, width: tl.tensor, block: tl.constexpr) -> None:
    row = table + tl.program_id(0) * _COLUMNS
    if tl.program_id(2) == 0:
        if tl.program_id(1) * block < width:
            _weigh_axis(area, row, width, False, block)
    elif tl.program_id(1) * block < height:
        _weigh_axis(area, row, height, True, block)


def weigh(area: torch.Tensor, table: torch.Tensor, n: int, height: int, width: int) -> None:
    """Writes the weights of the first n rows of the table, for results of height x width, into the area."""
    grid = (n, triton.cdiv(max(height, width), _OUTPUTS), 2)
    # without fused operations, so that places round as in C
    _weigh[grid](area, table, height, width, _OUTPUTS, num_warps=1, enable_fp_fusion=False)
