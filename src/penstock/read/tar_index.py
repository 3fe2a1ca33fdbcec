"""Where the members of a tar lie, found by reading its headers once and kept in the user's cache directory.

    index = tar_index("shard-000.tar")
    index.offsets[index.starts[3]]      # where the first member of sample 3 begins

Understands ustar, GNU and pax archives (long names, sizes above 8 GiB). Kept indexes are only an optimisation: one that
is damaged, outdated or cannot be written is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.errors import SourceError
from penstock.read.names import Names, packed
from penstock.read.storage import Options, Stamp, scanning

__all__ = ["Member", "TarIndex", "cache_folder", "members", "tar_index"]

_BLOCK = 512
_WINDOW = 4096
"""Read at a time: small members (labels) and the header after them come in one call."""
_MAGIC = b"penstock tar index 1\n"
_SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
"""WebDataset's rule: the key is the path up to the first dot of the base name, the rest is the extension."""
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
_REGULAR = b"0\x007"
_NO_DATA = b"123456"

Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar. Members of sample i are `starts[i]` to `starts[i + 1]` of the other arrays."""

    stamp: Stamp
    keys: Names
    starts: array[int]
    offsets: array[int]
    sizes: array[int]
    kinds: array[int]
    extensions: tuple[str, ...]
    """What `kinds` counts."""


def tar_index(path: str, options: Options | None = None) -> TarIndex:
    """The index of a tar as it is now: the kept one where it fits, else made and kept."""
    stamp = Stamp.of(path, options)
    kept = cache_folder() / f"tar-{hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()}.index"
    with suppress(OSError, ValueError, KeyError, TypeError):
        index = _unpack(kept.read_bytes(), path)
        if index.stamp == stamp:
            return index
    with scanning(path, options) as read:
        index = _collect(path, stamp, members(read, path, stamp.size))
    with suppress(OSError):
        _keep(kept, _pack(index, path))
    return index


def cache_folder() -> Path:
    """Where Penstock keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "penstock"


def _collect(path: str, stamp: Stamp, found: Iterator[Member]) -> TarIndex:
    """Members to samples: those of one key belong together, in the order of the first of each."""
    keys: dict[str, int] = {}
    extensions: dict[str, int] = {}
    columns = [array("q") for _ in range(4)]
    for member in found:
        match = _SAMPLE.fullmatch(member.name)
        if match is None or (member.name.startswith("__") and member.name.endswith("__")):
            continue
        sample = keys.setdefault(match[1], len(keys))
        kind = extensions.setdefault(match[2].lower(), len(extensions))
        for column, value in zip(columns, (sample, kind, member.offset, member.size), strict=True):
            column.append(value)
    samples, kinds, offsets, sizes = (np.asarray(column) for column in columns)
    order = np.argsort(samples, kind="stable")
    starts = np.cumsum(np.bincount(samples, minlength=len(keys)))
    names, known = Names(keys), tuple(extensions)
    pairs, counts = np.unique(samples * len(known) + kinds, return_counts=True)
    for sample, kind in (divmod(int(pair), len(known)) for pair in pairs[counts > 1]):
        raise SourceError(
            f"{path}: {counts.max()} members are {names[sample]}.{known[kind]}; a key may have each extension once in "
            "a tar (upper case counts as lower)"
        )
    return TarIndex(
        stamp,
        names,
        packed(np.append(0, starts)),
        packed(offsets[order]),
        packed(sizes[order]),
        packed(kinds[order]),
        known,
    )


def members(read: Read, path: str, length: int) -> Iterator[Member]:
    """The regular files of a tar of `length` bytes, in order; only headers are read.

    A member whose data the file no longer holds is still given (reading it will fail); damaged headers, after which
    nothing can be found, are a SourceError.
    """
    window = _Window(read)
    offset = 0
    common: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    while offset < length:
        header = window.read(offset, _BLOCK)
        if header.count(0) == _BLOCK:
            return
        kind, size = _checked(header, path, offset, length)
        offset += _BLOCK
        if kind in b"LKxgX":
            extra = window.read(offset, size)
            if len(extra) < size:
                raise SourceError(f"{path} is cut off at {length} bytes, inside a header; copy it again")
            if kind == b"L":
                own[b"path"] = extra.split(b"\0", 1)[0]
            elif kind == b"g":
                common.update(_pax(extra, path, offset))
            elif kind in b"xX":
                own.update(_pax(extra, path, offset))
        else:
            known = {**common, **own} if own else common
            if kind == b"S" or any(key.startswith(b"GNU.sparse") for key in known):
                raise SourceError(f"{path} holds a sparse file at byte {offset}; make the tar without --sparse")
            size = int(known.get(b"size", size)) if kind not in _NO_DATA else 0
            name = known.get(b"path") or _name(header)
            if kind in _REGULAR and not name.endswith(b"/"):
                yield Member(os.fsdecode(name), offset, size)
            own = {}
        offset += -(-size // _BLOCK) * _BLOCK


class _Window:
    """Reads a little ahead, since the next header is often near."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._start = 0
        self._data = b""

    def read(self, offset: int, size: int) -> bytes:
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._data = self._read(offset, max(size, _WINDOW))
            self._start, at = offset, 0
        return self._data[at : at + size]


def _checked(header: bytes, path: str, offset: int, length: int) -> tuple[bytes, int]:
    """Type and size from a header that is one."""
    if offset == 0:
        for magic, command in _COMPRESSED.items():
            if header.startswith(magic):
                raise SourceError(
                    f"{path} is compressed, so its members cannot be read one by one; decompress it once "
                    f"({command} {os.path.basename(path)}): images are compressed already"
                )
    if len(header) < _BLOCK:
        raise SourceError(f"{path} is cut off at {length} bytes, inside a header; copy it again")
    try:
        good = _number(header[148:156]) == sum(header) - sum(header[148:156]) + 256
        size = _number(header[124:136])
    except ValueError:
        good, size = False, 0
    if not good or size < 0:
        what = "is not a tar" if offset == 0 else f"is damaged: no tar header at byte {offset}"
        raise SourceError(f"{path} {what} (wrong checksum); copy it again, or make it with tar or WebDataset")
    return header[156:157], size


def _number(text: bytes) -> int:
    """Octal digits, or binary where the first bit is set."""
    if text[0] in (0x80, 0xFF):
        return int.from_bytes(text[1:], "big") - (256 ** (len(text) - 1) if text[0] == 0xFF else 0)
    return int(text.split(b"\0", 1)[0].strip() or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax(records: bytes, path: str, offset: int) -> dict[bytes, bytes]:
    """`length key=value` records."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(records) and records[at]:
        digits, _, _ = records[at : at + 20].partition(b" ")
        size = int(digits) if digits.isdigit() else 0
        key, equals, value = records[at + len(digits) + 1 : at + size].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise SourceError(f"{path} is damaged: no pax record at byte {offset + at}; copy it again")
        found[key] = value[:-1]
        at += size
    return found


def _pack(index: TarIndex, path: str) -> bytes:
    arrays = {
        "starts": index.starts,
        "offsets": index.offsets,
        "sizes": index.sizes,
        "kinds": index.kinds,
        "ends": index.keys.ends,
    }
    head = {
        "path": os.fsencode(path).hex(),
        "size": index.stamp.size,
        "mark": index.stamp.mark,
        "extensions": index.extensions,
        "arrays": [(name, values.typecode, len(values)) for name, values in arrays.items()],
        "byteorder": sys.byteorder,
    }
    body = json.dumps(head).encode() + b"\n" + b"".join(v.tobytes() for v in arrays.values()) + index.keys.blob
    return _MAGIC + hashlib.blake2b(body, digest_size=16).digest() + body


def _unpack(data: bytes, path: str) -> TarIndex:
    """The index in a kept file; ValueError, KeyError or TypeError when that is not whole or is of another tar."""
    body = data[len(_MAGIC) + 16 :]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.blake2b(body, digest_size=16).digest() != data[len(_MAGIC) :][:16]:
        raise ValueError("damaged")
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    if head["path"] != os.fsencode(path).hex() or head["byteorder"] != sys.byteorder:
        raise ValueError("of another tar")
    arrays: dict[str, array[int]] = {}
    for name, typecode, length in head["arrays"]:
        values: array[int] = array(typecode)
        values.frombytes(rest[: length * values.itemsize])
        arrays[name], rest = values, rest[length * values.itemsize :]
    keys = Names.of_buffers(rest, arrays.pop("ends"))
    return TarIndex(Stamp(head["size"], head["mark"]), keys, **arrays, extensions=tuple(head["extensions"]))


def _keep(path: Path, data: bytes) -> None:
    """Written whole or not at all, also where several processes do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
