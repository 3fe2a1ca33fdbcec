"""Encoded images to pixels: JPEG through the native decoder, everything else that Pillow reads through Pillow.

The pixels are those of Pillow's `Image.open(...).convert(mode)`, and what makes that raise is a ValueError here. A JPEG
is also refused where its data is corrupt and libjpeg would invent pixels, as far as it is decoded: a decoder that needs
a part of an image (see fuse.py) does not look at what follows that part, except that a file without an end-of-image
marker always goes to Pillow whole.

Transparency is dropped, palettes are resolved, 16-bit gray is scaled to 8 bits (Pillow alone would clip it).
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from penstock.errors import GraphError
from penstock.graph import Field, Operator, Sample, Spec, Units
from penstock.kernels import jpeg

__all__ = ["Decode", "oriented", "stored_box"]

_ORIENTATION = 0x0112

_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
"""Exif orientation to: transpose, after mirroring the stored rows, the stored columns."""


def oriented(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The stored pixels the way up they are meant: Pillow's `ImageOps.exif_transpose`."""
    transpose, rows, columns = _TURNS[orientation]
    image = image[:: -1 if rows else 1, :: -1 if columns else 1]
    return np.ascontiguousarray(image.transpose(1, 0, 2) if transpose else image)


def stored_box(box: jpeg.Box, orientation: int, height: int, width: int) -> jpeg.Box:
    """Where a box of the oriented image lies in the stored one, whose height and width are given."""
    transpose, rows, columns = _TURNS[orientation]
    left, top, right, bottom = box
    if transpose:
        left, top, right, bottom = top, left, bottom, right
    if rows:
        top, bottom = height - bottom, height - top
    if columns:
        left, right = width - right, width - left
    return left, top, right, bottom


@dataclass(frozen=True)
class Decode(Operator):
    """Decodes the field `image`.

    `mode` is "RGB" (three channels) or "L" (one). `exif` turns the image as its Exif orientation says; without it the
    pixels stay as stored, which is what torchvision's ImageFolder gives.
    """

    mode: Literal["RGB", "L"] = "RGB"
    exif: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("RGB", "L"):
            raise GraphError(f"decode: mode must be 'RGB' or 'L', not {self.mode!r}")
        if not isinstance(self.exif, bool):
            raise GraphError(f"decode: exif must be True or False, not {self.exif!r}")

    @property
    def name(self) -> str:
        return "decode"

    @property
    def channels(self) -> int:
        """Channels of the decoded image."""
        return 3 if self.mode == "RGB" else 1

    def check(self, spec: Spec) -> Spec:
        image = spec.get("image")
        if image is None:
            raise GraphError(f"decode needs the field 'image'; the samples have {', '.join(spec) or 'no fields'}")
        if image.kind not in ("encoded", "any"):
            raise GraphError(f"decode needs encoded images; 'image' is {image.kind} already, so leave decode out")
        return {**spec, "image": Field("image", (None, None, self.channels), "uint8")}

    def apply(self, sample: Sample, units: Units) -> Sample:
        sample["image"] = self.pixels(encoded(sample["image"]))
        return sample

    def pixels(self, data: jpeg.Encoded) -> NDArray[np.uint8]:
        """The whole image, HWC."""
        head = self.header(data)
        if head is None:
            return self._by_pillow(data)
        whole = (0, 0, head.width, head.height)
        return oriented(jpeg.decode(data, whole, self.channels), head.orientation)

    def header(self, data: jpeg.Encoded) -> jpeg.Header | None:
        """The header of a JPEG for the native decoder, its orientation settled; None for what Pillow decodes."""
        if jpeg.PROBLEM is not None:
            _warn_slow(jpeg.PROBLEM)
            return None
        head = jpeg.header(data)
        if head is None or _too_large(head.width * head.height):
            return None
        if not self.exif:
            return head._replace(orientation=1)
        return head if head.orientation else head._replace(orientation=_ask_pillow(data))

    def _by_pillow(self, data: jpeg.Encoded) -> NDArray[np.uint8]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data)) as image:
                    image.load()
                    orientation = _orientation(image) if self.exif else 1
                    array = np.asarray(_eight_bits(image).convert(self.mode))
        except Exception as error:  # Pillow's decoders raise whatever their formats provoke
            raise ValueError(f"cannot decode the image: {_reason(error)}") from error
        return oriented(array.reshape(*array.shape[:2], self.channels), orientation)


def encoded(data: object) -> jpeg.Encoded:
    """The data, if it can be an encoded image."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"expected an encoded image as bytes, found {type(data).__name__}")
    if not len(data):
        raise ValueError("the image is empty (0 bytes)")
    return data


def _too_large(pixels: int) -> bool:
    """Beyond Pillow's guard against decompression bombs; Pillow then words the error."""
    return Image.MAX_IMAGE_PIXELS is not None and pixels > 2 * Image.MAX_IMAGE_PIXELS


def _ask_pillow(data: jpeg.Encoded) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                return _orientation(image)
        except Exception as error:  # as in Decode._by_pillow
            raise ValueError(f"cannot decode the image: {_reason(error)}") from error


def _orientation(image: Image.Image) -> int:
    """1 where the Exif block is damaged: the pixels are still good."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and value in _TURNS else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, UnidentifiedImageError):
        return "no format that Pillow reads (JPEG, PNG, WebP and others) recognises the data"
    return text or type(error).__name__


def _warn_slow(problem: str) -> None:
    warnings.warn(
        f"JPEGs are decoded by Pillow, more slowly: its JPEG library cannot be used directly ({problem}). "
        "Pillow's own wheel brings one that can: pip install --force-reinstall --only-binary pillow pillow",
        RuntimeWarning,
        stacklevel=2,
    )
