"""What image operators share: decided from the image's size, applied to its pixels and its boxes alike."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GraphError
from penstock.graph import Field, Operator, Sample, Spec, Units

__all__ = ["Boxes", "ImageOperator", "Pixels", "boxes_of"]

Pixels = NDArray[Any]
"""HWC, RGB; uint8 until `normalize` makes it float32."""
Boxes = NDArray[np.float32]
"""[n, 4], as x0, y0, x1, y1 in pixels of the image."""


def boxes_of(sample: Sample) -> Boxes:
    """The sample's boxes, whatever they came as: lists from a table, integers, tensors; an empty list is no boxes."""
    boxes = np.asarray(sample["boxes"], np.float32)
    if boxes.shape in ((0,), (0, 0)):
        return np.zeros((0, 4), np.float32)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"boxes must be [n, 4], as x0, y0, x1, y1 in pixels; these are {list(boxes.shape)}")
    return boxes


@dataclass(frozen=True)
class ImageOperator(Operator):
    """An operator over the field `image`.

    `decide` is all that depends on chance and on the image's size, as plain numbers that any lane can apply.
    """

    @abstractmethod
    def decide(self, units: Units, height: int, width: int) -> Any:
        """The parameters for one image of this size."""

    @abstractmethod
    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        """The image after the operator. Never writes to its input."""

    def boxes(self, boxes: Boxes, decision: Any, height: int, width: int) -> Boxes:
        """The boxes after the operator, as many as before, clipped to the image. The size is that before."""
        return boxes

    def size(self, height: int | None, width: int | None) -> tuple[int | None, int | None]:
        """Height and width after the operator; None where they depend on the sample."""
        return height, width

    def check(self, spec: Spec) -> Spec:
        """Needs decoded uint8 pixels."""
        image = spec.get("image")
        if image is None:
            raise GraphError(f"{self.name} needs the field 'image'; the samples have {', '.join(spec) or 'no fields'}")
        if image.kind == "encoded":
            raise GraphError(f"{self.name} needs decoded pixels; put .decode() before it")
        spec = {**spec, "boxes": _boxes_field(self.name, spec["boxes"])} if "boxes" in spec else spec
        if image.kind == "any":
            return spec
        if image.dtype not in ("uint8", None):
            raise GraphError(f"{self.name} works on uint8 pixels, not {image.dtype}; put it before .normalize()")
        height, width, channels = image.shape or (None, None, None)
        return {**spec, "image": Field("image", (*self.size(height, width), channels), image.dtype)}

    def apply(self, sample: Sample, units: Units) -> Sample:
        """Decide, then change pixels and boxes alike."""
        image = sample["image"]
        if not isinstance(image, np.ndarray):
            raise TypeError(f"works on HWC numpy arrays, not {type(image).__name__}; give arrays or Pillow images")
        height, width = image.shape[:2]
        decision = self.decide(units, height, width)
        sample["image"] = self.pixels(image, decision)
        if "boxes" in sample:
            sample["boxes"] = self.boxes(boxes_of(sample), decision, height, width)
        return sample


def _boxes_field(name: str, found: Field) -> Field:
    """What the field is behind an operator that moves boxes."""
    if found.shape is not None and (len(found.shape) != 2 or found.shape[1] != 4):
        raise GraphError(f"{name}: boxes must be [n, 4], as x0, y0, x1, y1 in pixels; these are {list(found.shape)}")
    return Field("boxes", found.shape, "float32")
