"""Joins decoding with the crops and resizes that follow, so that only the pixels that are kept get decoded.

`fuse_decode` is a pass over the graph. The joined operator takes the same draws in the same order, and its result is
bit for bit that of the operators one by one: a law that tests/test_fuse.py checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.crop import Flip, RandomResizedCrop, Resize, View, Viewing
from penstock.decode import Decode, encoded, oriented, stored_box
from penstock.graph import Graph, Operator, Sample, Spec, Units
from penstock.image import boxes_of
from penstock.kernels import jpeg

__all__ = ["DecodeCrop", "fuse_decode", "joint_view", "one_view"]


def joint_view(crops: Sequence[Viewing], sample: Sample, units: Units, height: int, width: int) -> View | None:
    """What a chain of crops keeps of an upright image of this size; the sample's boxes follow. None, and nothing is
    done, where that is no View."""
    view, boxes = View.whole(height, width), boxes_of(sample) if "boxes" in sample else None
    used = 0
    for crop in crops:
        decision = crop.decide(units[used : used + crop.units], height, width)
        used += crop.units
        after = crop.view(view, decision)
        if after is None:
            return None
        if boxes is not None:
            boxes = crop.boxes(boxes, decision, height, width)
        view = after
        height, width = view.size
    if boxes is not None:
        sample["boxes"] = boxes
    return view


@dataclass(frozen=True)
class DecodeCrop(Operator):
    """Decodes what a chain of crops, one resize and a mirroring leaves of an image."""

    decode: Decode
    crops: tuple[Viewing, ...]

    @property
    def name(self) -> str:
        return "+".join(operator.name for operator in (self.decode, *self.crops))

    @property
    def units(self) -> int:
        return sum(crop.units for crop in self.crops)

    def check(self, spec: Spec) -> Spec:
        for operator in (self.decode, *self.crops):
            spec = operator.check(spec)
        return spec

    def apply(self, sample: Sample, units: Units, out: NDArray[np.uint8] | None = None) -> Sample:
        """As the operators one by one; the image is written into `out` if that is given."""
        data = encoded(sample["image"])
        head = self.decode.header(data)
        if head is None or not self._apply_region(sample, data, head, units, out):
            self._apply_whole(sample, data, units, out)
        return sample

    def _apply_region(
        self, sample: Sample, data: jpeg.Encoded, head: jpeg.Header, units: Units, out: NDArray[np.uint8] | None
    ) -> bool:
        """False when the crops are no View of this image, and nothing was done."""
        height, width = (head.height, head.width) if head.orientation < 5 else (head.width, head.height)
        view = self.view(sample, units, height, width)
        if view is None:
            return False
        sample["image"] = self._decode(data, head, view, out)
        return True

    def view(self, sample: Sample, units: Units, height: int, width: int) -> View | None:
        """What the crops keep of an upright image of this size; the sample's boxes follow. None, and nothing is done,
        where that is no View."""
        return joint_view(self.crops, sample, units, height, width)

    def _decode(
        self, data: jpeg.Encoded, head: jpeg.Header, view: View, out: NDArray[np.uint8] | None
    ) -> NDArray[np.uint8]:
        channels = self.decode.channels
        if head.orientation == 1:
            return jpeg.decode_resized(
                data, view.box, view.height, view.width, view.filter, view.window, view.flip, channels, out
            )
        box = stored_box(view.box, head.orientation, head.height, head.width)
        image = oriented(jpeg.decode(data, box, channels), head.orientation)
        cut = view._replace(box=(0, 0, image.shape[1], image.shape[0])).pixels(image)
        return _placed(cut, out)

    def _apply_whole(self, sample: Sample, data: jpeg.Encoded, units: Units, out: NDArray[np.uint8] | None) -> None:
        sample["image"] = self.decode.pixels(data)
        used = 0
        for crop in self.crops:
            crop.apply(sample, units[used : used + crop.units])
            used += crop.units
        sample["image"] = _placed(sample["image"], out)


def _placed(image: NDArray[np.uint8], out: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if out is None:
        return image
    out[:] = image
    return out


def fuse_decode(graph: Graph) -> Graph:
    """The graph with every decode joined to what it can be joined to."""
    operators: list[Operator] = []
    for operator in graph.operators:
        last = operators[-1] if operators else None
        if isinstance(last, Decode | DecodeCrop) and isinstance(operator, Viewing):
            decode, crops = (last, ()) if isinstance(last, Decode) else (last.decode, last.crops)
            if operator.fusible and one_view((*crops, operator)):
                operators[-1] = DecodeCrop(decode, (*crops, operator))
                continue
        operators.append(operator)
    return replace(graph, operators=tuple(operators))


def one_view(crops: tuple[Viewing, ...]) -> bool:
    """A chain can be one View: one resize at most, and nothing after a mirroring."""
    resizes = sum(isinstance(crop, Resize | RandomResizedCrop) for crop in crops)
    return resizes <= 1 and not any(isinstance(crop, Flip) for crop in crops[:-1])
