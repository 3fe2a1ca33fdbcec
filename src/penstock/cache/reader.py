"""The cache before a source: what is in the arena comes from there, the rest from the source, and goes in.

A sample is kept as its reader gave it, so that batches are the same bit for bit: its byte fields one behind the other,
and all else in the note, with the stamp of its file where the reader has one. When a process meets a sample first it
compares the stamp with the file's.
"""

from __future__ import annotations

import hashlib
import marshal
import pickle
from array import array
from typing import Any

from penstock.cache.arena import KEY_BYTES, Shelf
from penstock.cache.tally import Row
from penstock.graph import Reader, Sample, Source

__all__ = ["CachedReader", "encoded_key", "why_not_cached"]

_ANY_ROOM = 64
_QUICK, _PICKLED = 0, 1
_QUICK_TYPES = (int, float, str, bool, type(None))
"""What marshal gives back as it was, and four times as fast as pickle."""
_MOST_SHAPES = 1 << 16


def why_not_cached(source: Source) -> str | None:
    """Why the samples of a source are not cached; None where they are."""
    if source.opaque:
        return "the source runs code of yours, which may give another sample each time"
    if not any(field.kind == "encoded" for field in source.spec().values()):
        return "the source holds no encoded images or audio"
    return None


def encoded_key(source: Source) -> bytes:
    """What names the encoded samples of a source among all data sets and forms."""
    kind = type(source)
    about = (
        "encoded",
        kind.__module__,
        kind.__qualname__,
        source.version(),
        len(source),
        sorted(source.spec().items()),
    )
    return hashlib.blake2b(repr(about).encode(), digest_size=KEY_BYTES).digest()


class CachedReader(Reader):
    """A reader behind a shelf. Without one (the arena had no room for an index) it counts what is read."""

    def __init__(self, reader: Reader, shelf: Shelf | None, row: Row, samples: int) -> None:
        self._reader = reader
        self._shelf = shelf
        self._row = row
        self._shapes: list[tuple[str, Sample]] = [("", {})]
        """What samples are beside their one byte field, whose name comes first: a few shapes do for most data sets."""
        self._known = array("H", bytes(2 * samples))
        """The shape of each sample that this process has met; 0: of none, or not met yet."""
        self._numbers: dict[bytes, int] = {}
        reader.drop_behind()

    def read(self, id: int) -> Sample:
        if not 0 <= id < len(self._known):
            return self._reader.read(id)  # it has words for that
        sample = self.cached(id)
        if sample is None:
            stamp = self.stamp_before(id)
            sample = self.fetch(id)
            self.keep(id, sample, stamp)
        return sample

    def cached(self, id: int) -> Sample | None:
        """The sample, if the cache has it."""
        if self._shelf is None or not 0 <= id < len(self._known):
            return None
        number = self._known[id]
        if number:  # all that is left to do for most hits
            data = self._shelf.data(id)
            if data is None:
                return None
            name, shape = self._shapes[number]
            sample = shape.copy()
            sample[name] = data
            return sample
        found = self._shelf.get(id)
        if found is None:
            return None
        data, note, first = found
        if first and self._outdated(id, note):
            self._row.add(hits=-1, hit_bytes=-len(data))
            return None
        return self._unpacked(id, data, note)

    def _unpacked(self, id: int, data: bytes, note: bytes) -> Sample:
        """The sample that was packed so."""
        content = note[note[0] + 1 :]
        load: Any = marshal.loads if content[0] == _QUICK else pickle.loads
        blobs, sample = load(content[1:])
        if content[0] == _QUICK and len(blobs) == 1:
            self._remember(id, content, blobs[0][0], sample)
        at = 0
        for name, size in blobs:
            sample[name] = data if size < 0 else data[at : at + size]
            at += size
        result: Sample = sample
        return result

    def _remember(self, id: int, content: bytes, name: str, sample: Sample) -> None:
        number = self._numbers.get(content)
        if number is None and len(self._shapes) < _MOST_SHAPES:
            number = self._numbers[content] = len(self._shapes)
            self._shapes.append((name, sample.copy()))
        self._known[id] = number or 0

    def stamp_before(self, id: int) -> bytes:
        """The stamp of a sample that is to be read and kept. Asked for before its bytes: were they newer, the next look
        would tell."""
        return self._reader.stamp(id) if self._keeps else b""

    def fetch(self, id: int) -> Sample:
        """The sample from behind the cache."""
        reader = self._reader
        before = reader.requested()
        sample = reader.read(id)
        after = reader.requested()
        asked = after - before if after else sum(len(v) for v in sample.values() if type(v) is bytes)
        self._row.add(misses=1, read_bytes=asked)
        return sample

    def keep(self, id: int, sample: Sample, stamp: bytes) -> None:
        """Put a sample into the cache, if there is room."""
        if self._shelf is not None and self._keeps:
            self._shelf.put(id, *_packed(sample, stamp))

    @property
    def _keeps(self) -> bool:
        return self._shelf is not None and self._shelf.may_hold(_ANY_ROOM)

    def _outdated(self, id: int, note: bytes) -> bool:
        """The sample was stored anew since it was cached; nobody gets the old one again."""
        assert self._shelf is not None
        if not note[0] or self._reader.stamp(id) == note[1 : note[0] + 1]:
            return False
        self._shelf.spoil(id)
        return True

    def requested(self) -> int:
        return self._reader.requested()

    def stamp(self, id: int) -> bytes:
        return self._reader.stamp(id)

    def close(self) -> None:
        self._reader.close()


def _packed(sample: Sample, stamp: bytes) -> tuple[bytes, bytes]:
    """Data and note."""
    blobs = {name: value for name, value in sample.items() if type(value) is bytes}
    rest = {name: None if name in blobs else value for name, value in sample.items()}
    sizes = tuple((name, len(value) if len(blobs) > 1 else -1) for name, value in blobs.items())
    quick = all(type(value) in _QUICK_TYPES for value in rest.values())
    text = marshal.dumps((sizes, rest)) if quick else pickle.dumps((sizes, rest), protocol=5)
    return b"".join(blobs.values()), bytes([len(stamp)]) + stamp + bytes([_QUICK if quick else _PICKLED]) + text
