"""Affine maps by nearest pixel, and holes, as native/pixels_warp.c and Pillow do them.

Each function takes one sample's pixels `first` to `end` from `source` to `target`. A step's numbers are a to f, with
x' = a x + b y + c and y' = d x + e y + f at pixel centres, and three of the fill. The launcher says
`enable_fp_fusion=False`: products and sums must stay apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.steps_colour import clip

__all__ = ["erase", "nearest", "put"]


@triton.jit
def put(
    target: tl.tensor,
    fill: tl.tensor,
    channel: tl.constexpr,
    at: tl.tensor,
    inside: tl.tensor,
    seen: tl.tensor,
    level: tl.tensor,
) -> None:
    """The level, or where it is not seen that of the fill."""
    level = tl.where(seen, level, clip(tl.load(fill + channel)))
    tl.store(target + at * 3 + channel, level.to(tl.uint8), mask=inside)


@triton.jit
def _take(
    source: tl.tensor,
    target: tl.tensor,
    fill: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    seen: tl.tensor,
    origin: tl.tensor,
) -> None:
    """To each pixel the one at `origin`, or the fill."""
    for channel in tl.static_range(3):
        level = tl.load(source + origin * 3 + channel, mask=inside & seen, other=0).to(tl.int32)
        put(target, fill, channel, at, inside, seen, level)


@triton.jit
def nearest(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    """As Pillow: 16.16 fixed point where the map turns and fits, otherwise sums of doubles along columns and rows.

    Sums of multiples of 1/65536 are exact, so that fixed point gives the same: translations and mirrors take that way.
    """
    a, b, c = tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)
    d, e, f = tl.load(step + 4), tl.load(step + 5), tl.load(step + 6)
    turns = (b != 0.0) | (d != 0.0)
    fits = _fit(a, b, c, height, width) & _fit(d, e, f, height, width)
    exact = _exact(a, b, c) & _exact(d, e, f)
    if (turns & fits) | exact:
        _nearest_fixed(source, target, step, height, width, first, end, block)
    else:
        _nearest_summed(source, target, step, height, width, first, end, block)


@triton.jit
def _fit(a: tl.tensor, b: tl.tensor, c: tl.tensor, height: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Whether the four corners fit 16.16."""
    x, y = width.to(tl.float64), height.to(tl.float64)
    upper = (tl.abs(c) < 32768.0) & (tl.abs(x * a + c) < 32768.0)
    return upper & (tl.abs(y * b + c) < 32768.0) & (tl.abs(x * a + y * b + c) < 32768.0)


@triton.jit
def _exact(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Whether these and the first pixel's centre are multiples of 1/65536, and so small that their sums are too."""
    small = (tl.abs(a) < 32768.0) & (tl.abs(b) < 32768.0) & (tl.abs(c) < 32768.0)
    return small & _whole(a * 32768.0) & _whole(b * 32768.0) & _whole(c * 65536.0)


@triton.jit
def _whole(value: tl.tensor) -> tl.tensor:
    return tl.floor(value) == value


@triton.jit
def _fixed(value: tl.tensor) -> tl.tensor:
    return tl.floor(value * 65536.0 + 0.5).to(tl.int64)


@triton.jit
def _nearest_fixed(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    a, b, c = tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)
    d, e, f = tl.load(step + 4), tl.load(step + 5), tl.load(step + 6)
    x0, y0 = _fixed(c + a * 0.5 + b * 0.5), _fixed(f + d * 0.5 + e * 0.5)
    x_by_x, x_by_y, y_by_x, y_by_y = _fixed(a), _fixed(b), _fixed(d), _fixed(e)
    for start in range(first, end, block):
        at = start + tl.arange(0, block)
        y = at // width
        x = at - y * width
        from_x = (x0 + y * x_by_y + x * x_by_x) >> 16
        from_y = (y0 + y * y_by_y + x * y_by_x) >> 16
        seen = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
        _take(source, target, step + 7, at, at < end, seen, (from_y * width + from_x).to(tl.int32))


@triton.jit
def _nearest_summed(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Slow, and rare: no augmentation scales by nearest pixel or leaves 16.16 on images below 10,000 pixels a side."""
    a, b, c = tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)
    d, e, f = tl.load(step + 4), tl.load(step + 5), tl.load(step + 6)
    for start in range(first, end, block):
        at = start + tl.arange(0, block)
        y = at // width
        x = at - y * width
        zero = tl.zeros((block,), tl.float64)
        from_x = _summed(_summed(zero + (c + b * 0.5 + a * 0.5), b, y, height), a, x, width)
        from_y = _summed(_summed(zero + (f + e * 0.5 + d * 0.5), e, y, height), d, x, width)
        seen = (from_x >= 0.0) & (from_x < width) & (from_y >= 0.0) & (from_y < height)
        from_x, from_y = tl.where(seen, from_x, 0.0), tl.where(seen, from_y, 0.0)
        _take(source, target, step + 7, at, at < end, seen, from_y.to(tl.int32) * width + from_x.to(tl.int32))


@triton.jit
def _summed(value: tl.tensor, by: tl.tensor, times: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """`value` after `times` additions, each of which rounds; `times` is less than `limit`."""
    for k in range(1, limit):
        value = tl.where(k <= times, value + by, value)
    return value


@triton.jit
def erase(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Fills rows top to bottom - 1, columns left to right - 1."""
    top, left = _edge(step + 1, height), _edge(step + 2, width)
    bottom, right = _edge(step + 3, height), _edge(step + 4, width)
    for start in range(first, end, block):
        at = start + tl.arange(0, block)
        y = at // width
        x = at - y * width
        seen = (y < top) | (y >= bottom) | (x < left) | (x >= right)
        _take(source, target, step + 5, at, at < end, seen, at)


@triton.jit
def _edge(number: tl.tensor, limit: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(tl.load(number), 0.0), limit.to(tl.float64)).to(tl.int32)
