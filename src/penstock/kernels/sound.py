"""Waveforms and spectra in numbers: the tables, cached per process, and the calls into `native/sound.c`.

Waveforms are float32 [channels, time] and contiguous, spectra float32 [channels, frequency, frames]. Tables and
transforms are computed in double precision and rounded once; the definitions are those of torchaudio and torch.stft.
"""

from __future__ import annotations

import math
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native import declare, lib

__all__ = [
    "MelBank",
    "Stft",
    "Wave",
    "add_noise",
    "logarithm",
    "mean_square",
    "mel",
    "mel_bank",
    "resample",
    "spectrum",
]

Wave = NDArray[np.float32]
Scale = Literal["htk", "slaney"]

LOWPASS_WIDTH = 6
"""Zero crossings of the resampling filter on each side, torchaudio's default; so is the roll-off."""
ROLLOFF = 0.99
LANES = 8
BLOCK_BYTES = 120_000
"""Frames transformed together. From 128 KiB on, the C library maps fresh pages for every array: measured, a one-second
clip's spectrogram then takes 290 microseconds instead of 105."""

declare(
    "ps_polyphase",
    c_int32,
    c_void_p,
    c_int64,
    c_int64,
    c_void_p,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
)
declare("ps_log", None, c_void_p, c_int64, c_float)
declare("ps_mean_square", c_double, c_void_p, c_int64)
declare("ps_add_noise", None, c_void_p, c_int64, c_uint64, c_float, c_void_p)
declare("ps_power", None, c_void_p, c_int64, c_int64, c_double, c_void_p, c_int64)
declare("ps_filter_bank", c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)


class Polyphase(NamedTuple):
    """A resampling filter: output q * up + p is the sum over k of taps[p, k] * input[q * down + first[p] + k]."""

    up: int
    down: int
    taps: Wave
    first: NDArray[np.int32]


@lru_cache(maxsize=32)
def polyphase(source: int, target: int) -> Polyphase:
    """The Hann-windowed sinc filter between two rates. A phase keeps only the taps that are not zero."""
    common = math.gcd(source, target)
    down, up = source // common, target // common
    base = min(down, up) * ROLLOFF
    reach = math.ceil(LOWPASS_WIDTH * down / base)
    phase = np.arange(up, dtype=np.int64)
    first = phase * down // up - reach
    width = -(-(2 * reach + 2) // LANES) * LANES
    inputs = first[:, None] + np.arange(width)
    distance = (inputs * up - phase[:, None] * down) / (up * down) * base
    window = np.cos(distance * (math.pi / (2 * LOWPASS_WIDTH))) ** 2
    taps = np.where(np.abs(distance) < LOWPASS_WIDTH, np.sinc(distance) * window * (base / down), 0)
    return Polyphase(up, down, taps.astype(np.float32), first.astype(np.int32))


def resampled_length(length: int, source: int, target: int) -> int:
    """Samples after resampling: the source's duration, rounded up."""
    return -(-length * target // source)


def resample(wave: Wave, source: int, target: int) -> Wave:
    """The waveform at another rate; zeros are assumed around it."""
    channels, length = wave.shape
    count = resampled_length(length, source, target)
    table = polyphase(source, target)
    before, width = -int(table.first[0]), table.taps.shape[1]
    last = (count - 1) // table.up * table.down + int(table.first[-1])
    padded = np.zeros((channels, max(before + last + width, before + length)), np.float32)
    padded[:, before : before + length] = wave
    first = table.first + np.int32(before)
    out = np.empty((channels, count), np.float32)
    refused = lib.ps_polyphase(
        padded.ctypes.data, channels, padded.shape[1], table.taps.ctypes.data, first.ctypes.data,
        table.up, width, table.down, out.ctypes.data, count,
    )  # fmt: skip
    assert not refused, "padded covers what the last output needs"
    return out


def mean_square(wave: Wave) -> float:
    """The power of a waveform over all its channels."""
    return float(lib.ps_mean_square(wave.ctypes.data, wave.size))


def add_noise(wave: Wave, key: int, scale: float) -> Wave:
    """wave + scale * n, n standard normal and a function of `key` (64 bits) and the place in the array alone.

    The recipe stands above `ps_add_noise` in native/sound.c.
    """
    out = np.empty(wave.shape, np.float32)
    lib.ps_add_noise(wave.ctypes.data, wave.size, key, scale, out.ctypes.data)
    return out


class Stft(NamedTuple):
    """How a waveform is cut into frames. `pad_mode` is numpy's word; None where the frames are not centred."""

    n_fft: int
    win_length: int
    hop_length: int
    pad_mode: Literal["constant", "reflect", "edge", "wrap"] | None
    normalized: Literal["window", "frame_length"] | None

    @property
    def padding(self) -> int:
        """Samples added at each end."""
        return 0 if self.pad_mode is None else self.n_fft // 2

    def frames(self, length: int) -> int:
        """How many frames a waveform gives; less than 1 when it is too short."""
        return 1 + (length + 2 * self.padding - self.n_fft) // self.hop_length

    def shortest(self) -> int:
        """The fewest samples that can be transformed: a reflection needs more of them than it adds."""
        if self.pad_mode is None:
            return self.n_fft
        return {"reflect": self.padding + 1, "wrap": self.padding}.get(self.pad_mode, 1)


@lru_cache(maxsize=32)
def window(stft: Stft) -> NDArray[np.float64]:
    """The periodic Hann window, centred in n_fft, with the normalization worked in."""
    hann = 0.5 - 0.5 * np.cos(2 * math.pi / stft.win_length * np.arange(stft.win_length))
    if stft.normalized == "window":
        hann /= math.sqrt(math.fsum(hann**2))
    elif stft.normalized == "frame_length":
        hann /= math.sqrt(stft.n_fft)
    left = (stft.n_fft - stft.win_length) // 2
    return np.pad(hann, (left, stft.n_fft - stft.win_length - left))


def spectrum(wave: Wave, stft: Stft, power: float) -> Wave:
    """|short-time Fourier transform|^power; the waveform is at least `stft.shortest()` long."""
    if stft.pad_mode is not None:
        wave = np.pad(wave, ((0, 0), (stft.padding, stft.padding)), mode=stft.pad_mode)
    bins, weights = stft.n_fft // 2 + 1, window(stft)
    channels, frames = len(wave), 1 + (wave.shape[1] - stft.n_fft) // stft.hop_length
    strides = (wave.strides[0], stft.hop_length * wave.itemsize, wave.itemsize)
    framed = np.ndarray((channels, frames, stft.n_fft), np.float32, wave, 0, strides)
    out = np.empty((channels, bins, frames), np.float32)
    block = max(1, BLOCK_BYTES // (stft.n_fft * weights.itemsize))
    for channel in range(channels):
        for start in range(0, frames, block):
            part = np.fft.rfft(framed[channel, start : start + block] * weights)
            place = out[channel, :, start:].ctypes.data
            lib.ps_power(part.ctypes.data, part.shape[0], bins, power, place, frames)
    return out


class MelBank(NamedTuple):
    """Triangular filters, each as its first bin, how many bins it covers, and their weights (a row, zero-filled)."""

    weights: Wave
    first: NDArray[np.int32]
    counts: NDArray[np.int32]


def _to_mel(hertz: float, scale: Scale) -> float:
    if scale == "htk":
        return 2595.0 * math.log10(1.0 + hertz / 700.0)
    return hertz * 3 / 200 if hertz < 1000 else 15 + math.log(hertz / 1000) * 27 / math.log(6.4)


def _to_hertz(mel: float, scale: Scale) -> float:
    if scale == "htk":
        return float(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


@lru_cache(maxsize=32)
def mel_bank(
    rate: int, bins: int, n_mels: int, f_min: float, f_max: float, norm: Literal["slaney"] | None, scale: Scale
) -> MelBank:
    """The filters of torchaudio's `melscale_fbanks`, which puts the highest bin at rate // 2, in whole hertz.

    In double precision; torchaudio's own filters, in single, deviate by up to 1e-5 of a filter's peak.
    """
    low, high = _to_mel(f_min, scale), _to_mel(f_max, scale)
    edges = np.array([_to_hertz(low + (high - low) * i / (n_mels + 1), scale) for i in range(n_mels + 2)])
    hertz = np.linspace(0, rate // 2, bins)
    rising = (hertz - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - hertz) / np.diff(edges)[1:, None]
    dense = np.maximum(0, np.minimum(rising, falling))
    if norm == "slaney":
        dense *= 2.0 / (edges[2:] - edges[:-2])[:, None]
    covered = dense > 0
    first = np.where(covered.any(axis=1), covered.argmax(axis=1), 0).astype(np.int32)
    counts = covered.sum(axis=1).astype(np.int32)
    weights = np.zeros((n_mels, max(1, int(counts.max()))), np.float32)
    for row, start, count in zip(range(n_mels), first, counts, strict=True):
        weights[row, :count] = dense[row, start : start + count]
    return MelBank(weights, first, counts)


def mel(spectra: Wave, bank: MelBank) -> Wave:
    """The spectra through the filters: [channels, filters, frames]."""
    channels, bins, frames = spectra.shape
    filters, widest = bank.weights.shape
    out = np.empty((channels, filters, frames), np.float32)
    for channel in range(channels):
        refused = lib.ps_filter_bank(
            spectra[channel].ctypes.data, bins, frames, bank.weights.ctypes.data, bank.first.ctypes.data,
            bank.counts.ctypes.data, filters, widest, out[channel].ctypes.data,
        )  # fmt: skip
        assert not refused, "the bank was made for as many bins"
    return out


def logarithm(values: NDArray[Any], floor: float) -> None:
    """The natural logarithm in place, of values no smaller than `floor`."""
    lib.ps_log(values.ctypes.data, values.size, floor)
