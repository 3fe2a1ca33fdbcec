"""White noise over batches of waveforms, and spectra through a filter bank, by the recipes of native/sound.c.

Every float operation is the C library's, in its order and without fused multiply-adds, so that noise and logarithms
have its bits. One thing is summed in another order: the mean square, in double precision and rounded to float32 only
in the noise's scale; one scale in about 10^8 is then one unit of the last place off.

Bytes moved per waveform value: 4 read for the mean square, 4 read and 4 written for the noise, which costs some 30
integer and 20 float operations more. A thousand clips of one second at 16 kHz are 200 MB: 50 microseconds of an H200
at 4 TB/s. (An expectation, not a measurement.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["PARTS", "add_noise", "filter_bank"]

PARTS = 32
"""Parts of a waveform whose squares are summed apart, so that few long waveforms occupy the GPU as well."""
_SQUARES = 1024
_COUNTERS = 256
"""Random blocks of a program; each makes four normal numbers."""
_FRAMES = 128


@triton.jit
def _natural_log(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (bits >> 23).to(tl.float32)
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    square = m * m
    y = m * 7.0376836292e-2 - 1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m - 1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m - 1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m - 2.4999993993e-1
    y = y * m + 3.3333331174e-1
    y = y * m * square
    y += exponent * -2.12194440e-4
    y += square * -0.5
    return (m + y) + exponent * 0.693359375


@triton.jit
def _normal_pair(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Box-Muller: two random words to two normal numbers."""
    radius = _natural_log(((first >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08) * -2.0  # 2^-24
    radius = tl.sqrt_rn(tl.where(radius > 0.0, radius, 0.0))
    turns = (second >> 8).to(tl.float32) * 2.384185791015625e-07  # 2^-22: in quarters
    quarter = (turns + 0.5).to(tl.int32)
    x = (turns - quarter.to(tl.float32)) * 1.57079632679
    z = x * x
    s = ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    c = ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
    c = c - z * 0.5 + 1.0
    odd = (quarter & 1) != 0
    cosine, sine = tl.where(odd, s, c), tl.where(odd, c, s)
    cosine = tl.where(((quarter + 1) & 2) != 0, -cosine, cosine)
    sine = tl.where((quarter & 2) != 0, -sine, sine)
    return radius * cosine, radius * sine


# Loops are written with `while`: range() takes no bounds from memory in Triton's interpreter under numpy 2.4.


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["wave"])
def _sum_squares(wave: tl.tensor, sums: tl.tensor, count: tl.tensor, parts: tl.constexpr, block: tl.constexpr) -> None:
    """One part of one row."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    share = tl.cdiv(count, parts * block) * block
    start = part * share
    end = tl.minimum(start + share, count)
    total = tl.zeros([block], tl.float64)
    while start < end:
        place = start + tl.arange(0, block)
        x = tl.load(wave + row * count + place, mask=place < end, other=0.0).to(tl.float64)
        total += x * x
        start += block
    tl.store(sums + row * parts + part, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["wave", "keys", "factors", "out"])
def _add_noise(
    wave: tl.tensor,
    keys: tl.tensor,
    factors: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    parts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """What `block` counters make, of one row."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    power = tl.sum(tl.load(sums + row * parts + tl.arange(0, parts)), 0) / count
    scale = (tl.sqrt(power) * tl.load(factors + row)).to(tl.float32)
    counter = (part * block + tl.arange(0, block)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(tl.load(keys + row), counter, zero, zero, zero)
    n0, n1 = _normal_pair(w0, w1)
    n2, n3 = _normal_pair(w2, w3)
    normal = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
    place = part * (4 * block) + tl.arange(0, 4 * block)
    x = tl.load(wave + row * count + place, mask=place < count)
    tl.store(out + row * count + place, x + scale * normal, mask=place < count)


@triton.jit(
    do_not_specialize=["bins", "frames", "widest", "out_row", "out_band"], do_not_specialize_on_alignment=["out"]
)
def _filter_bank(
    spectra: tl.tensor,
    weights: tl.tensor,
    first: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    bins: tl.tensor,
    frames: tl.tensor,
    widest: tl.tensor,
    out_row: tl.tensor,
    out_band: tl.tensor,
    floor: tl.tensor,
    log: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` frames of one band of one row."""
    row, band = tl.program_id(2).to(tl.int64), tl.program_id(1)
    frame = tl.program_id(0) * block + tl.arange(0, block)
    low = tl.load(first + band)
    k, end = low, low + tl.load(counts + band)
    total = tl.zeros([block], tl.float32)
    while k < end:
        weight = tl.load(weights + band * widest + (k - low))
        total += weight * tl.load(spectra + (row * bins + k) * frames + frame, mask=frame < frames, other=0.0)
        k += 1
    if log:
        total = tl.where(total < floor, floor, total)
        total = _natural_log(total) + (total - total)
    tl.store(out + row * out_row + band * out_band + frame, total, mask=frame < frames)


def add_noise(
    wave: torch.Tensor, keys: torch.Tensor, factors: torch.Tensor, sums: torch.Tensor, out: torch.Tensor
) -> None:
    """out = wave + n * sqrt(mean square of wave) * factor for every row, n standard normal and a function of its key.

    `wave` and `out` are contiguous float32 [rows, ...]; `keys` int64 and `factors` float64 [rows]; `sums`, which is
    overwritten, float64 [rows, PARTS]. At most 65,535 rows of less than 2^31 values.
    """
    rows = len(wave)
    if not wave.numel():
        return
    count = wave.numel() // rows
    _sum_squares[(PARTS, rows)](wave, sums, count, PARTS, _SQUARES, enable_fp_fusion=False)
    grid = (triton.cdiv(count, 4 * _COUNTERS), rows)
    _add_noise[grid](wave, keys, factors, sums, out, count, PARTS, _COUNTERS, enable_fp_fusion=False)


def filter_bank(
    spectra: torch.Tensor,
    weights: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    floor: float | None,
) -> None:
    """out[r, m] = sum over k < counts[m] of weights[m, k] * spectra[r, first[m] + k]; with a floor, log(max(floor, .)).

    `spectra` is contiguous float32 [rows, bins, frames]; `weights` float32 [filters, widest], `first` and `counts`
    int32 [filters] are a MelBank; `out` is float32 [rows, filters, frames], contiguous along its frames.
    """
    rows, bins, frames = spectra.shape
    filters, widest = weights.shape
    grid = (triton.cdiv(frames, _FRAMES), filters, rows)
    _filter_bank[grid](
        spectra, weights, first, counts, out, bins, frames, widest, out.stride(0), out.stride(1), floor or 0.0,
        floor is not None, _FRAMES, enable_fp_fusion=False,
    )  # fmt: skip
