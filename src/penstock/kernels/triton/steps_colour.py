"""Steps that mix the channels of a pixel, or a pixel with its neighbours; the arithmetic of native/pixels_colour.c.

Each function takes one sample's pixels `first` to `end` from `source` to `target`. Products and sums must stay apart:
whoever launches a kernel with these says `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["blend", "clip", "hue", "load_rgb", "luma", "saturation", "sharpness"]


@triton.jit
def clip(value: tl.tensor) -> tl.tensor:
    """A float as a level: cut at 0 and 255, then towards zero."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def blend(start: tl.tensor, end: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Pillow's blend of levels, in single precision."""
    return clip(start.to(tl.float32) + factor * (end - start).to(tl.float32))


@triton.jit
def luma(red: tl.tensor, green: tl.tensor, blue: tl.tensor) -> tl.tensor:
    """Pillow's grey."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def load_rgb(source: tl.tensor, pixel: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Three tensors of levels; 0 outside."""
    red = tl.load(source + pixel * 3, mask=inside, other=0).to(tl.int32)
    green = tl.load(source + pixel * 3 + 1, mask=inside, other=0).to(tl.int32)
    blue = tl.load(source + pixel * 3 + 2, mask=inside, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def _store_rgb(
    target: tl.tensor, pixel: tl.tensor, inside: tl.tensor, red: tl.tensor, green: tl.tensor, blue: tl.tensor
) -> None:
    tl.store(target + pixel * 3, red.to(tl.uint8), mask=inside)
    tl.store(target + pixel * 3 + 1, green.to(tl.uint8), mask=inside)
    tl.store(target + pixel * 3 + 2, blue.to(tl.uint8), mask=inside)


@triton.jit
def saturation(
    source: tl.tensor, target: tl.tensor, step: tl.tensor, first: tl.tensor, end: tl.tensor, block: tl.constexpr
) -> None:
    factor = tl.load(step + 1).to(tl.float32)
    for start in range(first, end, block):
        pixel = start + tl.arange(0, block)
        inside = pixel < end
        red, green, blue = load_rgb(source, pixel, inside)
        grey = luma(red, green, blue)
        red, green, blue = blend(grey, red, factor), blend(grey, green, factor), blend(grey, blue, factor)
        _store_rgb(target, pixel, inside, red, green, blue)


@triton.jit
def sharpness(
    source: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Between the image and itself under the kernel 1 1 1, 1 5 1, 1 1 1 over 13; the border stays. Goes by bytes.

    5042 / 65536 divides by 13 exactly up to 6553.
    """
    factor = tl.load(step + 1).to(tl.float32)
    pitch = width * 3
    for start in range(first * 3, end * 3, block):
        at = start + tl.arange(0, block)
        y = at // pitch
        x = at - y * pitch
        inside = at < end * 3
        core = inside & (x >= 3) & (x < pitch - 3) & (y > 0) & (y < height - 1)
        level = tl.load(source + at, mask=inside, other=0).to(tl.int32)
        total = 4 * level + 6
        for down in tl.static_range(-1, 2):
            for right in tl.static_range(-3, 4, 3):
                total += tl.load(source + at + (down * pitch + right), mask=core, other=0).to(tl.int32)
        sharp = blend((total * 5042) >> 16, level, factor)
        tl.store(target + at, tl.where(core, sharp, level).to(tl.uint8), mask=inside)


@triton.jit
def hue(
    source: tl.tensor, target: tl.tensor, step: tl.tensor, first: tl.tensor, end: tl.tensor, block: tl.constexpr
) -> None:
    shift = tl.load(step + 1).to(tl.int32)
    for start in range(first, end, block):
        pixel = start + tl.arange(0, block)
        inside = pixel < end
        red, green, blue = load_rgb(source, pixel, inside)
        turn, share, value = _to_hsv(red, green, blue)
        red, green, blue = _to_rgb((turn + shift) & 255, share, value)
        _store_rgb(target, pixel, inside, red, green, blue)


@triton.jit
def _to_hsv(red: tl.tensor, green: tl.tensor, blue: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Pillow's 8-bit hue, saturation and value, in its mixture of single and double precision."""
    high = tl.maximum(tl.maximum(red, green), blue)
    low = tl.minimum(tl.minimum(red, green), blue)
    is_red = red == high
    is_green = green == high
    base = tl.where(is_red, 0, tl.where(is_green, 2, 4))
    x = high - tl.where(is_red, blue, tl.where(is_green, red, green))
    y = high - tl.where(is_red, green, tl.where(is_green, blue, red))
    span = tl.maximum(high - low, 1).to(tl.float32)
    x_share = tl.div_rn(x.to(tl.float32), span).to(tl.float64)
    y_share = tl.div_rn(y.to(tl.float32), span).to(tl.float64)
    sixth = (base.to(tl.float64) + x_share - y_share).to(tl.float32)
    turns = sixth.to(tl.float64) / 6.0 + 1.0  # from 5/6 to 11/6
    turn = (turns - tl.floor(turns)).to(tl.float32)
    share = tl.div_rn((high - low).to(tl.float32), tl.maximum(high, 1).to(tl.float32))
    return (turn.to(tl.float64) * 255.0).to(tl.int32), (share.to(tl.float64) * 255.0).to(tl.int32), high


@triton.jit
def _to_rgb(turn: tl.tensor, saturation: tl.tensor, value: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """And back. A hue of 255 lies in sector 6, that is 0."""
    place = turn.to(tl.float64) * 6.0 / 255.0
    rest = (place - tl.floor(place)).to(tl.float32)
    share = tl.div_rn(saturation.to(tl.float32), 255.0)
    v = value.to(tl.float64)
    p = (v * (1.0 - share.to(tl.float64)) + 0.5).to(tl.int32)
    q = (v * (1.0 - (share * rest).to(tl.float64)) + 0.5).to(tl.int32)
    t = (v * (1.0 - share.to(tl.float64) * (1.0 - rest.to(tl.float64))) + 0.5).to(tl.int32)
    sector = turn * 6 // 255 % 6
    red = _by_sector(sector, value, q, p, p, t, value)
    green = _by_sector(sector, t, value, value, q, p, p)
    blue = _by_sector(sector, p, p, t, value, value, q)
    return red, green, blue


@triton.jit
def _by_sector(
    sector: tl.tensor, at0: tl.tensor, at1: tl.tensor, at2: tl.tensor, at3: tl.tensor, at4: tl.tensor, at5: tl.tensor
) -> tl.tensor:
    low = tl.where(sector == 0, at0, tl.where(sector == 1, at1, at2))
    return tl.where(sector < 3, low, tl.where(sector == 3, at3, tl.where(sector == 4, at4, at5)))
