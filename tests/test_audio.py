"""Audio: decoding refuses what is damaged; every operator against its definition, written out independently here."""

from __future__ import annotations

import ctypes
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.audio import AddNoise, AudioOperator, CropOrPad, DecodeAudio, Mel, Resample, Spectrogram
from penstock.errors import GraphError, MissingExtraError
from penstock.graph import Field, Graph, Operator, Reader, Source, Spec
from penstock.kernels import native, sound

Wave = NDArray[Any]


def noise(channels: int, length: int, seed: int = 0) -> Wave:
    return np.random.default_rng(seed).uniform(-1, 1, (channels, length)).astype(np.float32)


def sine(hertz: float, rate: int, length: int) -> Wave:
    wave: Wave = np.sin(2 * np.pi * hertz / rate * np.arange(length))[None].astype(np.float32)
    return wave


def run(operator: Operator, wave: Wave, rate: int = 16000, units: tuple[float, ...] = ()) -> Wave:
    """The operator's result; its input must not change."""
    before = wave.copy()
    out: Wave = operator.apply({"audio": wave, "rate": rate}, units)["audio"]
    assert np.array_equal(wave, before)
    assert out.dtype == np.float32
    return out


def encode(wave: Wave, rate: int, format: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave.T, rate, format=format, subtype=subtype)
    return file.getvalue()


def decoded(data: Any, mono: bool = False) -> tuple[Wave, int]:
    sample = DecodeAudio(mono=mono).apply({"audio": data}, ())
    return sample["audio"], sample["rate"]


# Decoding.


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize(("format", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16")])
def test_lossless_files_give_back_their_samples(format: str, subtype: str, channels: int) -> None:
    wave = np.round(noise(channels, 1001) * 32767).astype(np.float32) / 32768
    out, rate = decoded(encode(wave, 22050, format, subtype))
    assert out.flags.c_contiguous
    assert out.dtype == np.float32
    assert rate == 22050
    assert np.array_equal(out, wave)


def test_ogg_gives_back_nearly_its_samples() -> None:
    wave = sine(440, 16000, 16000) * np.float32(0.5)
    out, rate = decoded(encode(wave, 16000, "OGG", "VORBIS"))
    assert (out.shape, rate) == (wave.shape, 16000)
    assert np.abs(out - wave).max() < 0.05


def test_mono_is_the_mean_of_the_channels() -> None:
    wave = noise(2, 999)
    out, _ = decoded(encode(wave, 8000, "WAV", "FLOAT"), mono=True)
    np.testing.assert_allclose(out, wave.mean(axis=0, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_of_bytes_decodes(kind: Any) -> None:
    data = encode(noise(1, 10), 8000, "WAV", "FLOAT")
    assert decoded(kind(data))[0].shape == (1, 10)


@pytest.mark.parametrize(
    ("format", "subtype", "channels"),
    [("WAV", "PCM_16", 1), ("WAV", "FLOAT", 2), ("FLAC", "PCM_16", 2), ("OGG", "VORBIS", 1), ("OGG", "OPUS", 2)],
)
def test_a_file_cut_anywhere_is_refused(format: str, subtype: str, channels: int) -> None:
    data = encode(noise(channels, 48000), 16000, format, subtype)
    cuts = [*range(1, 60, 3), *np.random.default_rng(1).integers(60, len(data), 40).tolist(), len(data) - 1]
    for cut in cuts:
        with pytest.raises(ValueError, match=r"cut short|libsndfile cannot decode|no samples"):
            decoded(data[:cut])


def test_a_wav_from_a_writer_that_streams_is_read_to_its_end() -> None:
    data = bytearray(encode(noise(1, 500), 8000, "WAV", "PCM_16"))
    place = data.index(b"data") + 4
    data[4:8] = data[place : place + 4] = b"\xff\xff\xff\xff"
    assert decoded(data)[0].shape == (1, 500)


def test_what_is_no_audio_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="empty"):
        decoded(b"")
    with pytest.raises(ValueError, match=r"libsndfile cannot decode these 1100 bytes: .*not recognised"):
        decoded(b"hello world" * 100)
    with pytest.raises(ValueError, match="no samples"):
        decoded(encode(np.zeros((1, 0), np.float32), 8000, "WAV", "PCM_16"))
    with pytest.raises(ValueError, match="found ndarray"):
        decoded(noise(1, 10))


def test_a_damaged_header_costs_no_memory() -> None:
    """A FLAC header whose count of samples was overwritten with the largest there is (2^36 - 1)."""
    data = bytearray(encode(noise(1, 5000), 8000, "FLAC", "PCM_16"))
    data[21] |= 0x0F
    data[22:26] = b"\xff\xff\xff\xff"
    with pytest.raises(ValueError, match=r"cut short|cannot decode"):
        decoded(data)


def test_without_soundfile_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[audio\]"):
        DecodeAudio().check({"audio": Field("encoded")})


# Resampling.

RATES = [(8000, 16000), (44100, 16000), (16000, 8000), (11025, 16000), (48000, 44100), (192000, 8000), (7, 3)]


def resampled(wave: Wave, source: int, target: int) -> NDArray[np.float64]:
    """The definition: every output a sum over all inputs under a Hann-windowed sinc, in double precision."""
    common = math.gcd(source, target)
    source, target = source // common, target // common
    base = min(source, target) * 0.99
    count = math.ceil(wave.shape[1] * target / source)
    t = (np.arange(wave.shape[1]) / source - np.arange(count)[:, None] / target) * base
    t = np.clip(t, -6, 6)
    kernel = np.sinc(t) * np.cos(t * np.pi / 12) ** 2 * base / source
    return np.asarray(wave.astype(np.float64) @ kernel.T)


@pytest.mark.parametrize(("source", "target"), RATES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 7), (1, 1001), (3, 640)])
def test_resampling_follows_its_definition(source: int, target: int, shape: tuple[int, int]) -> None:
    wave = noise(*shape)
    out, expected = run(Resample(target), wave, source), resampled(wave, source, target)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 300))
def test_resampling_follows_its_definition_for_any_ratio(source: int, target: int, length: int) -> None:
    assume(source != target)
    wave = noise(1, length, seed=length)
    np.testing.assert_allclose(run(Resample(target), wave, source), resampled(wave, source, target), atol=1e-6)


@pytest.mark.parametrize(("source", "target"), RATES[:5])
def test_a_resampled_sine_is_a_sine_of_the_same_pitch(source: int, target: int) -> None:
    out = run(Resample(target), sine(1000, source, source), source)
    inner = slice(200, -200)  # the ends see the zeros around the clip
    np.testing.assert_allclose(out[:, inner], sine(1000, target, target)[:, inner], atol=2e-3)


def test_resampling_removes_what_the_lower_rate_cannot_hold() -> None:
    out = run(Resample(8000), sine(7000, 16000, 16000), 16000)
    assert np.abs(out[:, 100:-100]).max() < 2e-3


def test_resampling_to_the_same_rate_changes_nothing_and_the_rate_is_kept_with_the_sample() -> None:
    wave = noise(2, 100)
    assert np.array_equal(run(Resample(16000), wave, 16000), wave)
    assert Resample(8000).apply({"audio": wave, "rate": 16000}, ())["rate"] == 8000


@pytest.mark.parametrize("rate", [None, 0, "16000"])
def test_resampling_refuses_a_sample_without_a_rate(rate: object) -> None:
    with pytest.raises(ValueError, match="'rate'"):
        Resample(8000).apply({"audio": noise(1, 10), "rate": rate}, ())


# Cropping.


@given(st.integers(1, 50), st.integers(1, 60), st.floats(0, 1, exclude_max=True), st.booleans())
def test_crop_or_pad_gives_the_length_asked_for(length: int, wanted: int, unit: float, random: bool) -> None:
    operator = CropOrPad(wanted, random=random)
    wave = np.arange(1, 2 * length + 1, dtype=np.float32).reshape(2, length)
    out = run(operator, wave, units=(unit,) * operator.units)
    assert out.shape == (2, wanted)
    if length <= wanted:
        assert np.array_equal(out[:, :length], wave)
        assert not out[:, length:].any()
    else:
        start = int(out[0, 0]) - 1
        assert np.array_equal(out, wave[:, start : start + wanted])
        assert random or start == 0


def test_every_crop_is_equally_likely() -> None:
    wave = np.arange(12, dtype=np.float32)[None]
    starts = [int(run(CropOrPad(10), wave, units=(i / 300,))[0, 0]) for i in range(300)]
    assert [starts.count(start) for start in range(4)] == [100, 100, 100, 0]


# Noise.


@pytest.mark.parametrize("snr_db", [-10.0, 0.0, 15.0, 40.0])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_ratio_of_signal_to_noise_is_the_one_drawn(snr_db: float, channels: int) -> None:
    wave = noise(channels, 16000) * np.float32(0.3)
    added = run(AddNoise((snr_db - 5, snr_db + 5)), wave, units=(0.5, 0.123)) - wave
    measured = 10 * np.log10(np.mean(wave.astype(np.float64) ** 2) / np.mean(added.astype(np.float64) ** 2))
    assert measured == pytest.approx(snr_db, abs=0.5)


def test_the_ratio_is_drawn_evenly_between_the_bounds() -> None:
    operator = AddNoise((-3, 7))
    assert [operator.decide((unit, 0.0), 1, None)[0] for unit in (0.0, 0.25, 0.5)] == [-3, -0.5, 2]


def test_noise_is_normal_and_white() -> None:
    values = np.sort(sound.add_noise(np.zeros((1, 200_001), np.float32), 7, 1.0)[0].astype(np.float64))
    ranks = (np.arange(values.size) + 0.5) / values.size
    normal = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in values])
    assert np.abs(ranks - normal).max() < 1.63 / math.sqrt(values.size)  # Kolmogorov-Smirnov, 1 in 100
    assert 4 < np.abs(values).max() < 6
    one, other = (sound.add_noise(np.zeros((1, 100_000), np.float32), key, 1.0)[0] for key in (1, 2))
    for a, b in [(one, other), (one[1:], one[:-1]), (one[2:], one[:-2]), (one[4:], one[:-4])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015


def test_noise_is_what_the_recipe_says() -> None:
    wave, unit = noise(2, 331), 0.7361527
    key = int(unit * 2**53)
    expected = []
    for block in range(-(-wave.size // 4)):
        words = (ctypes.c_uint32 * 4)(block, 0, 0, 0)
        native.lib.ps_philox(words, key & 0xFFFFFFFF, key >> 32)
        for a, b in [(words[0], words[1]), (words[2], words[3])]:
            radius, angle = math.sqrt(-2 * math.log(((a >> 8) + 1) / 2**24)), 2 * math.pi * (b >> 8) / 2**24
            expected += [radius * math.cos(angle), radius * math.sin(angle)]
    power = np.mean(wave.astype(np.float64) ** 2)
    scaled = np.array(expected[: wave.size]).reshape(wave.shape) * math.sqrt(power) * 10 ** (-6 / 20)
    np.testing.assert_allclose(run(AddNoise((6, 6)), wave, units=(0.3, unit)), wave + scaled, atol=2e-6)


def test_noise_depends_on_the_draws_alone() -> None:
    wave = noise(1, 1000)
    first, again, other = (run(AddNoise((0, 20)), wave, units=(0.5, unit)) for unit in (0.25, 0.25, 0.250001))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_silence_stays_silent() -> None:
    assert not run(AddNoise((0, 0)), np.zeros((1, 100), np.float32), units=(0.0, 0.5)).any()


# Spectra.


def framed(wave: Wave, operator: Spectrogram | Mel) -> NDArray[np.float64]:
    """Windowed frames [channels, frames, n_fft], cut one by one."""
    stft = operator.stft
    x = wave.astype(np.float64)
    if operator.center:
        left = np.stack([row[1 : stft.padding + 1][::-1] for row in x])
        right = np.stack([row[-stft.padding - 1 : -1][::-1] for row in x])
        x = np.concatenate([left, x, right], axis=1)
    hann = np.sin(np.pi * np.arange(stft.win_length) / stft.win_length) ** 2
    window = np.zeros(stft.n_fft)
    before = (stft.n_fft - stft.win_length) // 2
    window[before : before + stft.win_length] = hann
    starts = range(0, x.shape[1] - stft.n_fft + 1, stft.hop_length)
    return np.stack([x[:, start : start + stft.n_fft] * window for start in starts], axis=1)


def transformed(wave: Wave, operator: Spectrogram | Mel) -> NDArray[np.float64]:
    """The discrete Fourier transform by its definition; [channels, frequency, frames]."""
    n = operator.stft.n_fft
    matrix = np.exp(-2j * np.pi * np.outer(np.arange(n // 2 + 1), np.arange(n)) / n)
    return np.asarray(np.abs(np.einsum("kn,cfn->ckf", matrix, framed(wave, operator))))


@pytest.mark.parametrize("power", [1.0, 2.0, 1.5])
@pytest.mark.parametrize(
    "operator",
    [
        {},
        {"n_fft": 400, "hop_length": 160, "center": False},
        {"n_fft": 401, "win_length": 301, "hop_length": 77},
        {"n_fft": 64, "win_length": 33, "hop_length": 1},
        {"n_fft": 2},
    ],
)
def test_a_spectrogram_is_the_fourier_transform_of_its_frames(operator: dict[str, Any], power: float) -> None:
    wave, made = noise(2, 1203), Spectrogram(**operator, power=power)
    expected = transformed(wave, made) ** power
    out = run(made, wave)
    assert out.shape == expected.shape == (2, *made.shape(2, 1203)[1:])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6 * expected.max())


@pytest.mark.parametrize("pad_mode", ["reflect", "constant", "replicate", "circular"])
@pytest.mark.parametrize("length", [201, 20_000])
def test_padding_is_that_of_torch(pad_mode: Any, length: int) -> None:
    wave = noise(1, length)
    window = torch.hann_window(400, dtype=torch.float64)
    expected = torch.stft(
        torch.from_numpy(wave).double(), 400, 200, window=window, pad_mode=pad_mode, return_complex=True
    ).abs()
    np.testing.assert_allclose(run(Spectrogram(power=1.0, pad_mode=pad_mode), wave), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("pad_mode", "shortest"), [("reflect", 201), ("circular", 200), ("replicate", 1)])
def test_a_clip_too_short_for_its_padding_is_refused_where_torch_refuses_it(pad_mode: Any, shortest: int) -> None:
    operator, window = Spectrogram(pad_mode=pad_mode), torch.hann_window(400)
    for length in (shortest, shortest - 1):
        wave = torch.ones(1, length)
        if length == shortest:
            torch.stft(wave, 400, 200, window=window, pad_mode=pad_mode, return_complex=True)
            run(operator, wave.numpy())
        else:
            with pytest.raises(RuntimeError):
                torch.stft(wave, 400, 200, window=window, pad_mode=pad_mode, return_complex=True)
            with pytest.raises(ValueError, match=r"crop_or_pad|hold samples"):
                run(operator, wave.numpy())


def test_normalizing_divides_by_the_norm_of_the_window_or_the_root_of_the_frame() -> None:
    wave, plain = noise(1, 1000), Spectrogram(win_length=300, power=1.0)
    norm = np.linalg.norm(np.sin(np.pi * np.arange(300) / 300) ** 2)
    divisors: list[tuple[Any, Any]] = [(True, norm), ("window", norm), ("frame_length", 20.0)]
    for normalized, divisor in divisors:
        out = run(Spectrogram(win_length=300, power=1.0, normalized=normalized), wave)
        np.testing.assert_allclose(out, run(plain, wave) / divisor, rtol=1e-5, atol=1e-7)


@given(st.integers(2, 50), st.integers(1, 30), st.booleans(), st.integers(1, 200))
@settings(deadline=None)
def test_the_frames_foretold_are_the_frames_that_come(n_fft: int, hop: int, center: bool, length: int) -> None:
    operator = Spectrogram(n_fft=n_fft, hop_length=hop, center=center)
    try:
        foretold = operator.shape(1, length)
    except GraphError:
        with pytest.raises(ValueError, match="crop_or_pad"):
            run(operator, noise(1, length))
        return
    assert run(operator, noise(1, length)).shape == foretold


def test_a_single_sample_has_a_spectrogram_when_padded_with_zeros() -> None:
    wave = np.ones((1, 1), np.float32)
    out = run(Spectrogram(pad_mode="constant"), wave)
    np.testing.assert_allclose(out, np.ones((1, 201, 1)), rtol=1e-6)  # an impulse at the window's middle
    with pytest.raises(ValueError, match="at least 201 samples and found 1"):
        run(Spectrogram(), wave)


def mel_filters(mel: Mel) -> NDArray[np.float64]:
    """Triangles by their definition, point by point."""

    def to_mel(f: float) -> float:
        if mel.mel_scale == "htk":
            return 2595 * math.log10(1 + f / 700)
        return f / (200 / 3) if f < 1000 else 15 + math.log(f / 1000) / (math.log(6.4) / 27)

    top = mel.rate // 2 if mel.f_max is None else mel.f_max
    fine = np.linspace(mel.f_min, top, 400_001)  # the inverse of the scale, by looking it up
    scale = np.array([to_mel(f) for f in fine])
    edges = np.interp(np.linspace(scale[0], scale[-1], mel.n_mels + 2), scale, fine)
    hertz = np.linspace(0, mel.rate // 2, mel.n_fft // 2 + 1)
    filters = np.zeros((mel.n_mels, hertz.size))
    for m in range(mel.n_mels):
        low, middle, high = edges[m : m + 3]
        for k, f in enumerate(hertz):
            if low < f < high:
                filters[m, k] = (f - low) / (middle - low) if f <= middle else (high - f) / (high - middle)
        if mel.norm == "slaney":
            filters[m] *= 2 / (high - low)
    return filters


@pytest.mark.parametrize(
    "operator",
    [
        Mel(),
        Mel(22050, n_fft=512, hop_length=128, n_mels=40, f_min=20, f_max=8000, norm="slaney", mel_scale="slaney"),
        Mel(11025, n_fft=257, n_mels=23, norm="slaney", power=1.0),
    ],
)
def test_mel_is_the_spectrogram_through_triangles(operator: Mel) -> None:
    wave = noise(2, 1999)
    spectra = transformed(wave, operator) ** operator.power
    expected = np.einsum("mk,ckf->cmf", mel_filters(operator), spectra)
    out = run(operator, wave, operator.rate)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6 * expected.max())


def test_a_tone_is_loudest_in_its_own_band() -> None:
    mel = Mel(n_mels=40)
    bands = run(mel, sine(2000, 16000, 16000)).mean(axis=2)[0]
    mels = np.linspace(0, 2595 * math.log10(1 + 8000 / 700), 42)[1:-1]
    assert bands.argmax() == np.abs(mels - 2595 * math.log10(1 + 2000 / 700)).argmin()


def test_the_mel_of_silence_is_zero_and_its_logarithm_finite() -> None:
    silence = np.zeros((2, 801), np.float32)
    assert not run(Mel(), silence).any()
    np.testing.assert_allclose(run(Mel(log=True), silence), math.log(1e-10), rtol=1e-6)


def test_the_logarithm_is_the_natural_one() -> None:
    wave = noise(1, 16000)
    np.testing.assert_allclose(
        run(Mel(log=True), wave), np.log(np.maximum(run(Mel(), wave), 1e-10)), rtol=3e-7, atol=1e-6
    )
    values = np.concatenate([np.geomspace(1e-30, 1e30, 100_003), np.linspace(0.5, 2, 100_003)]).astype(np.float32)
    logs = values.copy()
    sound.logarithm(logs, 1e-37)
    np.testing.assert_allclose(logs, np.log(values.astype(np.float64)), rtol=2e-7, atol=3e-8)
    odd = np.array([np.nan, np.inf, -1], np.float32)
    sound.logarithm(odd, 1.0)
    assert np.array_equal(odd, np.array([np.nan, np.nan, 0], np.float32), equal_nan=True)


def test_mel_refuses_a_rate_it_was_not_made_for() -> None:
    with pytest.raises(ValueError, match=r"expected 16000 .* found 44100; put .resample\(16000\)"):
        run(Mel(), noise(1, 1000), rate=44100)
    assert Mel().apply({"audio": noise(1, 1000)}, ())["audio"].shape == (1, 128, 6)


def test_both_builds_of_the_library_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Path(native.__file__).with_name("_native_avx2.so")
    if not fast.exists() or not native.lib.ps_has_avx2():
        pytest.skip("this machine has one instruction set")
    waves = [noise(2, length) for length in (1, 255, 1000, 5003)]
    results = []
    for path in (fast, fast.with_name("_native.so")):
        library = ctypes.CDLL(str(path))
        for name in ("polyphase", "log", "mean_square", "add_noise", "power", "filter_bank"):
            declared, function = getattr(native.lib, f"ps_{name}"), getattr(library, f"ps_{name}")
            function.restype, function.argtypes = declared.restype, declared.argtypes
        monkeypatch.setattr(sound, "lib", library)
        mel = Mel(pad_mode="constant", n_mels=40, log=True)
        results.append(
            [
                *[run(Resample(target), wave, source) for wave in waves for source, target in RATES[:5]],
                *[run(AddNoise((0, 20)), wave, units=(0.3, 0.4)) for wave in waves],
                *[run(mel, wave) for wave in waves],
            ]
        )
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


# Chains.


class Clips(Source):
    """Stands for a source of the fields given; nothing is read."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __len__(self) -> int:
        return 1

    def open(self) -> Reader:
        raise NotImplementedError

    def spec(self) -> Spec:
        return self._spec

    def place(self, id: int) -> str:
        return "nowhere"

    def fingerprint(self) -> str:
        return "clips"


ENCODED: Spec = {"audio": Field("encoded"), "label": Field("value", (), "int64")}
WAVEFORM: Spec = {"audio": Field("audio", (1, 500), "float32")}


def test_a_chain_that_crops_has_a_fixed_layout() -> None:
    chain = (DecodeAudio(mono=True), Resample(16000), CropOrPad(16000), AddNoise((5, 20)), Mel(n_mels=80))
    graph = Graph(Clips(ENCODED), chain)
    assert [spec["audio"].shape for spec in graph.specs[1:]] == [
        (1, None), (1, None), (1, 16000), (1, 16000), (1, 80, 81),
    ]  # fmt: skip
    assert graph.spec["audio"].fixed
    assert graph.spec["rate"].fixed
    assert graph.units == 3
    sample: dict[str, Any] = {"audio": encode(noise(2, 44100), 44100, "FLAC", "PCM_16"), "label": 3}
    for operator, spec in zip(chain, graph.specs[1:], strict=True):
        sample = operator.apply(sample, (0.5,) * operator.units)
        foretold = spec["audio"].shape or ()
        assert len(foretold) == sample["audio"].ndim
        assert all(size in (None, found) for size, found in zip(foretold, sample["audio"].shape, strict=True))
    assert (sample["rate"], sample["label"]) == (16000, 3)


@pytest.mark.parametrize(
    ("spec", "operator", "says"),
    [
        ({"image": Field("image")}, DecodeAudio(), "needs the field 'audio'; the samples have image"),
        ({"image": Field("image")}, Mel(), "needs the field 'audio'; the samples have image"),
        (WAVEFORM, DecodeAudio(), "already"),
        (ENCODED, CropOrPad(5), r"put .decode_audio\(\) before"),
        (WAVEFORM, Resample(8000), "needs the field 'rate'"),
        (WAVEFORM, Spectrogram(n_fft=1024), "at least 513 samples and found 500"),
        ({"audio": Field("audio", (1, 201, 5), "float32")}, AddNoise((0, 1)), "waveforms"),
        ({"audio": Field("audio", (1, 5), "float64")}, AddNoise((0, 1)), "not float64"),
        ({"audio": Field("value", (), "int64")}, AddNoise((0, 1)), "of kind value"),
    ],
)
def test_a_chain_that_cannot_work_is_refused(spec: Spec, operator: Operator, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        Graph(Clips(spec), (operator,))


def test_what_is_not_known_beforehand_is_checked_on_the_sample() -> None:
    anything: Spec = {"audio": Field("any")}
    assert Graph(Clips(anything), (Resample(8000), CropOrPad(5), Spectrogram())).spec == anything
    for wrong in (np.zeros(5, np.float32), np.zeros((1, 5)), np.zeros((1, 0), np.float32), b"abc"):
        with pytest.raises(ValueError, match="float32 arrays"):
            CropOrPad(5, random=False).apply({"audio": wrong}, ())


@pytest.mark.parametrize(
    ("operator", "arguments", "says"),
    [
        (Resample, {"rate": 0}, "rate"),
        (Resample, {"rate": 16000.5}, "rate"),
        (CropOrPad, {"length": 0}, "length"),
        (CropOrPad, {"length": 5, "random": "yes"}, "random"),
        (AddNoise, {"snr_db": (20, 10)}, "low to high"),
        (AddNoise, {"snr_db": (0, math.inf)}, "snr_db"),
        (AddNoise, {"snr_db": 10}, "snr_db"),
        (DecodeAudio, {"mono": None}, "mono"),
        (Spectrogram, {"n_fft": 1}, "n_fft"),
        (Spectrogram, {"win_length": 401}, "longer than n_fft"),
        (Spectrogram, {"hop_length": 0}, "hop_length"),
        (Spectrogram, {"power": 0}, "power"),
        (Spectrogram, {"normalized": "sum"}, "normalized"),
        (Spectrogram, {"pad_mode": "mirror"}, "pad_mode"),
        (Mel, {"n_mels": 0}, "n_mels"),
        (Mel, {"f_min": 9000}, "f_min and f_max"),
        (Mel, {"norm": "sum"}, "norm"),
        (Mel, {"mel_scale": "bark"}, "mel_scale"),
    ],
)
def test_senseless_arguments_are_refused(operator: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        operator(**arguments)


def test_operators_are_named_as_users_write_them() -> None:
    made = [DecodeAudio(), Resample(1), CropOrPad(1), AddNoise((0, 1)), Spectrogram(), Mel()]
    assert [operator.name for operator in made] == [
        "decode_audio", "resample", "crop_or_pad", "add_noise", "spectrogram", "mel",
    ]  # fmt: skip
    assert all(isinstance(operator, AudioOperator) for operator in made[1:])
