"""Reads samples in whichever form they are cached, and decides in which form those are cached that are not yet.

    forms = EitherReader(reader, pixels, choice, first, from_disk)
    sample, begun = forms.begin(id, units)   # `begun`: the first operator of the stem's rest has been applied

Whatever goes wrong by way of pixels, the encoded sample goes the way that it goes without them, and fails as it does
there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from penstock.cache.choice import Choice
from penstock.cache.forms import Costs
from penstock.cache.pixels import PixelCache
from penstock.cache.reader import CachedReader
from penstock.graph import Operator, Sample, Units

__all__ = ["EitherReader"]


class EitherReader:
    """Samples, encoded or begun from pixels.

    Without a `choice` all that find room are cached as pixels. `first` is the operator that encoded samples go through
    first; `lasting` tells whether what was fetched last came from where it will come from in later epochs too.
    """

    def __init__(
        self,
        reader: CachedReader,
        pixels: PixelCache,
        choice: Choice | None,
        first: Operator,
        lasting: Callable[[], bool],
    ) -> None:
        self._reader = reader
        self._pixels = pixels
        self._choice = choice
        self._first = first
        self._lasting = lasting

    def begin(self, id: int, units: Units) -> tuple[Sample, bool]:
        """The sample as it is stored, or begun."""
        with contextlib.suppress(Exception):
            begun = self._pixels.begin(id, units)
            if begun is not None:
                return begun, True
        sample = self._reader.cached(id)
        return self._fill(id, units) if sample is None else (sample, False)

    def encoded(self, id: int) -> Sample:
        """The sample as it is stored, for who does not begin from pixels. It is kept so, unless its pixels are."""
        sample = self._reader.cached(id)
        if sample is None:
            stamp = self._reader.stamp_before(id)
            sample = self._reader.fetch(id)
            if not self._pixels.has(id):
                self._reader.keep(id, sample, stamp)
        return sample

    def _decodes(self, id: int) -> bool:
        return self._choice is None or self._choice.form(id) == "decoded"

    def _fill(self, id: int, units: Units) -> tuple[Sample, bool]:
        stamp, started = self._reader.stamp_before(id), time.perf_counter()
        sample = self._reader.fetch(id)
        seconds = time.perf_counter() - started
        if self._choice is not None and self._choice.measuring and self._lasting():
            with contextlib.suppress(Exception):
                self._measure(self._choice, sample, units, seconds)
        grown, kept = None, False
        if self._decodes(id) and self._pixels.wants(sample):
            grown, kept = self._pixels.keep(id, sample, stamp)
        if not kept:
            self._reader.keep(id, sample, stamp)
        if grown is not None:
            with contextlib.suppress(Exception):
                return self._pixels.start(grown, units), True
        return sample, False

    def _measure(self, choice: Choice, sample: Sample, units: Units, fetch_s: float) -> None:
        """What the sample costs by either way."""
        started = time.perf_counter()
        self._first.apply(dict(sample), units[: self._first.units])
        encoded_s = time.perf_counter() - started
        grown = self._pixels.grown(sample)
        if grown is None:
            return
        size = grown["image"].nbytes
        started = time.perf_counter()
        self._pixels.start(grown, units)
        pixels_s = time.perf_counter() - started
        stored = sum(len(value) for value in sample.values() if type(value) is bytes)
        choice.learn(Costs(stored, size, fetch_s, encoded_s - pixels_s))
