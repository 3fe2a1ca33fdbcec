"""The stem of a pipeline: decoding and what follows it without chance. Its pixels can be kept and used in every epoch.

    found = stem(graph)              # pure; a text says why there is none
    sample = found.grown(sample)     # encoded to pixels, as the operators of the graph do it; None where it cannot be
    for operator in found.rest: ...  # what is left to do in every epoch, with the same draws

The law, which tests/test_stem.py checks: the rest applied to what the stem gives is the graph applied to the sample,
bit for bit. A sample whose stem cannot be had (its data is damaged where the graph may not look) is the graph's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.crop import Viewing
from penstock.decode import Decode, encoded
from penstock.fuse import DecodeCrop, joint_view, one_view
from penstock.graph import Graph, Operator, Sample, Spec, Units

__all__ = ["Cut", "Stem", "stem"]


@dataclass(frozen=True)
class Cut(Operator):
    """A chain of crops, one resize and a mirroring of decoded images, done at once.

    The image that comes out shares no memory with the one that went in.
    """

    crops: tuple[Viewing, ...]

    @property
    def name(self) -> str:
        return "+".join(crop.name for crop in self.crops) or "copy"

    @property
    def units(self) -> int:
        return sum(crop.units for crop in self.crops)

    def check(self, spec: Spec) -> Spec:
        for crop in self.crops:
            spec = crop.check(spec)
        return spec

    def apply(self, sample: Sample, units: Units) -> Sample:
        image: NDArray[np.uint8] = sample["image"]
        view = joint_view(self.crops, sample, units, *image.shape[:2])
        if view is None:
            sample = self._one_by_one(sample, units)
        else:
            sample["image"] = view.pixels(image)
        if np.may_share_memory(sample["image"], image):
            sample["image"] = sample["image"].copy()
        return sample

    def _one_by_one(self, sample: Sample, units: Units) -> Sample:
        used = 0
        for crop in self.crops:
            sample = crop.apply(sample, units[used : used + crop.units])
            used += crop.units
        return sample


@dataclass(frozen=True)
class Stem:
    """What of a pipeline is done once, and what is left of it."""

    decode: Decode
    certain: tuple[Viewing, ...]
    rest: tuple[Operator, ...]
    """Begins with a Cut, the only one of them that sees the pixels that are kept."""

    @property
    def name(self) -> str:
        """The operators that are done once."""
        return "+".join(operator.name for operator in (self.decode, *self.certain))

    @property
    def identity(self) -> str:
        """Changes with the pixels that the stem gives."""
        return repr((self.decode, self.certain))

    @cached_property
    def grow(self) -> tuple[Operator, ...]:
        """The operators that are done once, joined."""
        view = _run(self.certain)
        return DecodeCrop(self.decode, view), *self.certain[len(view) :]

    def grown(self, sample: Sample) -> Sample | None:
        """The sample with pixels in place of its encoded image; the one given stays as it is. None where the data
        cannot be decoded as far as that takes: the graph may need less of it, and has words for it."""
        after = dict(sample)
        try:
            for operator in self.grow:
                after = operator.apply(after, ())
        except (ValueError, MemoryError):
            return None
        return after

    def size(self, sample: Sample) -> int | None:
        """Bytes of the pixels that a sample will have, from its header alone; None where that does not tell."""
        try:
            head = self.decode.header(encoded(sample["image"]))
        except ValueError:
            return None
        if head is None:
            return None
        size: tuple[int | None, int | None] = (head.height, head.width)
        if head.orientation > 4:
            size = (head.width, head.height)
        for crop in self.certain:
            size = crop.size(*size)
        height, width = size
        return None if height is None or width is None else height * width * self.decode.channels


def stem(graph: Graph) -> Stem | str:
    """The stem of a graph; or why it has none."""
    first = graph.operators[0] if graph.operators else None
    if not isinstance(first, Decode | DecodeCrop):
        return "the pipeline does not begin with decode"
    decode, crops = (first, ()) if isinstance(first, Decode) else (first.decode, first.crops)
    chain: tuple[Operator, ...] = (*crops, *graph.operators[1:])
    certain: list[Viewing] = []
    for operator in chain:
        if not isinstance(operator, Viewing) or operator.units:
            break
        certain.append(operator)
    rest = chain[len(certain) :]
    cut = _run(rest)
    return Stem(decode, tuple(certain), (Cut(cut), *rest[len(cut) :]))


def _run(chain: Sequence[Operator]) -> tuple[Viewing, ...]:
    """As much of a chain's beginning as can be one View."""
    run: list[Viewing] = []
    for operator in chain:
        if not (isinstance(operator, Viewing) and operator.fusible and one_view((*run, operator))):
            break
        run.append(operator)
    return tuple(run)
