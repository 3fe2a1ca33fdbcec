"""What users write: sources, and the chain of operators behind them. Every method returns a new pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.audio import AddNoise, CropOrPad, DecodeAudio, Mel, Resample, Spectrogram
from penstock.augment import AutoAugment, ColorJitter, Cutout, DeepAutoAugment, Normalize, RandAugment, TrivialAugment
from penstock.augment.base import Fill, Interpolation
from penstock.augment.colour import Range
from penstock.augment.deep import DeepPolicy
from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize, Size
from penstock.decode import Decode
from penstock.graph import Batch, Graph, Operator, Source
from penstock.opaque import Map
from penstock.read import Arrays, Dataset, Files, Parquet, Tars
from penstock.read.files import Labels
from penstock.read.patterns import Pattern
from penstock.read.storage import Options

__all__ = ["Pipe", "arrays", "dataset", "files", "parquet", "source", "tars"]


@dataclass(frozen=True)
class Pipe:
    """A pipeline: a source, operators, and last a batch. Immutable; checked as it is written."""

    graph: Graph
    notes: tuple[str, ...] = ()
    """What `Loader.explain()` says of where the pipe comes from."""

    def then(self, operator: Operator) -> Pipe:
        """The pipe with an operator of your own at its end."""
        return replace(self, graph=self.graph.then(operator))

    def batch(self, size: int, drop_last: bool = False, ragged: Literal["error", "pad", "list"] = "error") -> Pipe:
        """Gather samples into batches of `size`, per rank.

        Fields whose shapes differ within a batch are an error, or are padded with zeros at their ends (the field
        `NAME_shape` then holds each sample's own shape), or become lists of tensors.
        """
        return replace(self, graph=self.graph.batched(Batch(size, drop_last, ragged)))

    def map(self, fn: Callable[[Any], Any], field: str | None = None) -> Pipe:
        """Call a function with every sample (a dict, to be returned), or with one field's value.

        `random`, `numpy.random` and `torch` are seeded for every sample, so results do not depend on who calls it.
        """
        return self.then(Map(fn, field))

    # images

    def decode(self, mode: Literal["RGB", "L"] = "RGB", exif: bool = True) -> Pipe:
        """Decode images to HWC uint8, upright by their EXIF orientation unless `exif` is False."""
        return self.then(Decode(mode, exif))

    def resize(self, size: Size, interpolation: str = "bilinear", max_size: int | None = None) -> Pipe:
        """Resize, antialiased: to (height, width), or the shorter side to a number."""
        return self.then(Resize(size, interpolation, max_size))

    def center_crop(self, size: Size) -> Pipe:
        """Cut out the middle; smaller images are padded with zeros."""
        return self.then(CenterCrop(size))

    def random_crop(
        self,
        size: Size,
        padding: int | tuple[int, ...] | None = None,
        pad_if_needed: bool = False,
        fill: int | tuple[int, ...] = 0,
        padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant",
    ) -> Pipe:
        """Cut out a part of this size from anywhere, after padding if asked."""
        return self.then(RandomCrop(size, padding, pad_if_needed, fill, padding_mode))

    def random_resized_crop(
        self,
        size: Size,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
    ) -> Pipe:
        """Cut out a part of random area and aspect ratio and resize it, antialiased."""
        return self.then(RandomResizedCrop(size, scale, ratio, interpolation))

    def flip(self, p: float = 0.5, axis: Literal["horizontal", "vertical"] = "horizontal") -> Pipe:
        """Mirror with probability `p`."""
        return self.then(Flip(p, axis))

    def color_jitter(
        self, brightness: Range = 0.0, contrast: Range = 0.0, saturation: Range = 0.0, hue: Range = 0.0
    ) -> Pipe:
        """Change brightness, contrast, saturation and hue by random factors, in random order."""
        return self.then(ColorJitter(brightness, contrast, saturation, hue))

    def rand_augment(
        self, n: int = 2, m: int = 9, bins: int = 31, interpolation: Interpolation = "nearest", fill: Fill = None
    ) -> Pipe:
        """RandAugment: `n` random operators of magnitude `m`."""
        return self.then(RandAugment(n, m, bins, interpolation=interpolation, fill=fill))

    def auto_augment(
        self,
        policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet",
        interpolation: Interpolation = "nearest",
        fill: Fill = None,
    ) -> Pipe:
        """AutoAugment with one of its learned policies."""
        return self.then(AutoAugment(policy, interpolation=interpolation, fill=fill))

    def trivial_augment(self, bins: int = 31, interpolation: Interpolation = "nearest", fill: Fill = None) -> Pipe:
        """TrivialAugment (wide): one random operator of random magnitude."""
        return self.then(TrivialAugment(bins, interpolation=interpolation, fill=fill))

    def deep_auto_augment(
        self, policy: DeepPolicy, interpolation: Interpolation = "nearest", fill: Fill = None
    ) -> Pipe:
        """Deep AutoAugment: one operator from each layer of a policy."""
        return self.then(DeepAutoAugment(policy, interpolation=interpolation, fill=fill))

    def cutout(self, size: int, n: int = 1, fill: Fill = 0) -> Pipe:
        """Cover `n` squares at random places."""
        return self.then(Cutout(size, n, fill))

    def normalize(self, mean: Sequence[float], std: Sequence[float]) -> Pipe:
        """To float32: (level / 255 - mean) / std, by channel."""
        return self.then(Normalize(tuple(mean), tuple(std)))

    # audio

    def decode_audio(self, mono: bool = False) -> Pipe:
        """Decode WAV, FLAC or OGG to float32 [channels, time], with the field `rate`."""
        return self.then(DecodeAudio(mono))

    def resample(self, rate: int) -> Pipe:
        """Resample a waveform to `rate` samples per second, as torchaudio does."""
        return self.then(Resample(rate))

    def crop_or_pad(self, length: int, random: bool = True) -> Pipe:
        """Cut a waveform to `length` samples, at random or from its start; pad shorter ones with zeros."""
        return self.then(CropOrPad(length, random))

    def add_noise(self, snr_db: tuple[float, float]) -> Pipe:
        """Add white noise at a random signal-to-noise ratio within the range, in decibels."""
        return self.then(AddNoise(snr_db))

    def spectrogram(self, n_fft: int = 400, **options: Any) -> Pipe:
        """Short-time Fourier transform; arguments and defaults of torchaudio's Spectrogram."""
        return self.then(Spectrogram(n_fft=n_fft, **options))

    def mel(self, rate: int = 16000, **options: Any) -> Pipe:
        """Mel spectrogram; arguments and defaults of torchaudio's MelSpectrogram."""
        return self.then(Mel(rate=rate, **options))


def source(source: Source) -> Pipe:
    """A pipe from a source of your own."""
    return Pipe(Graph(source))


def files(
    root: Pattern | Iterable[Pattern],
    labels: Labels = "auto",
    *,
    field: Literal["image", "audio"] = "image",
    extensions: Sequence[str] | None = None,
    storage_options: Options | None = None,
) -> Pipe:
    """Image or audio files: a folder with one sub-folder per class, a folder without, or a list of paths or URLs."""
    return source(Files(root, labels, field=field, extensions=extensions, storage_options=storage_options))


def tars(
    pattern: Pattern | Iterable[Pattern],
    *,
    fields: Sequence[str] | None = None,
    storage_options: Options | None = None,
) -> Pipe:
    """Samples in tar files after WebDataset's convention: "shard-{000..012}.tar", globs, lists, URLs."""
    return source(Tars(pattern, fields=fields, storage_options=storage_options))


def parquet(
    path: Pattern | Iterable[Pattern],
    image: str | None = "image",
    label: str | None = "label",
    *,
    audio: str | None = None,
    columns: Sequence[str] = (),
    keep_bytes: int = 64 << 20,
    storage_options: Options | None = None,
) -> Pipe:
    """Rows of Parquet files; encoded images in a binary column, or one of Hugging Face's image columns."""
    return source(
        Parquet(
            path, image, label, audio=audio, columns=columns, keep_bytes=keep_bytes, storage_options=storage_options
        )
    )


def arrays(**fields: Any) -> Pipe:
    """Arrays or tensors of equal length, one row per sample; `image` holds HWC pixels."""
    return source(Arrays(**fields))


def dataset(dataset: Any, fields: Sequence[str] | None = None) -> Pipe:
    """Any map-style dataset; its samples' entries become fields, (image, label) unless named otherwise."""
    return source(Dataset(dataset, fields))
