"""Samples cached as pixels: the stem of the pipeline is done once, the rest of it in every epoch, from where they lie.

    cache = PixelCache(shelf, stem)
    kept = cache.keep(id, sample)       # the first epoch: pixels in place of the encoded image, also in the cache
    sample = cache.begin(id, units)     # later: what the first operator of the rest makes of them; None if not cached

Only that first operator, a crop, reads the cache's memory, and just the rows that it needs; nothing is copied before.
Where memory was given back meanwhile, what it made does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from penstock.cache.arena import KEY_BYTES, Shelf
from penstock.cache.reader import encoded_key
from penstock.graph import Operator, Sample, Source, Units
from penstock.record import packed, unpacked
from penstock.stem import Stem

__all__ = ["PixelCache", "pixel_key"]

_SLACK = 4096
"""Room for a note, and for how samples are aligned."""


def pixel_key(source: Source, stem: Stem) -> bytes:
    """What names the samples of a source as a stem leaves them."""
    return hashlib.blake2b(encoded_key(source) + stem.identity.encode(), digest_size=KEY_BYTES).digest()


class PixelCache:
    """The decoded samples of one data set under one stem.

    `stamp` tells the version of what is stored now: when a process meets a sample first, it is compared with that of
    the sample's pixels.
    """

    def __init__(self, shelf: Shelf, stem: Stem, stamp: Callable[[int], bytes] = lambda id: b"") -> None:
        self._shelf = shelf
        self._stem = stem
        self._stamp = stamp
        self._refused = False
        self._first = stem.rest[0]
        self.rest: tuple[Operator, ...] = stem.rest[1:]
        """What is left to do after `begin`."""

    def begin(self, id: int, units: Units) -> Sample | None:
        """The sample after the first operator of the stem's rest, which takes these draws; None if it is not cached."""
        seen = self._shelf.look(id)
        if seen is None:
            return None
        end = 1 + seen.note[0]
        if seen.first and end > 1 and self._stamp(id) != seen.note[1:end]:
            self._shelf.spoil(id)
            self._shelf.discount(len(seen.data))
            return None
        sample = unpacked(seen.note[end:])
        sample["image"] = np.frombuffer(seen.data, np.uint8).reshape(sample["image"])
        sample = self.start(sample, units)
        if self._shelf.still(id, seen.word):
            return sample
        self._shelf.discount(len(seen.data))
        return None

    def start(self, grown: Sample, units: Units) -> Sample:
        """What `begin` makes of pixels, wherever they lie."""
        return self._first.apply(grown, units[: self._first.units])

    def grown(self, sample: Sample) -> Sample | None:
        """The sample as the stem leaves it; None where it has none."""
        return self._stem.grown(sample)

    def has(self, id: int) -> bool:
        """The sample's pixels are cached."""
        return self._shelf.has(id)

    def wants(self, sample: Sample) -> bool:
        """There may be room for the sample's pixels."""
        size = self._stem.size(sample)
        return not self._refused if size is None else self._shelf.may_hold(size + _SLACK)

    def keep(self, id: int, sample: Sample, stamp: bytes = b"") -> tuple[Sample | None, bool]:
        """The sample as the stem leaves it, and whether that is in the cache now. None where it has no stem."""
        grown = self._stem.grown(sample)
        if grown is None:
            return None, False
        pixels = grown["image"]
        note = packed({**grown, "image": list(pixels.shape)})
        if note is None:
            return grown, False
        kept = self._shelf.put(id, pixels.tobytes(), bytes([len(stamp)]) + stamp + note)
        self._refused = not kept
        return grown, kept
