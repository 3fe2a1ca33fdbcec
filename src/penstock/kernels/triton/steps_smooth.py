"""Affine maps between pixels, bilinear and bicubic, as native/pixels_warp.c and Pillow do them.

Arguments and launch as in `steps_nearest.py`. The doubles are Pillow's: with single precision a level would differ
where the exact result is whole, which it often is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.steps_colour import clip
from penstock.kernels.triton.steps_nearest import put

__all__ = ["bicubic", "bilinear"]


@triton.jit
def _between(step: tl.tensor, at: tl.tensor, height: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Where pixels come from: whether inside the image, the pixel left and above, and how far from it."""
    y = at // width
    x = (at - y * width).to(tl.float64) + 0.5
    y = y.to(tl.float64) + 0.5
    from_x = tl.load(step + 1) * x + tl.load(step + 2) * y + tl.load(step + 3)
    from_y = tl.load(step + 4) * x + tl.load(step + 5) * y + tl.load(step + 6)
    seen = (from_x >= 0.0) & (from_x < width) & (from_y >= 0.0) & (from_y < height)
    from_x, from_y = tl.where(seen, from_x, 0.0) - 0.5, tl.where(seen, from_y, 0.0) - 0.5
    left, top = tl.floor(from_x), tl.floor(from_y)
    return seen, left.to(tl.int32), top.to(tl.int32), from_x - left, from_y - top


@triton.jit
def _held(value: tl.tensor, limit: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(value, 0), limit - 1)


@triton.jit
def bilinear(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    for start in range(first, end, block):
        at = start + tl.arange(0, block)
        inside = at < end
        seen, left, top, dx, dy = _between(step, at, height, width)
        left, right = _held(left, width), _held(left + 1, width)
        upper, lower = _held(top, height) * width, _held(top + 1, height) * width
        for channel in tl.static_range(3):
            above = _linear_row(source + channel, upper, left, right, inside, dx)
            below = _linear_row(source + channel, lower, left, right, inside, dx)
            put(target, step + 7, channel, at, inside, seen, clip(above + (below - above) * dy))


@triton.jit
def _linear_row(
    plane: tl.tensor, row: tl.tensor, left: tl.tensor, right: tl.tensor, inside: tl.tensor, share: tl.tensor
) -> tl.tensor:
    near = tl.load(plane + (row + left) * 3, mask=inside, other=0).to(tl.float64)
    far = tl.load(plane + (row + right) * 3, mask=inside, other=0).to(tl.float64)
    return near + (far - near) * share


@triton.jit
def bicubic(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    for start in range(first, end, block):
        at = start + tl.arange(0, block)
        inside = at < end
        seen, left, top, dx, dy = _between(step, at, height, width)
        x0, x1 = _held(left - 1, width), _held(left, width)
        x2, x3 = _held(left + 1, width), _held(left + 2, width)
        y0, y1 = _held(top - 1, height) * width, _held(top, height) * width
        y2, y3 = _held(top + 1, height) * width, _held(top + 2, height) * width
        for channel in tl.static_range(3):
            plane = source + channel
            row0 = _cubic_row(plane + y0 * 3, x0, x1, x2, x3, inside, dx)
            row1 = _cubic_row(plane + y1 * 3, x0, x1, x2, x3, inside, dx)
            row2 = _cubic_row(plane + y2 * 3, x0, x1, x2, x3, inside, dx)
            row3 = _cubic_row(plane + y3 * 3, x0, x1, x2, x3, inside, dx)
            put(target, step + 7, channel, at, inside, seen, clip(_cubic(row0, row1, row2, row3, dy)))


@triton.jit
def _cubic_row(
    row: tl.tensor, x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, inside: tl.tensor, share: tl.tensor
) -> tl.tensor:
    level0 = tl.load(row + x0 * 3, mask=inside, other=0).to(tl.float64)
    level1 = tl.load(row + x1 * 3, mask=inside, other=0).to(tl.float64)
    level2 = tl.load(row + x2 * 3, mask=inside, other=0).to(tl.float64)
    level3 = tl.load(row + x3 * 3, mask=inside, other=0).to(tl.float64)
    return _cubic(level0, level1, level2, level3, share)


@triton.jit
def _cubic(v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor, share: tl.tensor) -> tl.tensor:
    p2 = v2 - v0
    p3 = 2.0 * (v0 - v1) + v2 - v3
    p4 = v1 - v0 - v2 + v3
    return v1 + share * (p2 + share * (p3 + share * p4))
