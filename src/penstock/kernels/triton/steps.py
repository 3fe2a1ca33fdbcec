"""Steps over a tiny-batch of uint8 images on the GPU: colour and geometry, each sample by its own.

    result = apply_steps(images, spare, steps, scratch)

On equal steps the bytes equal those of `penstock.kernels.pixels.apply`, also where that computes with floats: the
kernels make the same products and sums in the same precision and order. What `apply` refuses (a number that is none)
gives pixels of no meaning, but reads and writes nothing outside the buffers.

A layer costs two launches: one makes tables for the steps that map levels (`steps_tables.py`), one applies all steps.

Expected of an H200, from the instructions that the compiler gives for 224 x 224 pixels at half its issue rate, in
microseconds of the whole GPU per image: copy 0.06 (memory), tables 0.1, saturation 0.2, erase 0.3, nearest pixel 0.4,
hue 0.8, sharpness 0.9, bilinear 0.9, bicubic 2.4; the histograms of equalize 1.0 more. A layer of RandAugment: 0.35 on
average. (An expectation, not a measurement.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.pixels import FLAT, Op
from penstock.kernels.triton.steps_colour import hue, saturation, sharpness
from penstock.kernels.triton.steps_nearest import erase, nearest
from penstock.kernels.triton.steps_smooth import bicubic, bilinear
from penstock.kernels.triton.steps_tables import LEVELS, fill_tables, tabled

__all__ = ["apply_steps", "scratch_bytes"]

_FLAT = tl.constexpr(FLAT)
_SATURATION = tl.constexpr(int(Op.SATURATION))
_HUE = tl.constexpr(int(Op.HUE))
_SHARPNESS = tl.constexpr(int(Op.SHARPNESS))
_AFFINE = tl.constexpr(int(Op.AFFINE))
_AFFINE_BILINEAR = tl.constexpr(int(Op.AFFINE_BILINEAR))
_AFFINE_BICUBIC = tl.constexpr(int(Op.AFFINE_BICUBIC))
_ERASE = tl.constexpr(int(Op.ERASE))

_TILE = 2048
"""Pixels of a program."""
_TABLES: dict[str, Any] = {"block": 4096, "num_warps": 8, "enable_fp_fusion": False}
_STEPS: dict[str, Any] = {"tile": _TILE, "num_warps": 4, "enable_fp_fusion": False}
"""Products and sums stay apart."""


def scratch_bytes(n: int) -> int:
    """Bytes of scratch for n samples: a table per channel."""
    return n * 3 * 256


def apply_steps(images: torch.Tensor, spare: torch.Tensor, steps: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Applies `steps`, float64 [n, layers, FLAT], to `images`, uint8 [n, height, width, 3]; all dense, on one device.

    Code -1 leaves an image as it is. `spare` is like `images`; both are overwritten, and the one with the result is
    returned: `spare` after an odd number of layers. `scratch` has at least `scratch_bytes(n)` bytes (uint8).
    """
    _check(images, spare, steps, scratch)
    n, height, width, _ = images.shape
    layers, pixels = steps.shape[1], height * width
    tiles = triton.cdiv(pixels, _TILE)
    for layer in range(layers):
        fill_tables[(3, n)](images, steps, scratch, pixels, layer, layers, **_TABLES)
        _apply[(tiles, n)](images, spare, steps, scratch, height, width, pixels * 3, layer, layers, **_STEPS)
        images, spare = spare, images
    return images


def _check(images: torch.Tensor, spare: torch.Tensor, steps: torch.Tensor, scratch: torch.Tensor) -> None:
    n, _, _, channels = images.shape
    good = channels == 3 and spare.shape == images.shape and steps.shape[::2] == (n, FLAT)
    good &= images.data_ptr() != spare.data_ptr()
    types = (images.dtype, spare.dtype, steps.dtype, scratch.dtype)
    good &= types == (torch.uint8, torch.uint8, torch.float64, torch.uint8)
    good &= images.is_contiguous() and spare.is_contiguous() and steps.is_contiguous() and scratch.is_contiguous()
    if not good or images[0].numel() >= 2**30 or scratch.numel() < scratch_bytes(n):
        raise ValueError(
            f"expected two dense uint8 batches of height, width and 3 channels, float64 steps of {FLAT} numbers "
            f"and {scratch_bytes(n)} bytes of scratch; found {images.dtype} {tuple(images.shape)}, "
            f"{spare.dtype} {tuple(spare.shape)}, {steps.dtype} {tuple(steps.shape)} and {scratch.numel()} bytes"
        )


@triton.jit(do_not_specialize=["height", "width", "layer", "layers"])
def _apply(
    images: tl.tensor,
    out: tl.tensor,
    steps: tl.tensor,
    tables: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """A tile of a sample's pixels, for the one step of that sample.

    What goes by bytes has a size of block of its own: the compiler gives blocks of one size one layout, and that of
    bytes (neighbours to one thread) makes pixels go through shared memory.
    """
    sample = tl.program_id(1).to(tl.int64)
    step = steps + (sample * layers + layer) * _FLAT
    code = tl.load(step).to(tl.int32)
    source, target = images + sample * size, out + sample * size
    first = tl.program_id(0) * tile
    end = tl.minimum(first + tile, height * width)
    if tabled(code):
        _look_up(source, target, tables + sample * (3 * LEVELS), size, first, tile)
    elif code == _SATURATION:
        saturation(source, target, step, first, end, 256)
    elif code == _HUE:
        hue(source, target, step, first, end, 256)
    elif code == _SHARPNESS:
        sharpness(source, target, step, height, width, first, end, 512)
    elif code == _AFFINE:
        nearest(source, target, step, height, width, first, end, 256)
    elif code == _AFFINE_BILINEAR:
        bilinear(source, target, step, height, width, first, end, 256)
    elif code == _AFFINE_BICUBIC:
        bicubic(source, target, step, height, width, first, end, 128)
    elif code == _ERASE:
        erase(source, target, step, height, width, first, end, 256)
    else:
        _copy(source, target, size, first, tile)


@triton.jit
def _look_up(
    source: tl.tensor, target: tl.tensor, table: tl.tensor, size: tl.tensor, first: tl.tensor, tile: tl.constexpr
) -> None:
    """Every level through the table of its channel, by bytes."""
    for part in range(3):
        at = (first * 3 + part * tile) + tl.arange(0, tile)
        level = tl.load(source + at, mask=at < size, other=0).to(tl.int32)
        tl.store(target + at, tl.load(table + at % 3 * LEVELS + level), mask=at < size)


@triton.jit
def _copy(source: tl.tensor, target: tl.tensor, size: tl.tensor, first: tl.tensor, tile: tl.constexpr) -> None:
    for part in range(3):
        at = (first * 3 + part * tile) + tl.arange(0, tile)
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
