"""Operators that cut, resize and mirror. Names, ranges and defaults are torchvision's; filters are antialiased.

What they do to an image is a `View`: a rectangle of it, resized, of which a window is kept, perhaps mirrored. Several
operators in a row often are one View, so a decoder that is handed the View can decode just what it needs (fuse.py).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.errors import GraphError
from penstock.graph import Units
from penstock.image import Boxes, ImageOperator, Pixels
from penstock.kernels.resample import FILTERS, resize

__all__ = ["CenterCrop", "Flip", "RandomCrop", "RandomResizedCrop", "Resize", "View"]

Size = int | tuple[int, int]


class View(NamedTuple):
    """Cut `box` from an image, resize that to height x width, keep `window`, mirror it. Rectangles: x0, y0, x1, y1."""

    box: tuple[int, int, int, int]
    height: int
    width: int
    filter: str
    window: tuple[int, int, int, int]
    flip: bool

    @classmethod
    def whole(cls, height: int, width: int) -> View:
        """The image as it is."""
        full = (0, 0, width, height)
        return cls(full, height, width, "nearest", full, False)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the result."""
        left, top, right, bottom = self.window
        return bottom - top, right - left

    @property
    def resizes(self) -> bool:
        """Pixels are mixed, not only moved."""
        left, top, right, bottom = self.box
        return (bottom - top, right - left) != (self.height, self.width)

    def crop(self, top: int, left: int, height: int, width: int) -> View:
        """A rectangle of this view, which must not be mirrored yet."""
        if not self.resizes:
            x, y = self.box[:2]
            box = (x + left, y + top, x + left + width, y + top + height)
            return View(box, height, width, self.filter, (0, 0, width, height), False)
        x, y = self.window[:2]
        return self._replace(window=(x + left, y + top, x + left + width, y + top + height))

    def pixels(self, image: Pixels) -> Pixels:
        """This view of an image; a numpy view of its memory where nothing is computed."""
        left, top, right, bottom = self.box
        image = image[top:bottom, left:right]
        if not self.resizes and not self.flip:
            return image
        return resize(image, self.height, self.width, self.filter, window=self.window, flip=self.flip)


@dataclass(frozen=True)
class Viewing(ImageOperator):
    """An operator that is a View, for most images or all."""

    @property
    def fusible(self) -> bool:
        """`view` gives a View for some images at least."""
        return True

    @abstractmethod
    def view(self, view: View, decision: Any) -> View | None:
        """This operator after a view of the image; None when it is none this time (a crop that pads)."""

    def pixels(self, image: Pixels, decision: Any) -> Pixels:
        view = self.view(View.whole(*image.shape[:2]), decision)
        assert view is not None, "operators that pad have pixels of their own"
        return view.pixels(image)


@dataclass(frozen=True)
class Resize(Viewing):
    """To a size: (height, width), or one number for the shorter side; the longer follows, to `max_size` at most."""

    to: Size
    interpolation: str = "bilinear"
    max_size: int | None = None

    def __post_init__(self) -> None:
        _check_size("resize", self.to)
        _check_filter("resize", self.interpolation)
        if self.max_size is not None:
            if not isinstance(self.to, int):
                raise GraphError(
                    "resize: max_size bounds the longer side, so size must be one number, the shorter side"
                )
            if not _whole(self.max_size) or self.max_size <= self.to:
                raise GraphError(f"resize: max_size must be a whole number above size {self.to}, not {self.max_size!r}")

    @property
    def name(self) -> str:
        return "resize"

    def decide(self, units: Units, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        if not isinstance(self.to, int):
            return self.to
        short, long = self.to, int(self.to * max(height, width) / min(height, width))
        if self.max_size is not None and long > self.max_size:
            short, long = int(self.max_size * short / long), self.max_size
        if short < 1:
            raise ValueError(f"resize: {height} x {width} pixels would become {short} x {long}")
        return (short, long) if height <= width else (long, short)

    def view(self, view: View, decision: tuple[int, int]) -> View:
        height, width = decision
        return view._replace(height=height, width=width, filter=self.interpolation, window=(0, 0, width, height))

    def boxes(self, boxes: Boxes, decision: tuple[int, int], height: int, width: int) -> Boxes:
        return _scaled(boxes, decision, height, width)

    def size(self, height: int | None, width: int | None) -> tuple[int | None, int | None]:
        if isinstance(self.to, int):
            return (None, None) if height is None or width is None else self.decide((), height, width)
        return self.to


@dataclass(frozen=True)
class CenterCrop(Viewing):
    """The middle, one number for a square. Images that are smaller are padded with zeros."""

    to: Size

    def __post_init__(self) -> None:
        _check_size("center_crop", self.to)

    @property
    def name(self) -> str:
        return "center_crop"

    def decide(self, units: Units, height: int, width: int) -> Padded:
        want_height, want_width = _pair(self.to)
        above, below = _centered(want_height - height)
        before, after = _centered(want_width - width)
        top = round((height + above + below - want_height) / 2)
        left = round((width + before + after - want_width) / 2)
        return Padded((before, above, after, below), top, left, want_height, want_width)

    def view(self, view: View, decision: Padded) -> View | None:
        return decision.view(view)

    def pixels(self, image: Pixels, decision: Padded) -> Pixels:
        return decision.pixels(image, "constant", 0)

    def boxes(self, boxes: Boxes, decision: Padded, height: int, width: int) -> Boxes:
        return decision.boxes(boxes)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        return _pair(self.to)


@dataclass(frozen=True)
class RandomCrop(Viewing):
    """A rectangle at a random place, after padding: by `padding` (one number, two: left/right and top/bottom, or four:
    left, top, right, bottom), then by what is missing if `pad_if_needed`."""

    to: Size
    padding: int | tuple[int, ...] | None = None
    pad_if_needed: bool = False
    fill: int | tuple[int, ...] = 0
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"

    def __post_init__(self) -> None:
        _check_size("random_crop", self.to)
        sides = (self.padding,) if isinstance(self.padding, int) else self.padding
        if sides is not None and not (len(sides) in (1, 2, 4) and all(_whole(side, 0) for side in sides)):
            raise GraphError(f"random_crop: padding must be 1, 2 or 4 whole numbers, not {self.padding!r}")
        fill = (self.fill,) if isinstance(self.fill, int) else self.fill
        if not (len(fill) in (1, 3) and all(_whole(value, 0) and value <= 255 for value in fill)):
            raise GraphError(f"random_crop: fill must be a number from 0 to 255 or three, not {self.fill!r}")
        if self.padding_mode not in ("constant", "edge", "reflect", "symmetric"):
            raise GraphError(
                f"random_crop: padding_mode must be 'constant', 'edge', 'reflect' or 'symmetric', "
                f"not {self.padding_mode!r}"
            )

    @property
    def name(self) -> str:
        return "random_crop"

    @property
    def units(self) -> int:
        return 2

    @property
    def fusible(self) -> bool:
        return not any(self._sides())

    def decide(self, units: Units, height: int, width: int) -> Padded:
        before, above, after, below = self._sides()
        want_height, want_width = _pair(self.to)
        if self.pad_if_needed:  # as torchvision: by what is missing, on both sides
            across = max(0, want_width - width - before - after)
            down = max(0, want_height - height - above - below)
            before, above, after, below = before + across, above + down, after + across, below + down
        spare_height = height + above + below - want_height
        spare_width = width + before + after - want_width
        if spare_height < 0 or spare_width < 0:
            raise ValueError(
                f"random_crop: the image has {height} x {width} pixels, fewer than the {want_height} x {want_width} "
                "wanted; set pad_if_needed=True or resize first"
            )
        top, left = int(units[0] * (spare_height + 1)), int(units[1] * (spare_width + 1))
        return Padded((before, above, after, below), top, left, want_height, want_width)

    def view(self, view: View, decision: Padded) -> View | None:
        return decision.view(view)

    def pixels(self, image: Pixels, decision: Padded) -> Pixels:
        return decision.pixels(image, self.padding_mode, self.fill)

    def boxes(self, boxes: Boxes, decision: Padded, height: int, width: int) -> Boxes:
        return decision.boxes(boxes)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        return _pair(self.to)

    def _sides(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        sides = (self.padding or 0,) if isinstance(self.padding, int | None) else self.padding
        left, top, right, bottom = (sides * 4)[:4]
        return left, top, right, bottom


@dataclass(frozen=True)
class RandomResizedCrop(Viewing):
    """A random rectangle of `scale` times the area and of `ratio` width to height, resized."""

    to: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check_size("random_resized_crop", self.to)
        _check_filter("random_resized_crop", self.interpolation)
        for what, limits in (("scale", self.scale), ("ratio", self.ratio)):
            if not (isinstance(limits, tuple) and len(limits) == 2 and 0 < limits[0] <= limits[1] < math.inf):
                raise GraphError(
                    f"random_resized_crop: {what} must be two positive numbers, the smaller first, not {limits!r}"
                )

    @property
    def name(self) -> str:
        return "random_resized_crop"

    @property
    def units(self) -> int:
        return 22  # ten attempts at a shape, then a place

    def decide(self, units: Units, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height, width of the rectangle."""
        low, high = self.scale
        log_low, log_high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(0, 20, 2):
            area = height * width * (low + (high - low) * units[attempt])
            ratio = math.exp(log_low + (log_high - log_low) * units[attempt + 1])
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(units[20] * (height - crop_height + 1))
                return top, int(units[21] * (width - crop_width + 1)), crop_height, crop_width
        return self._central(height, width)

    def _central(self, height: int, width: int) -> tuple[int, int, int, int]:
        """The middle, cut to the nearest ratio allowed."""
        crop_height, crop_width = height, width
        if width / height < self.ratio[0]:
            crop_height = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            crop_width = max(1, round(height * self.ratio[1]))
        return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width

    def view(self, view: View, decision: tuple[int, int, int, int]) -> View:
        height, width = _pair(self.to)
        cut = view.crop(*decision)
        return cut._replace(height=height, width=width, filter=self.interpolation, window=(0, 0, width, height))

    def boxes(self, boxes: Boxes, decision: tuple[int, int, int, int], height: int, width: int) -> Boxes:
        top, left, crop_height, crop_width = decision
        moved = _clipped(boxes - np.array([left, top, left, top], np.float32), crop_height, crop_width)
        return _scaled(moved, _pair(self.to), crop_height, crop_width)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        return _pair(self.to)


@dataclass(frozen=True)
class Flip(Viewing):
    """Mirrors with probability `p`: left and right ("horizontal") or up and down ("vertical")."""

    p: float = 0.5
    axis: Literal["horizontal", "vertical"] = "horizontal"

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p <= 1:
            raise GraphError(f"flip: p must be a probability from 0 to 1, not {self.p!r}")
        if self.axis not in ("horizontal", "vertical"):
            raise GraphError(f"flip: axis must be 'horizontal' or 'vertical', not {self.axis!r}")

    @property
    def name(self) -> str:
        return "flip"

    @property
    def units(self) -> int:
        return 1

    @property
    def fusible(self) -> bool:
        return self.axis == "horizontal"

    def decide(self, units: Units, height: int, width: int) -> bool:
        """Whether to mirror."""
        return units[0] < self.p

    def view(self, view: View, decision: bool) -> View:
        return view._replace(flip=view.flip != decision)

    def pixels(self, image: Pixels, decision: bool) -> Pixels:
        if decision and self.axis == "vertical":
            return np.ascontiguousarray(image[::-1])
        return super().pixels(image, decision)

    def boxes(self, boxes: Boxes, decision: bool, height: int, width: int) -> Boxes:
        if not decision:
            return boxes
        low, high, edge = (0, 2, width) if self.axis == "horizontal" else (1, 3, height)
        flipped = boxes.copy()
        flipped[:, low], flipped[:, high] = edge - boxes[:, high], edge - boxes[:, low]
        return flipped


class Padded(NamedTuple):
    """A rectangle of an image after padding it by `sides`: left, top, right, bottom."""

    sides: tuple[int, int, int, int]
    top: int
    left: int
    height: int
    width: int

    def view(self, view: View) -> View | None:
        """The rectangle as a View; None where padding may show."""
        return None if any(self.sides) else view.crop(self.top, self.left, self.height, self.width)

    def pixels(self, image: Pixels, mode: str, fill: int | tuple[int, ...]) -> Pixels:
        """Pad, then cut."""
        before, above, after, below = self.sides
        if any(self.sides):
            widths = ((above, below), (before, after), (0, 0))
            if mode == "constant":
                padded = np.empty(_padded_shape(image, self.sides), image.dtype)
                padded[:] = fill
                padded[above : above + image.shape[0], before : before + image.shape[1]] = image
                image = padded
            else:
                image = np.pad(image, widths, mode)  # type: ignore[call-overload]
        return image[self.top : self.top + self.height, self.left : self.left + self.width]

    def boxes(self, boxes: Boxes) -> Boxes:
        """Boxes shifted and clipped."""
        x, y = self.left - self.sides[0], self.top - self.sides[1]
        return _clipped(boxes - np.array([x, y, x, y], np.float32), self.height, self.width)


def _padded_shape(image: Pixels, sides: tuple[int, int, int, int]) -> tuple[int, int, int]:
    height, width, channels = image.shape
    return height + sides[1] + sides[3], width + sides[0] + sides[2], channels


def _centered(missing: int) -> tuple[int, int]:
    """Pixels to pad before and after."""
    return (missing // 2, (missing + 1) // 2) if missing > 0 else (0, 0)


def _clipped(boxes: Boxes, height: int, width: int) -> Boxes:
    return np.clip(boxes, 0, np.array([width, height, width, height], np.float32)).astype(np.float32)


def _scaled(boxes: Boxes, to: tuple[int, int], height: int, width: int) -> Boxes:
    x, y = to[1] / width, to[0] / height
    return (boxes * np.array([x, y, x, y], np.float32)).astype(np.float32)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_size(name: str, size: object) -> None:
    if _whole(size) or (isinstance(size, tuple) and len(size) == 2 and all(_whole(side) for side in size)):
        return
    raise GraphError(f"{name}: size must be a whole number of pixels or (height, width), not {size!r}")


def _check_filter(name: str, interpolation: object) -> None:
    if interpolation not in FILTERS:
        raise GraphError(f"{name}: interpolation must be one of {', '.join(FILTERS)}, not {interpolation!r}")
