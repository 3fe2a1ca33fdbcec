"""Operators that give what torchvision gives, where Penstock's own are stricter or round otherwise; for `lower`.

None of them needs torch: lowered pipelines run in workers that do not import it.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from penstock.augment import AutoAugment, RandAugment, TrivialAugment
from penstock.augment.steps import Span, magnitude
from penstock.decode import Decode, encoded
from penstock.fuse import DecodeCrop, fuse_decode
from penstock.graph import Graph, Sample, Spec, Units
from penstock.image import ImageOperator, Pixels
from penstock.kernels import jpeg
from penstock.kernels.levels import look_up
from penstock.kernels.pixels import Op, Step

__all__ = ["AutoAugmentV2", "DecodeAsPillow", "Levels", "RandAugmentV2", "TrivialAugmentV2", "fuse_as_pillow"]


@dataclass(frozen=True)
class DecodeAsPillow(Decode):
    """Decode whose pixels are those of Pillow's `open(...).convert("RGB")`, always.

    What the native decoder refuses and Pillow takes (a damaged JPEG whose end is invented) is Pillow's to decode, and
    16-bit gray is clipped, as Pillow clips it.
    """

    exif: bool = False

    def pixels(self, data: jpeg.Encoded) -> NDArray[np.uint8]:
        if self.header(encoded(data)) is not None:
            try:
                return super().pixels(data)
            except ValueError:
                pass
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data)) as image:
                    return np.array(image.convert("RGB"))
        except UnidentifiedImageError as error:
            raise ValueError("no format that Pillow reads recognises the data") from error
        except Exception as error:  # Pillow's decoders raise whatever their formats provoke
            raise ValueError(f"cannot decode the image: {error or type(error).__name__}") from error


@dataclass(frozen=True)
class DecodeCropAsPillow(DecodeCrop):
    """The same for a decode that was joined with crops."""

    def apply(self, sample: Sample, units: Units, out: NDArray[np.uint8] | None = None) -> Sample:
        data = sample["image"]
        try:
            return super().apply(sample, units, out)
        except ValueError:
            sample["image"] = data
            return self._one_by_one(sample, units, out)

    def _one_by_one(self, sample: Sample, units: Units, out: NDArray[np.uint8] | None) -> Sample:
        sample = self.decode.apply(sample, ())
        used = 0
        for crop in self.crops:
            sample = crop.apply(sample, units[used : used + crop.units])
            used += crop.units
        if out is not None:
            out[:] = sample["image"]
            sample["image"] = out
        return sample


def fuse_as_pillow(graph: Graph) -> Graph:
    """`fuse_decode` for graphs whose decode is `DecodeAsPillow`."""
    operators = [
        DecodeCropAsPillow(operator.decode, operator.crops) if isinstance(operator, DecodeCrop) else operator
        for operator in fuse_decode(graph).operators
    ]
    return replace(graph, operators=tuple(operators))


@dataclass(frozen=True)
class Levels(ImageOperator):
    """Each level of each channel becomes what a table holds for it: 3 x 256 float32, as bytes."""

    table: bytes

    name = "levels"

    @cached_property
    def entries(self) -> NDArray[np.float32]:
        """The table, read-only."""
        return np.frombuffer(self.table, np.float32).reshape(3, 256)

    def check(self, spec: Spec) -> Spec:
        """Needs decoded uint8 pixels; they become float32."""
        after = super().check(spec)
        image = after["image"]
        return after if image.kind == "any" else {**after, "image": replace(image, dtype="float32")}

    def decide(self, units: Units, height: int, width: int) -> None:
        """Nothing to decide."""

    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        return look_up(image, self.entries, planar=False)


@dataclass(frozen=True)
class RandAugmentV2(RandAugment):
    """torchvision's v2."""

    name = "rand_augment_v2"

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        return _thresholds_of_v2(super().decide(units, height, width), self.bins)


@dataclass(frozen=True)
class TrivialAugmentV2(TrivialAugment):
    """torchvision's v2."""

    name = "trivial_augment_v2"

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        return _thresholds_of_v2(super().decide(units, height, width), self.bins)


@dataclass(frozen=True)
class AutoAugmentV2(AutoAugment):
    """torchvision's v2."""

    name = "auto_augment_v2"

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        return _thresholds_of_v2(super().decide(units, height, width), _AUTO_BINS)


_AUTO_BINS = 10


def _thresholds_of_v2(steps: tuple[Step, ...], bins: int) -> tuple[Step, ...]:
    """v2 spaces the thresholds of Solarize from 1 to 0 and scales them; some then round to the next level."""
    if not any(op is Op.SOLARIZE for op, _ in steps):
        return steps
    first, second = ([magnitude(Span(top, 0.0), bin, bins, 0, 0) for bin in range(bins)] for top in (255.0, 1.0))
    scaled = {one: 255.0 * two for one, two in zip(first, second, strict=True)}
    return tuple((op, (scaled[of[0]],)) if op is Op.SOLARIZE else (op, of) for op, of in steps)
