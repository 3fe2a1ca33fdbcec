"""Operators over the field `audio`: decode, resample, crop, noise, spectrograms.

    ps.files("speech").decode_audio(mono=True).resample(16000).crop_or_pad(16000).add_noise((10, 30)).mel().batch(64)

A waveform is float32 [channels, time]; a spectrogram takes its place as float32 [channels, frequency, frames]. The
definitions and defaults are torchaudio's. Decoding needs the extra `penstock[audio]`, the rest does not.
"""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from penstock.errors import GraphError, MissingExtraError
from penstock.graph import Field, Operator, Sample, Spec, Units
from penstock.kernels import sound
from penstock.kernels.sound import Wave

__all__ = ["AddNoise", "AudioOperator", "CropOrPad", "DecodeAudio", "Mel", "Resample", "Spectrogram"]

PadMode = Literal["reflect", "constant", "replicate", "circular"]
Normalized = Literal["window", "frame_length"]

_NUMPY_PAD: dict[str, Any] = {"reflect": "reflect", "constant": "constant", "replicate": "edge", "circular": "wrap"}
_LOG_FLOOR = 1e-10
_READ_FRAMES = 1 << 20


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the wheel is there, libsndfile is not
        raise MissingExtraError(
            f"decode_audio needs soundfile, which did not import ({error}); pip install 'penstock[audio]'"
        ) from error
    return soundfile


def _whole(operator: str, name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GraphError(f"{operator}: {name} must be a whole number of at least {least}, not {value!r}")


def _choice(operator: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise GraphError(f"{operator}: {name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _audio(operator: str, spec: Spec) -> Field:
    if "audio" not in spec:
        raise GraphError(f"{operator} needs the field 'audio'; the samples have {', '.join(spec) or 'no fields'}")
    return spec["audio"]


@dataclass(frozen=True)
class DecodeAudio(Operator):
    """WAV, FLAC, OGG and what else libsndfile reads, to a waveform; the field `rate` holds its samples per second.

    Whole-number formats fill [-1, 1]; floating-point files keep their values. With `mono` the channels are averaged.
    A WAV, FLAC or OGG file that was cut short is an error; of other formats libsndfile gives what is there.
    """

    mono: bool = False

    def __post_init__(self) -> None:
        _choice(self.name, "mono", self.mono, (True, False))

    @property
    def name(self) -> str:
        return "decode_audio"

    def check(self, spec: Spec) -> Spec:
        audio = _audio(self.name, spec)
        if audio.kind not in ("encoded", "any"):
            raise GraphError(f"{self.name} needs encoded audio, but the field 'audio' is already of kind {audio.kind}")
        _soundfile()
        wave = Field("audio", (1 if self.mono else None, None), "float32")
        return {**spec, "audio": wave, "rate": Field("value", (), "int64")}

    def apply(self, sample: Sample, units: Units) -> Sample:
        wave, sample["rate"] = decode(sample["audio"])
        sample["audio"] = wave.mean(axis=0, keepdims=True) if self.mono else wave
        return sample


def decode(data: bytes | bytearray | memoryview) -> tuple[Wave, int]:
    """The waveform in an encoded file, and its rate. ValueError when there is none, or not all of it."""
    soundfile = _soundfile()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"expected the bytes of an audio file, found {type(data).__name__}")
    if len(data) == 0:
        raise ValueError("the file is empty")
    _refuse_cut(bytes(data))
    blocks: list[Wave] = []
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            # In blocks, since a damaged header may promise any length.
            while len(block := file.read(_READ_FRAMES, dtype="float32", always_2d=True)):
                blocks.append(block)
            rate = int(file.samplerate)
    except soundfile.SoundFileError as error:
        reason = getattr(error, "error_string", str(error))
        raise ValueError(f"libsndfile cannot decode these {len(data)} bytes: {reason}") from error
    if not blocks:
        raise ValueError("the file holds no samples")
    return np.ascontiguousarray(np.concatenate(blocks).T), rate


def _refuse_cut(data: bytes) -> None:
    """libsndfile reads a cut WAV or OGG file as a shorter one; here it is an error."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        _refuse_cut_wav(data)
    elif data[:4] == b"OggS":
        _refuse_cut_ogg(data)


def _refuse_cut_wav(data: bytes) -> None:
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] == b"data":
            there = len(data) - place - 8
            # A writer that streams leaves 0xFFFFFFFF, or 0x7FFFFFFF and thereabouts.
            if there < size < 0x7FFFF000:
                raise ValueError(f"the WAV file is cut short: {size} bytes of samples promised, {there} are there")
            return
        place += 8 + size + size % 2


def _refuse_cut_ogg(data: bytes) -> None:
    place = 0
    while place < len(data) and data[place : place + 4] == b"OggS":
        segments = data[place + 26] if place + 26 < len(data) else 255
        lacing = data[place + 27 : place + 27 + segments]
        place += 27 + segments + sum(lacing)
        if place > len(data):
            raise ValueError(f"the OGG file is cut short: its last page needs {place - len(data)} more bytes")


@dataclass(frozen=True)
class AudioOperator(Operator):
    """An operator over waveforms. `decide` is all that depends on chance, length and rate, as plain values."""

    def decide(self, units: Units, length: int, rate: int | None) -> Any:
        """The parameters for one waveform; ValueError where its rate does not suit. The rate is None when unknown."""
        return None

    @abstractmethod
    def change(self, wave: Wave, decision: Any) -> Wave:
        """The audio after the operator. Never writes to its input, which is contiguous."""

    def shape(self, channels: int | None, length: int | None) -> tuple[int | None, ...]:
        """The shape after the operator; None where it depends on the sample."""
        return channels, length

    def check(self, spec: Spec) -> Spec:
        """Needs a decoded waveform."""
        audio = _audio(self.name, spec)
        if audio.kind == "encoded":
            raise GraphError(f"{self.name} needs a decoded waveform; put .decode_audio() before it")
        if audio.kind == "any":
            return spec
        if audio.kind != "audio":
            raise GraphError(f"{self.name} works on audio, but the field 'audio' is of kind {audio.kind}")
        if audio.shape is not None and len(audio.shape) != 2:
            raise GraphError(f"{self.name} works on waveforms [channels, time], not on shape {audio.shape}")
        if audio.dtype not in ("float32", None):
            raise GraphError(f"{self.name} works on float32 waveforms, not {audio.dtype}")
        channels, length = audio.shape or (None, None)
        return {**spec, "audio": Field("audio", self.shape(channels, length), "float32")}

    def apply(self, sample: Sample, units: Units) -> Sample:
        """Decide, then change the waveform."""
        wave = sample["audio"]
        if not isinstance(wave, np.ndarray) or wave.ndim != 2 or wave.dtype != np.float32 or 0 in wave.shape:
            found = f"{wave.dtype} of shape {wave.shape}" if isinstance(wave, np.ndarray) else type(wave).__name__
            raise ValueError(f"{self.name} works on float32 arrays [channels, time] that hold samples, not {found}")
        decision = self.decide(units, wave.shape[1], sample.get("rate"))
        sample["audio"] = self.change(np.ascontiguousarray(wave), decision)
        return sample


@dataclass(frozen=True)
class Resample(AudioOperator):
    """To `rate` samples per second, as torchaudio.functional.resample does it (Hann-windowed sinc, six crossings)."""

    rate: int

    def __post_init__(self) -> None:
        _whole(self.name, "rate", self.rate)

    @property
    def name(self) -> str:
        return "resample"

    def shape(self, channels: int | None, length: int | None) -> tuple[int | None, ...]:
        return channels, None

    def check(self, spec: Spec) -> Spec:
        spec = super().check(spec)
        if "rate" not in spec and spec["audio"].kind != "any":
            raise GraphError("resample needs the field 'rate', the samples per second; .decode_audio() gives it")
        return spec

    def decide(self, units: Units, length: int, rate: int | None) -> int:
        """The rate to come from."""
        if not isinstance(rate, int | np.integer) or rate < 1:
            raise ValueError(f"resample needs the samples per second in the field 'rate', a whole number, not {rate!r}")
        return int(rate)

    def change(self, wave: Wave, decision: int) -> Wave:
        return wave if decision == self.rate else sound.resample(wave, decision, self.rate)

    def apply(self, sample: Sample, units: Units) -> Sample:
        sample = super().apply(sample, units)
        sample["rate"] = self.rate
        return sample


@dataclass(frozen=True)
class CropOrPad(AudioOperator):
    """Exactly `length` samples: longer clips lose their ends (at a random place, or `random=False`: keep the
    beginning), shorter ones end in zeros."""

    length: int
    random: bool = True

    def __post_init__(self) -> None:
        _whole(self.name, "length", self.length)
        _choice(self.name, "random", self.random, (True, False))

    @property
    def name(self) -> str:
        return "crop_or_pad"

    @property
    def units(self) -> int:
        return int(self.random)

    def shape(self, channels: int | None, length: int | None) -> tuple[int | None, ...]:
        return channels, self.length

    def decide(self, units: Units, length: int, rate: int | None) -> int:
        """The first sample to keep; every place is equally likely."""
        spare = max(0, length - self.length)
        return min(spare, int(units[0] * (spare + 1))) if self.random else 0

    def change(self, wave: Wave, decision: int) -> Wave:
        out = np.zeros((wave.shape[0], self.length), np.float32)
        kept = wave[:, decision : decision + self.length]
        out[:, : kept.shape[1]] = kept
        return out


@dataclass(frozen=True)
class AddNoise(AudioOperator):
    """White Gaussian noise at a signal-to-noise ratio drawn evenly from `snr_db`, in decibels.

    The signal's power is its mean square over all channels, so silence stays silent. The first draw gives the ratio,
    the second the noise's key, floor(draw * 2^53), from which `ps_add_noise` in native/sound.c makes the noise: its
    recipe stands there, so that any lane can repeat it.
    """

    snr_db: tuple[float, float]

    def __post_init__(self) -> None:
        pair = self.snr_db
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(_finite(value) for value in pair):
            raise GraphError(f"{self.name}: snr_db must be a pair of decibels (low, high), not {pair!r}")
        if pair[0] > pair[1]:
            raise GraphError(f"{self.name}: snr_db runs from low to high, not {pair!r}")
        object.__setattr__(self, "snr_db", (float(pair[0]), float(pair[1])))

    @property
    def name(self) -> str:
        return "add_noise"

    @property
    def units(self) -> int:
        return 2

    def decide(self, units: Units, length: int, rate: int | None) -> tuple[float, int]:
        """The ratio in decibels, and the key."""
        low, high = self.snr_db
        return low + (high - low) * units[0], int(units[1] * 2.0**53)

    def change(self, wave: Wave, decision: tuple[float, int]) -> Wave:
        snr_db, key = decision
        deviation = math.sqrt(sound.mean_square(wave)) * 10.0 ** (-snr_db / 20)
        return sound.add_noise(wave, key, deviation)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class _Framed(AudioOperator):
    """What the spectral operators share: the arguments of torchaudio's Spectrogram, with its defaults."""

    n_fft: int = 400
    win_length: int | None = None
    hop_length: int | None = None
    power: float = 2.0
    normalized: bool | Normalized = False
    center: bool = True
    pad_mode: PadMode = "reflect"

    def __post_init__(self) -> None:
        _whole(self.name, "n_fft", self.n_fft, least=2)
        if self.win_length is not None:
            _whole(self.name, "win_length", self.win_length, least=2)
            if self.win_length > self.n_fft:
                raise GraphError(f"{self.name}: win_length {self.win_length} is longer than n_fft {self.n_fft}")
        if self.hop_length is not None:
            _whole(self.name, "hop_length", self.hop_length)
        if not _finite(self.power) or self.power <= 0:
            raise GraphError(f"{self.name}: power must be a positive number (2 for power, 1 for magnitude)")
        _choice(self.name, "normalized", self.normalized, (True, False, *get_args(Normalized)))
        _choice(self.name, "center", self.center, (True, False))
        _choice(self.name, "pad_mode", self.pad_mode, get_args(PadMode))

    @property
    def stft(self) -> sound.Stft:
        """The arguments, spelled out."""
        win_length = self.win_length or self.n_fft
        return sound.Stft(
            self.n_fft,
            win_length,
            self.hop_length or win_length // 2,
            _NUMPY_PAD[self.pad_mode] if self.center else None,
            "window" if self.normalized is True else self.normalized or None,
        )

    @property
    def rows(self) -> int:
        """Frequencies that come out."""
        return self.n_fft // 2 + 1

    def shape(self, channels: int | None, length: int | None) -> tuple[int | None, ...]:
        if length is not None and length < self.stft.shortest():
            raise GraphError(f"{self.name} {self._too_short(length)}")
        return channels, self.rows, None if length is None else self.stft.frames(length)

    def decide(self, units: Units, length: int, rate: int | None) -> None:
        if length < self.stft.shortest():
            raise ValueError(self._too_short(length))

    def change(self, wave: Wave, decision: None) -> Wave:
        return sound.spectrum(wave, self.stft, self.power)

    def _too_short(self, length: int) -> str:
        remedy = "lengthen it with .crop_or_pad(), or choose pad_mode='constant'"
        return f"needs at least {self.stft.shortest()} samples and found {length}; {remedy}"


@dataclass(frozen=True, kw_only=True)
class Spectrogram(_Framed):
    """|short-time Fourier transform|^power under a periodic Hann window, as torchaudio's Spectrogram."""

    @property
    def name(self) -> str:
        return "spectrogram"


@dataclass(frozen=True)
class Mel(_Framed):
    """A spectrogram through triangular filters, as torchaudio's MelSpectrogram.

    `rate` is the rate the filters are made for; a sample of another rate is an error. With `log` the result is the
    natural logarithm of values of at least 1e-10.
    """

    rate: int = 16000
    n_mels: int = field(default=128, kw_only=True)
    f_min: float = field(default=0.0, kw_only=True)
    f_max: float | None = field(default=None, kw_only=True)
    norm: Literal["slaney"] | None = field(default=None, kw_only=True)
    mel_scale: sound.Scale = field(default="htk", kw_only=True)
    log: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self.name, "rate", self.rate, least=2)
        _whole(self.name, "n_mels", self.n_mels)
        top = self.rate // 2 if self.f_max is None else self.f_max
        if not _finite(self.f_min) or not _finite(top) or not 0 <= self.f_min < top:
            raise GraphError(f"{self.name}: f_min and f_max must rise from 0 hertz on, not {self.f_min!r} to {top!r}")
        _choice(self.name, "norm", self.norm, (None, "slaney"))
        _choice(self.name, "mel_scale", self.mel_scale, get_args(sound.Scale))
        _choice(self.name, "log", self.log, (True, False))

    @property
    def name(self) -> str:
        return "mel"

    @property
    def rows(self) -> int:
        return self.n_mels

    @property
    def bank(self) -> sound.MelBank:
        """The filters."""
        top = float(self.rate // 2 if self.f_max is None else self.f_max)
        return sound.mel_bank(
            self.rate, self.n_fft // 2 + 1, self.n_mels, float(self.f_min), top, self.norm, self.mel_scale
        )

    def decide(self, units: Units, length: int, rate: int | None) -> None:
        if rate is not None and rate != self.rate:
            raise ValueError(
                f"expected {self.rate} samples per second, found {rate}; put .resample({self.rate}) before .mel(), "
                f"or write .mel(rate={rate})"
            )
        super().decide(units, length, rate)

    def change(self, wave: Wave, decision: None) -> Wave:
        out = sound.mel(super().change(wave, decision), self.bank)
        if self.log:
            sound.logarithm(out, _LOG_FLOOR)
        return out
