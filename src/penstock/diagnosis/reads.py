"""What a sample needs from storage, found out by looking on while samples are fetched.

Python tells of every file that it opens (an audit hook), the kernel counts the bytes that reading calls return. Where a
data set opens nothing for a sample, the file it holds open is taken, if that is one. Files that a C library opens by
itself, maps and sockets are not seen: then nothing can be told, and that is said.
"""

from __future__ import annotations

import os
import random
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.diagnosis.children import apart
from penstock.errors import DiagnosisError

__all__ = ["Piece", "Reads", "look", "read_pieces"]

_CLOSE_LOOK = 16
"""Samples that are fetched wholly, if that is enough to know how the others are read."""
_LOOK_S = 10.0
_SMALL_BYTES = 512
"""What is read of /proc, locales and the like besides a sample."""
_WHOLE = 1.25
"""Files that together are larger than this many times what was read of them are read in parts."""


@dataclass(frozen=True)
class Piece:
    """A part of a file that a sample needs."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Reads:
    """How samples are read."""

    ids: tuple[int, ...]
    samples: tuple[tuple[Piece, ...], ...]
    """The pieces that each of them needs; empty where that cannot be told."""
    files: tuple[str, ...]
    """All files of data that were opened."""
    sample_bytes: float | None
    problem: str
    """Why it cannot be told; empty where it can."""

    @property
    def known(self) -> bool:
        return not self.problem


def look(open_fetch: Callable[[], Callable[[int], object]], ids: Sequence[int], stream: bool = False) -> Reads:
    """Fetch samples in a child and see what is read; `open_fetch` is called there first. A stream gives samples in
    turn, whatever their ids, until it ends."""
    try:
        return apart(lambda: _Onlooker(stream).look(open_fetch, ids))
    except DiagnosisError as error:
        return Reads((), (), (), None, f"fetching a sample in a process of its own failed: {error}")


def read_pieces(pieces: Iterable[Piece]) -> int:
    """Read them as a data set would: open, read, close. The number of bytes that came."""
    got = 0
    for piece in pieces:
        with open(piece.path, "rb", buffering=0) as file:
            if piece.offset:
                file.seek(piece.offset)
            left = piece.nbytes
            while left and (data := file.read(left)):
                left -= len(data)
            got += piece.nbytes - left
    return got


class _Enough(BaseException):
    """The file that a sample needs is known; the sample itself is not needed."""


class _Onlooker:
    """In a child of its own: an audit hook cannot be taken off again."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._opened: list[str] = []
        self._stop = False
        prefixes = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), "/proc", "/sys", "/etc"}
        self._not_data = tuple(f"{os.path.realpath(prefix)}{os.sep}" for prefix in prefixes)

    def look(self, open_fetch: Callable[[], Callable[[int], object]], ids: Sequence[int]) -> Reads:
        sys.addaudithook(self._hook)
        fetch = open_fetch()
        fetch(ids[0])  # imports what it needs
        deadline = time.monotonic() + _LOOK_S
        seen: list[int] = []
        paths: list[list[str]] = []
        sizes: list[int] = []
        for id in ids:
            late = time.monotonic() > deadline
            if len(seen) >= _CLOSE_LOOK and (late or (not self._stream and _single(paths, sizes))):
                break
            try:
                opened, nbytes = self._fetch(fetch, id)
            except StopIteration:
                break
            seen.append(id)
            paths.append(opened)
            sizes.append(nbytes)
        if _single(paths, sizes):
            more = {} if self._stream else self._names(fetch, ids[len(seen) :], deadline)
            return _whole_files([*seen, *more], [*paths, *([path] for path in more.values())])
        return self._parts(seen, paths, sizes)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if flags & os.O_ACCMODE == os.O_RDONLY and not path.startswith(self._not_data) and _regular(path):
            self._opened.append(path)
            if self._stop:
                raise _Enough

    def _fetch(self, fetch: Callable[[int], object], id: int) -> tuple[list[str], int]:
        already = len(self._opened)
        before = _returned_bytes()
        fetch(id)
        return list(dict.fromkeys(self._opened[already:])), max(0, _returned_bytes() - before)

    def _names(self, fetch: Callable[[int], object], ids: Sequence[int], deadline: float) -> dict[int, str]:
        """The file of each sample, without reading it."""
        names: dict[int, str] = {}
        self._stop = True
        for id in ids:
            if time.monotonic() > deadline:
                break
            already = len(self._opened)
            try:
                fetch(id)
            except _Enough:
                names[id] = self._opened[already]
        self._stop = False
        return names

    def _parts(self, ids: list[int], paths: list[list[str]], sizes: list[int]) -> Reads:
        files = tuple(dict.fromkeys([*self._opened, *(_held_open(self._not_data))]))
        mean = sum(sizes) / len(sizes)
        if all(paths):
            if sum(map(_total, paths)) <= _WHOLE * sum(sizes):
                return _whole_files(ids, paths)
            samples = [_parts_of(names, size) for names, size in zip(paths, sizes, strict=True)]
            return Reads(tuple(ids), tuple(samples), files, mean, "")
        if mean > _SMALL_BYTES and files:
            samples = [_parts_of([random.Random(id).choice(files)], size) for id, size in zip(ids, sizes, strict=True)]
            return Reads(tuple(ids), tuple(samples), files, mean, "")
        if mean > _SMALL_BYTES:
            return Reads((), (), (), mean, "what is read comes from no file that Python has opened")
        return Reads((), (), files, None, "no file is read for a sample: the data are in memory, mapped, or far away")


def _single(paths: list[list[str]], sizes: list[int]) -> bool:
    """Each sample is one file, read wholly."""
    return all(len(names) == 1 for names in paths) and sum(map(_total, paths)) <= _WHOLE * sum(sizes)


def _total(paths: list[str]) -> int:
    return sum(os.path.getsize(path) for path in paths)


def _whole_files(ids: list[int], paths: list[list[str]]) -> Reads:
    samples = tuple(tuple(Piece(path, 0, os.path.getsize(path)) for path in names) for names in paths)
    total = sum(piece.nbytes for pieces in samples for piece in pieces)
    return Reads(tuple(ids), samples, tuple({name for names in paths for name in names}), total / len(ids), "")


def _parts_of(paths: list[str], nbytes: int) -> tuple[Piece, ...]:
    """As much, spread over the files; where in a file is not known, and taken to be anywhere."""
    pieces = []
    for path in paths:
        size = os.path.getsize(path)
        part = min(size, nbytes // len(paths))
        pieces.append(Piece(path, random.Random(f"{path} {nbytes}").randrange(size - part + 1), part))
    return tuple(pieces)


def _regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _held_open(not_data: tuple[str, ...]) -> list[str]:
    """Files of data that this process has open for reading."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as file:
                flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
        except OSError:  # the descriptor that listed the others
            continue
        if flags & os.O_ACCMODE == os.O_RDONLY and not path.startswith(not_data) and _regular(path):
            paths.append(path)
    return paths


def _returned_bytes() -> int:
    """What reading calls have returned to this process; asking counts too, about 100 bytes."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))
