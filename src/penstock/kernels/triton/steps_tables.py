"""The steps that map each level of a channel by itself, as tables; the arithmetic of native/pixels.c.

One program makes one channel's table of one sample. Where a step needs statistics of the image, that program alone
goes through the image: nothing is added up between programs, so the same pixels give the same table in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.pixels import FLAT, Op
from penstock.kernels.triton.steps_colour import blend, clip, load_rgb, luma

__all__ = ["LEVELS", "fill_tables", "tabled"]

LEVELS = tl.constexpr(256)
_FLAT = tl.constexpr(FLAT)
_BRIGHTNESS = tl.constexpr(int(Op.BRIGHTNESS))
_CONTRAST = tl.constexpr(int(Op.CONTRAST))
_POSTERIZE = tl.constexpr(int(Op.POSTERIZE))
_SOLARIZE = tl.constexpr(int(Op.SOLARIZE))
_AUTOCONTRAST = tl.constexpr(int(Op.AUTOCONTRAST))
_EQUALIZE = tl.constexpr(int(Op.EQUALIZE))
_INVERT = tl.constexpr(int(Op.INVERT))


@triton.jit
def tabled(code: tl.tensor) -> tl.tensor:
    """Whether a step is applied through tables."""
    by_level = (code == _BRIGHTNESS) | (code == _POSTERIZE) | (code == _SOLARIZE) | (code == _INVERT)
    return by_level | (code == _CONTRAST) | (code == _AUTOCONTRAST) | (code == _EQUALIZE)


@triton.jit(do_not_specialize=["pixels", "layer", "layers"])
def fill_tables(
    images: tl.tensor,
    steps: tl.tensor,
    tables: tl.tensor,
    pixels: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Of grid (3, samples). `tables` are uint8 [samples, 3, 256]; those of steps that need none stay as they are."""
    channel = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    step = steps + (sample * layers + layer) * _FLAT
    code = tl.load(step).to(tl.int32)
    if tabled(code):
        image = images + sample * pixels * 3
        level = tl.arange(0, LEVELS)
        number = tl.load(step + 1)
        if code == _BRIGHTNESS:
            table = blend(tl.zeros_like(level), level, number.to(tl.float32))
        elif code == _CONTRAST:
            table = blend(_mean_grey(image, pixels, block), level, number.to(tl.float32))
        elif code == _POSTERIZE:
            table = _posterized(level, number)
        elif code == _SOLARIZE:
            table = tl.where(level < number, level, 255 - level)
        elif code == _AUTOCONTRAST:
            table = _autocontrasted(image + channel, pixels, level, block)
        elif code == _EQUALIZE:
            table = _equalized(image + channel, pixels, level, block)
        else:
            table = 255 - level
        tl.store(tables + (sample * 3 + channel) * LEVELS + level, table.to(tl.uint8))


@triton.jit
def _posterized(level: tl.tensor, bits: tl.tensor) -> tl.tensor:
    lost = 8 - tl.minimum(tl.maximum(bits, 0.0), 8.0).to(tl.int32)
    return (level >> lost) << lost


@triton.jit
def _mean_grey(image: tl.tensor, pixels: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """The mean luma, rounded. Whole numbers give here what doubles give in native/pixels.c."""
    sums = tl.zeros((block,), tl.int32)
    for start in range(0, pixels, block):
        pixel = start + tl.arange(0, block)
        red, green, blue = load_rgb(image, pixel, pixel < pixels)
        sums += luma(red, green, blue)
    total = tl.sum(sums.to(tl.int64))
    return ((2 * total + pixels) // (2 * pixels)).to(tl.int32)


@triton.jit
def _autocontrasted(plane: tl.tensor, pixels: tl.tensor, level: tl.tensor, block: tl.constexpr) -> tl.tensor:
    lows = tl.full((block,), 255, tl.int32)
    highs = tl.zeros((block,), tl.int32)
    for start in range(0, pixels, block):
        pixel = start + tl.arange(0, block)
        lows = tl.minimum(lows, tl.load(plane + pixel * 3, mask=pixel < pixels, other=255).to(tl.int32))
        highs = tl.maximum(highs, tl.load(plane + pixel * 3, mask=pixel < pixels, other=0).to(tl.int32))
    low, high = tl.min(lows), tl.max(highs)
    scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
    stretched = clip(level.to(tl.float64) * scale + (-low).to(tl.float64) * scale)
    return tl.where(high > low, stretched, level)


@triton.jit
def _equalized(plane: tl.tensor, pixels: tl.tensor, level: tl.tensor, block: tl.constexpr) -> tl.tensor:
    counts = tl.zeros((LEVELS,), tl.int32)
    for start in range(0, pixels, block):
        pixel = start + tl.arange(0, block)
        counts += tl.histogram(tl.load(plane + pixel * 3, mask=pixel < pixels, other=0).to(tl.int32), LEVELS)
    beyond = tl.cdiv(pixels, block) * block - pixels  # were counted as 0
    counts = tl.where(level == 0, counts - beyond, counts)
    last = tl.max(tl.where(counts > 0, level, 0))
    stride = (pixels - tl.sum(tl.where(level == last, counts, 0))) // 255
    before = tl.cumsum(counts) - counts
    spread = (stride // 2 + before) // tl.maximum(stride, 1)
    return tl.where(stride > 0, tl.minimum(spread, 255), level)
