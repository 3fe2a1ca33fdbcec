"""Noise, spectra and mel bands of batches, against the CPU's operators on the same clips."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from triton_device import DEVICE, MARKS

# isort: split

from penstock.audio import AddNoise, Mel, Spectrogram
from penstock.kernels import sound, sound_device
from penstock.kernels.sound_device import Noise, Spectra
from penstock.kernels.triton import noise as kernels

pytestmark = MARKS

Wave = NDArray[np.float32]
NO_DRAWS = np.empty((0, 0))


def clips(rows: int, channels: int, length: int, seed: int = 0) -> Wave:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, channels, length)).astype(np.float32)


def sent(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)


def each(operator: Any, waves: Wave, units: Any = None) -> Wave:
    """The CPU's result, clip by clip."""
    draws = [()] * len(waves) if units is None else units
    return np.stack([operator.apply({"audio": wave}, unit)["audio"] for wave, unit in zip(waves, draws, strict=True)])


def spectra(operator: Spectrogram | Mel, shape: tuple[int, int], rows: int = 4) -> Spectra:
    bank, log = (operator.bank, operator.log) if isinstance(operator, Mel) else (None, False)
    return Spectra(operator.stft, operator.power, shape, rows, torch.device(DEVICE), bank, log)


def transformed(operator: Spectrogram | Mel, waves: Wave) -> Wave:
    """The device's result."""
    made = spectra(operator, waves.shape[1:], len(waves))
    return np.asarray(made(sent(waves), NO_DRAWS).cpu())


def close(out: Wave, expected: Wave) -> None:
    """What tail.py promises of spectra and mel bands."""
    assert out.dtype == expected.dtype == np.float32
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-12 * float(np.abs(expected).max()))


# Noise.


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 5), (2, 2, 331), (1, 1, 1024), (2, 1, 5003), (1, 3, 12_289)])
def test_noise_has_the_bits_of_the_cpu(shape: tuple[int, int, int]) -> None:
    waves, units = clips(*shape), np.random.default_rng(5).random((shape[0], 2))
    out = Noise(-5, 20)(sent(waves), units).cpu().numpy()
    assert np.array_equal(out, each(AddNoise((-5, 20)), waves, units))
    assert shape[2] < 100 or not np.array_equal(out, waves)


@pytest.mark.parametrize("unit", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_noise_has_the_bits_of_the_cpu_for_the_first_and_last_key(unit: float) -> None:
    waves, units = clips(1, 1, 100), np.array([[0.3, unit]])
    assert np.array_equal(Noise(0, 0)(sent(waves), units).cpu(), each(AddNoise((0, 0)), waves, units))


def test_the_rarest_normal_numbers_are_those_of_the_cpu() -> None:
    """Among many are large radii, and angles beside every quarter of a turn."""
    waves, units = clips(1, 1, 60_000), np.array([[0.0, 0.625]])
    out = Noise(-40, -40)(sent(waves), units).cpu().numpy()
    expected = each(AddNoise((-40, -40)), waves, units)
    assert np.abs(expected).max() > 4 * expected.std()
    assert np.array_equal(out, expected)


def test_silence_stays_silent_and_a_broken_clip_breaks_no_other() -> None:
    waves, units = clips(3, 2, 500), np.full((3, 2), 0.25)
    waves[0], waves[1, 0, 7] = 0, math.nan
    out = Noise(0, 10)(sent(waves), units).cpu().numpy()
    assert not out[0].any()
    assert np.isnan(out[1]).all()
    assert np.array_equal(out[2:], each(AddNoise((0, 10)), waves[2:], units[2:]))


def test_waves_that_are_not_dense_get_the_same_noise() -> None:
    waves, units = clips(2, 600, 2), np.full((2, 2), 0.75)
    out = Noise(0, 10)(sent(waves).transpose(1, 2), units).cpu().numpy()
    assert np.array_equal(out, each(AddNoise((0, 10)), np.ascontiguousarray(waves.transpose(0, 2, 1)), units))


@given(
    st.tuples(st.floats(-60, 60), st.floats(0, 60)),
    st.lists(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2), max_size=5),
)
def test_a_batch_is_decided_as_its_samples_are(bounds: tuple[float, float], draws: list[tuple[float, float]]) -> None:
    low, high = bounds[0], bounds[0] + bounds[1]
    keys, factors = Noise(low, high).decide(np.array(draws).reshape(-1, 2))
    decided = [AddNoise((low, high)).decide(draw, 1, None) for draw in draws]
    assert keys.tolist() == [key for _, key in decided]
    np.testing.assert_allclose(factors.view(np.float64), [10 ** (-snr / 20) for snr, _ in decided], rtol=1e-15)


# Spectra.

SETTINGS: list[dict[str, Any]] = [
    {},
    {"n_fft": 400, "hop_length": 160, "center": False},
    {"n_fft": 401, "win_length": 301, "hop_length": 77},
    {"n_fft": 64, "win_length": 33, "hop_length": 5},
    {"n_fft": 2},
    {"n_fft": 1203, "pad_mode": "circular"},
    {"n_fft": 3000, "pad_mode": "constant", "normalized": True},
    {"pad_mode": "replicate", "normalized": "frame_length"},
]


@pytest.mark.parametrize("power", [1.0, 2.0, 1.5])
@pytest.mark.parametrize("settings", SETTINGS)
def test_spectrograms_are_those_of_the_cpu(settings: dict[str, Any], power: float) -> None:
    operator, waves = Spectrogram(**settings, power=power), clips(3, 2, 1203)
    close(transformed(operator, waves), each(operator, waves))


@pytest.mark.parametrize("pad_mode", ["reflect", "constant", "replicate", "circular"])
@pytest.mark.parametrize("spare", [0, 1, 100])
def test_clips_as_short_as_can_be_are_padded_as_on_the_cpu(pad_mode: Any, spare: int) -> None:
    operator = Spectrogram(n_fft=32, pad_mode=pad_mode)
    waves = clips(2, 1, operator.stft.shortest() + spare)
    close(transformed(operator, waves), each(operator, waves))


@pytest.mark.parametrize("shape", [(1, 1, 700), (3, 2, 700)])
@pytest.mark.parametrize("workspace", [1, 10_000, 40_000, 80_000])
def test_where_memory_is_short_batches_are_cut_and_nothing_else_changes(
    shape: tuple[int, int, int], workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, waves = Mel(n_fft=64, hop_length=64, n_mels=3), clips(*shape)  # 11 frames
    whole = transformed(operator, waves)
    monkeypatch.setattr(sound_device, "WORKSPACE_BYTES", workspace)
    assert np.array_equal(transformed(operator, waves), whole)


def test_batches_of_any_number_of_rows_follow_each_other() -> None:
    operator, waves = Spectrogram(n_fft=64, pad_mode="constant"), clips(7, 2, 300)
    made = spectra(operator, (2, 300), rows=4)
    waves[0] = math.nan
    for rows in ([0, 1, 2, 3], [6], [], [1, 2, 3, 4, 5, 6, 6, 5, 4], [5, 4]):
        out = made(sent(waves[rows]), NO_DRAWS).cpu().numpy()
        assert out.shape == (len(rows), 2, 33, 10)
        assert np.array_equal(out[[row != 0 for row in rows]], spectra(operator, (2, 300))(
            sent(waves[[row for row in rows if row]]), NO_DRAWS
        ).cpu())  # fmt: skip


@pytest.mark.parametrize(
    "operator",
    [
        Mel(n_mels=20),
        Mel(22050, n_fft=512, hop_length=128, n_mels=17, f_min=20, f_max=8000, norm="slaney", mel_scale="slaney"),
        Mel(11025, n_fft=257, n_mels=9, norm="slaney", power=1.0),
        Mel(n_fft=64, n_mels=40, power=3.0),
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_mel_bands_are_those_of_the_cpu(operator: Mel, log: bool) -> None:
    object.__setattr__(operator, "log", log)
    waves = clips(2, 2, 1203)
    out, expected = transformed(operator, waves), each(operator, waves)
    if log:
        np.testing.assert_allclose(out, expected, rtol=0, atol=4e-6)
    else:
        close(out, expected)


def test_some_filters_hold_no_bin_and_give_zero() -> None:
    operator, waves = Mel(n_fft=64, n_mels=40), clips(1, 1, 200)
    empty = operator.bank.counts == 0
    assert empty.any()
    assert not transformed(operator, waves)[0, 0, empty].any()


def test_quiet_bands_beside_a_loud_tone_are_those_of_the_cpu() -> None:
    """In single precision they are not: the errors of the tone fill them."""
    waves = 10 * np.sin(2 * np.pi * 1000 / 16000 * np.arange(4000))[None, None].astype(np.float32)
    operator = Mel(n_mels=20, log=True)
    out, expected = transformed(operator, waves), each(operator, waves)
    np.testing.assert_allclose(out, expected, rtol=0, atol=4e-6)
    window = torch.hann_window(400)
    single = torch.stft(torch.from_numpy(waves[0]), 400, 200, window=window, return_complex=True).abs().square()
    loud = np.log(np.maximum(sound.mel(np.ascontiguousarray(single), operator.bank), 1e-10))
    assert np.abs(loud - expected[0]).max() > 0.01


def test_the_default_type_of_torch_does_not_matter() -> None:
    operator, waves, units = Mel(n_fft=64, n_mels=5), clips(2, 1, 300), np.full((2, 2), 0.5)
    expected = transformed(operator, waves), Noise(0, 5)(sent(waves), units)
    torch.set_default_dtype(torch.float64)
    try:
        found = transformed(operator, waves), Noise(0, 5)(sent(waves), units)
    finally:
        torch.set_default_dtype(torch.float32)
    assert np.array_equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


# The filter bank.


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(2, 40), st.integers(1, 300), st.integers(1, 12), st.booleans(), st.integers(0, 9))
def test_filtered_spectra_have_the_bits_of_the_cpu(
    rows: int, bins: int, frames: int, filters: int, log: bool, seed: int
) -> None:
    bank = sound.mel_bank(16000, bins, filters, 0.0, 8000.0, None, "htk")
    values = (np.random.default_rng(seed).random((rows, bins, frames)) ** 30).astype(np.float32)
    expected = sound.mel(values, bank)
    if log:
        sound.logarithm(expected, 1e-10)
    out = torch.empty(expected.shape, device=DEVICE)
    kernels.filter_bank(sent(values), *map(sent, bank), out, 1e-10 if log else None)
    assert np.array_equal(out.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_logarithms_of_what_is_no_number_are_none() -> None:
    values = np.array([[[math.nan, math.inf, 0.0, 1.0, 3e38]]], np.float32)
    bank = sound.MelBank(np.ones((1, 1), np.float32), np.zeros(1, np.int32), np.ones(1, np.int32))
    out = torch.empty(1, 1, 5, device=DEVICE)
    kernels.filter_bank(sent(values), *map(sent, bank), out, 1e-10)
    expected = values.copy()
    sound.logarithm(expected, 1e-10)
    assert np.array_equal(out.cpu(), expected, equal_nan=True)
    assert out[0, 0, :2].isnan().all()
