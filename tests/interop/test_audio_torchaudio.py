"""The audio operators against torchaudio's. Its single-precision tables are the coarser side: see the tolerances."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from penstock.audio import Mel, Resample, Spectrogram

torchaudio = pytest.importorskip("torchaudio", reason="needs torchaudio, the newest for this torch")
pytestmark = pytest.mark.interop


def noise(channels: int, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(length).random((channels, length)) * 2 - 1).astype(np.float32)


@pytest.mark.parametrize(
    ("source", "target"), [(8000, 16000), (44100, 16000), (16000, 8000), (11025, 16000), (48000, 44100), (192000, 8000)]
)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (1, 3333)])
def test_resampling(source: int, target: int, shape: tuple[int, int]) -> None:
    wave = noise(*shape)
    out = Resample(target).apply({"audio": wave, "rate": source}, ())["audio"]
    exact = torchaudio.functional.resample(torch.from_numpy(wave).double(), source, target).numpy()
    single = torchaudio.functional.resample(torch.from_numpy(wave), source, target).numpy()
    assert out.shape == exact.shape
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6)
    # Its single-precision filter is itself off by up to 4e-5 where the rates have a small common divisor.
    np.testing.assert_allclose(out, single, rtol=0, atol=1e-5 + np.abs(single - exact).max())


STFTS: list[dict[str, Any]] = [
    {},
    {"n_fft": 512, "win_length": 300, "hop_length": 100},
    {"n_fft": 401, "hop_length": 7, "normalized": True},
    {"normalized": "frame_length", "power": 1.0},
    {"center": False, "power": 1.5},
    {"pad_mode": "circular"},
    {"pad_mode": "replicate"},
    {"pad_mode": "constant"},
]


@pytest.mark.parametrize("arguments", STFTS)
@pytest.mark.parametrize("shape", [(1, 16000), (2, 4001)])
def test_spectrogram(arguments: dict[str, Any], shape: tuple[int, int]) -> None:
    wave = noise(*shape)
    out = Spectrogram(**arguments).apply({"audio": wave}, ())["audio"]
    expected = torchaudio.transforms.Spectrogram(**arguments)(torch.from_numpy(wave)).numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6 * expected.max())


@pytest.mark.parametrize("arguments", STFTS)
@pytest.mark.parametrize(
    "bank",
    [
        {},
        {"n_mels": 80, "f_min": 20.0, "f_max": 7600.0},
        {"n_mels": 40, "mel_scale": "slaney", "norm": "slaney"},
        {"sample_rate": 11025, "n_mels": 23, "norm": "slaney"},
    ],
)
def test_mel(arguments: dict[str, Any], bank: dict[str, Any]) -> None:
    wave, rate = noise(2, 4001), bank.get("sample_rate", 16000)
    ours = Mel(rate, **arguments, **{name: value for name, value in bank.items() if name != "sample_rate"})
    out = ours.apply({"audio": wave, "rate": rate}, ())["audio"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "At least one mel filterbank has all zero values"
        theirs = torchaudio.transforms.MelSpectrogram(**arguments, **bank)
    expected = theirs(torch.from_numpy(wave)).numpy()
    # A band that touches one bin by the foot of its triangle shows the rounding of torchaudio's filters.
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5 * expected.max())
