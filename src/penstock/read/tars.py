"""Tars of the WebDataset convention with random access: `0001.jpg` and `0001.cls` are one sample."""

from __future__ import annotations

import hashlib
import io
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from penstock.errors import GraphError, SourceError
from penstock.graph import Field, Reader, Sample, Source, Spec
from penstock.read.names import Names, packed
from penstock.read.patterns import find
from penstock.read.storage import Options, Store, is_url, only_here
from penstock.read.tar_index import TarIndex, tar_index

__all__ = ["Tars"]

_ENCODED = dict.fromkeys(("jpg", "jpeg", "png", "webp"), "image") | dict.fromkeys(("wav", "flac", "ogg"), "audio")
"""Extension to field, foremost first."""


class Tars(Source):
    """Samples in tars; ids follow the order of the tars and of the samples in each.

    `pattern` is a path, `shard-{000..012}.tar`, wildcards, a folder, or a list of these; URLs too. The members whose
    path is the same up to the first dot of the base name are one sample, and the rest of the name says what each is:
    jpg, jpeg, png, webp: `image`, encoded; wav, flac, ogg: `audio`, encoded; cls: `label`, an integer; json: parsed;
    txt: a string; npy: an array; all others: bytes, under their extension. `fields` takes only the fields named.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        storage_options: Options | None = None,
    ) -> None:
        self._options = storage_options
        self._paths = find(pattern, ".tar", storage_options)
        self.clean = not any(map(only_here, self._paths))
        indexes = [tar_index(path, storage_options) for path in self._paths]
        self._stamps = [index.stamp for index in indexes]
        self._merge(indexes)
        if not len(self):
            raise SourceError(
                f"tars: no sample in {self._paths[0]} nor in {len(self._paths) - 1} others; members are named "
                "like 0001.jpg and 0001.cls"
            )
        self._fields = _fields(self._extensions, self._together)
        if fields is not None:
            absent = sorted(set(fields) - set(self._fields))
            if absent or isinstance(fields, str):
                raise GraphError(f"tars: fields= must be a list of {', '.join(self._fields)}; found {fields!r}")
            self._fields = {name: kind for name, kind in self._fields.items() if name in fields}
        for name in {"id", "label"} & set(self._fields) & set(self._extensions):
            raise GraphError(
                f"tars: the members .{name} have the name of a field of Penstock's; leave them out with fields=[...]"
            )

    def _merge(self, indexes: Sequence[TarIndex]) -> None:
        """One set of arrays for all tars."""
        extensions: dict[str, int] = {}
        self._firsts = array("q", [0])
        self._starts, self._kinds = array("q", [0]), array("q")
        self._offsets, self._sizes = array("q"), array("q")
        key_ends, key_blobs = array("q", [0]), []
        for index in indexes:
            _append(self._starts, index.starts, len(self._offsets))
            _append(key_ends, index.keys.ends, key_ends[-1])
            key_blobs.append(index.keys.blob)
            kinds = np.array([extensions.setdefault(name, len(extensions)) for name in index.extensions], np.int64)
            self._kinds.frombytes(kinds[np.asarray(index.kinds)].tobytes() if len(kinds) else b"")
            self._offsets += index.offsets
            self._sizes += index.sizes
            self._firsts.append(len(self._starts) - 1)
        self._keys = Names.of_buffers(b"".join(key_blobs), key_ends)
        self._extensions = tuple(extensions)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _together(self, kinds: Sequence[int]) -> bool:
        """Whether any sample has more than one of these kinds of member."""
        member = np.flatnonzero(np.isin(np.frombuffer(self._kinds, np.int64), kinds))
        sample = np.searchsorted(np.frombuffer(self._starts, np.int64), member, "right")
        return bool((np.diff(sample) == 0).any())

    def spec(self) -> Spec:
        """A field for each kind of member."""
        spec: dict[str, Field] = {}
        for name in self._fields:
            spec[name] = Field("encoded") if name in ("image", "audio") else Field("any")
            if name == "label":
                spec[name] = Field("value", (), "int64")
        return spec

    def open(self) -> Reader:
        """A reader with at most a few dozen tars open."""
        return _TarsReader(self)

    def place(self, id: int) -> str:
        """`shard.tar: key.jpg`."""
        kinds = self._kinds[self._starts[id] : self._starts[id + 1]]
        shown = next((k for k in self._fields.get("image", ()) if k in kinds), kinds[0])
        return f"{self._paths[self.shard(id)]}: {self._keys[id]}.{self._extensions[shown]}"

    def shard(self, id: int) -> int:
        """Which of the tars holds a sample."""
        return bisect_right(self._firsts, id) - 1

    def fingerprint(self) -> str:
        """Of every key, extension, offset and size, so that tars may move as they are."""
        digest = hashlib.blake2b(self._keys.blob, digest_size=16)
        for values in (self._keys.ends, self._starts, self._kinds, self._offsets, self._sizes, self._firsts):
            digest.update(values)
        digest.update(repr(self._extensions).encode())
        return digest.hexdigest()

    def version(self) -> str:
        """Of where the tars are, their sizes and times of change, too."""
        about = (self.fingerprint(), self._paths, repr(sorted((self._options or {}).items(), key=repr)), self._stamps)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def sizes(self) -> Sequence[int]:
        """The bytes of all members of each sample."""
        total = np.add.reduceat(np.frombuffer(self._sizes, np.int64), np.frombuffer(self._starts, np.int64)[:-1])
        return packed(total)


class _TarsReader(Reader):
    def __init__(self, source: Tars) -> None:
        self._source = source
        self._store = Store(source._paths, source._stamps, source._options)

    def read(self, id: int) -> Sample:
        source = self._source
        if not 0 <= id < len(source):
            raise KeyError(f"no sample {id}; there are {len(source)}")
        first, last = source._starts[id], source._starts[id + 1]
        at = {source._kinds[member]: member for member in range(first, last)}
        wanted = {name: next((at[kind] for kind in kinds if kind in at), -1) for name, kinds in source._fields.items()}
        absent = [name for name, member in wanted.items() if member < 0]
        if absent:
            has = ", ".join(source._extensions[kind] for kind in at)
            raise ValueError(f"it has no member for the field {absent[0]!r}, only {has}; other samples of the set do")
        data = self._members(source.shard(id), list(wanted.values()), id)
        return {
            name: _parsed(source._extensions[source._kinds[member]], raw, source, id)
            for (name, member), raw in zip(wanted.items(), data, strict=True)
        }

    def _members(self, shard: int, wanted: list[int], id: int) -> list[bytes]:
        """The members' bytes; from a store in one request where they lie side by side."""
        source = self._source

        def place() -> str:
            return source.place(id)

        ranges = [(source._offsets[member], source._sizes[member]) for member in wanted]
        begin = min(offset for offset, _ in ranges)
        span = max(offset + size for offset, size in ranges) - begin
        if not is_url(source._paths[shard]) or span > 2 * sum(size for _, size in ranges) + 65536:
            return [self._store.read(shard, offset, size, place) for offset, size in ranges]
        data = self._store.read(shard, begin, span, place)
        return [data[offset - begin : offset - begin + size] for offset, size in ranges]

    def requested(self) -> int:
        return self._store.requested

    def drop_behind(self) -> None:
        self._store.drop_behind()

    def close(self) -> None:
        self._store.close()


def _append(to: array[int], values: array[int], shift: int) -> None:
    """Ends of a further part, without its leading 0."""
    to.frombytes((np.frombuffer(values, np.int64)[1:] + shift).tobytes())


def _fields(extensions: Sequence[str], together: Callable[[Sequence[int]], bool]) -> dict[str, tuple[int, ...]]:
    """Field to the kinds of member that hold it.

    Some samples may hold their image as jpg and others as png. Where one sample has both (a mask, say), jpg is the
    image, and png is a field of its own name.
    """
    groups: dict[str, list[int]] = {}
    for kind, extension in enumerate(extensions):
        groups.setdefault(_ENCODED.get(extension) or _PARSED.get(extension, (extension,))[0], []).append(kind)
    fields: dict[str, tuple[int, ...]] = {}
    rank = list(_ENCODED).index
    for name, kinds in groups.items():
        if len(kinds) == 1 or not together(kinds):
            fields[name] = tuple(kinds)
            continue
        first, *rest = sorted(kinds, key=lambda kind: -1 if extensions[kind] == name else rank(extensions[kind]))
        fields |= {name: (first,)} | {extensions[kind]: (kind,) for kind in rest}
    return fields


def _label(data: bytes) -> int:
    label = int(data)
    if not -(2**63) <= label < 2**63:
        raise ValueError(f"{label} does not fit into 64 bits")
    return label


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


_PARSED: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "cls": ("label", _label),
    "json": ("json", json.loads),
    "txt": ("txt", bytes.decode),
    "npy": ("npy", _array),
}
"""Extension to field and how it is read; whatever is neither here nor in _ENCODED stays bytes under its extension."""


def _parsed(extension: str, data: bytes, source: Tars, id: int) -> Any:
    if extension in _ENCODED and not data:
        raise ValueError(f"{source.place(id)}: the member .{extension} is empty (0 bytes)")
    if extension not in _PARSED:
        return data
    try:
        return _PARSED[extension][1](data)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{source.place(id)}: cannot read the member .{extension}: {error}") from error
