"""Where bytes lie: local files and, through fsspec (imported here only), object stores and the web.

A path is a plain path, `file://...`, or any URL that fsspec opens. `options` are fsspec's storage options for URLs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock.errors import MissingExtraError, PenstockError, SourceError

__all__ = [
    "Options",
    "Stamp",
    "Store",
    "exact",
    "filesystem",
    "is_url",
    "join",
    "only_here",
    "plain",
    "read_file",
    "scanning",
]

Options = Mapping[str, Any]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_OPEN_FILES = 64
"""Per reader. Opening costs a few microseconds, a descriptor is scarce where many workers run."""


_VERSION_KEYS = (
    "ETag",
    "etag",
    "LastModified",
    "last_modified",
    "mtime",
    "modified",
    "updated",
    "generation",
    "created",
)
"""What fsspec's back ends call the version or the time of change of an object."""


def is_url(path: str) -> bool:
    """Whether fsspec has to open this path."""
    return _URL.match(path) is not None


def only_here(path: str) -> bool:
    """Whether the URL means this process's own memory, which its forks have and other processes do not."""
    return "memory://" in path


def plain(path: str | os.PathLike[str]) -> str:
    """The path as a string, `file://` taken off."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise SourceError(f"a path is a str or pathlib.Path, not {type(text).__name__}: {text!r}")
    return text.removeprefix("file://")


def join(base: str, name: str) -> str:
    """A name below a folder. In `zip://folder::archive.zip` the folder is the first part."""
    if is_url(name) or not name:
        return name or base
    if not is_url(base):
        return os.path.join(base, name)
    head, chained, tail = base.partition("::")
    if chained and "://" in head:
        return f"{head.rstrip('/')}/{name}::{tail}"
    return f"{base.rstrip('/')}/{name}"


def filesystem(url: str, options: Options | None = None) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path within it. Cheap when repeated; ask again after a fork."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(f"reading {url} needs fsspec: pip install penstock[remote-files]") from error
    try:
        fs, path = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        raise MissingExtraError(
            f"reading {url} needs one more package ({error}); fsspec itself comes with "
            "pip install penstock[remote-files]"
        ) from error
    except ValueError as error:
        raise SourceError(f"cannot open {url}: {error}") from error
    return fs, path


@contextmanager
def _remote(url: str) -> Iterator[None]:
    """The border to fsspec's many back ends: what they raise becomes an OSError that names the URL."""
    try:
        yield
    except (OSError, PenstockError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def exact(data: bytes, size: int, place: str) -> bytes:
    """The data, if it is as long as it must be and not empty."""
    if len(data) != size:
        raise ValueError(f"{place}: {size} bytes expected, {len(data)} found; it is cut off or was changed")
    if not data:
        raise ValueError(f"{place} is empty (0 bytes)")
    return data


def read_file(path: str, options: Options | None = None, size: int | None = None, *, drop: bool = False) -> bytes:
    """A whole file, never less and never nothing. `size` is what a listing said, where there was one.

    `drop` has the kernel forget what it read for this."""
    if is_url(path):
        with _remote(path):
            fs, inner = filesystem(path, options)
            data: bytes = fs.cat_file(inner)
        return exact(data, len(data) if size is None else size, path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        return exact(_pread_behind(fd, 0, length) if drop else _pread(fd, 0, length), length, path)
    finally:
        os.close(fd)


def _pread(fd: int, offset: int, size: int) -> bytes:
    """Up to `size` bytes: one call except where the kernel gives less (2 GiB at a time, or the end of the file)."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size and parts[-1]:
        parts.append(os.pread(fd, size - got, offset + got))
        got += len(parts[-1])
    return b"".join(parts)


def _pread_behind(fd: int, offset: int, size: int) -> bytes:
    """As `_pread`; pages that were read for this are dropped. Those that were there before are left to whoever uses
    them."""
    there = bytearray(size)
    with contextlib.suppress(OSError):  # they are not there; or a file system that cannot tell
        if os.preadv(fd, [there], offset, os.RWF_NOWAIT) == size:
            return bytes(there)
    data = _pread(fd, offset, size)
    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
    return data


@dataclass(frozen=True)
class Stamp:
    """Tells one version of a file from another: its size, and its time of change or what the store has for that."""

    size: int
    mark: int

    @classmethod
    def of(cls, path: str, options: Options | None = None) -> Stamp:
        """The stamp of the file as it is now."""
        if not is_url(path):
            return cls.of_stat(os.stat(path))
        with _remote(path):
            fs, inner = filesystem(path, options)
            fs.invalidate_cache()
            info = fs.info(inner)
        return cls.of_info(path, info)

    @classmethod
    def of_info(cls, path: str, info: Mapping[str, Any]) -> Stamp:
        """The stamp of a file of which its store says this."""
        if info.get("size") is None:
            raise SourceError(f"{path}: its server does not tell its size, which is needed to read parts of it")
        key = repr([info.get(name) for name in _VERSION_KEYS]).encode()
        return cls(int(info["size"]), int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)

    @classmethod
    def of_stat(cls, stat: os.stat_result) -> Stamp:
        """The stamp of a local file."""
        return cls(stat.st_size, stat.st_mtime_ns)

    def packed(self) -> bytes:
        """It in 16 bytes."""
        return struct.pack("<qq", self.size, self.mark)


class _Handle:
    """An open file. Closed when nobody holds it, so never under a thread that is reading."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Store:
    """Ranges of bytes from a fixed list of files, for all threads of a process; files that changed are refused."""

    def __init__(self, paths: Sequence[str], stamps: Sequence[Stamp], options: Options | None = None) -> None:
        self._paths = paths
        self._stamps = stamps
        self._options = options
        self._open: OrderedDict[int, _Handle] = OrderedDict()
        self._lock = threading.Lock()
        self._checked: set[int] = set()
        self._drops = False
        self.requested = 0
        """Bytes so far."""

    def drop_behind(self) -> None:
        """Have the kernel forget what it read for this, and read no more of a file than is asked for."""
        self._drops = True

    def read(self, file: int, offset: int, size: int, place: Callable[[], str] = str) -> bytes:
        """Exactly these bytes. Raises OSError when the file is gone or another one, ValueError when it is cut off.

        `place` is asked for the name that the error gives them."""
        path = self._paths[file]
        self.requested += size
        data = self._fetch(path, file, offset, size) if is_url(path) else self._pread(path, file, offset, size)
        if len(data) != size:
            raise ValueError(
                f"{place() or path}: {size} bytes expected from byte {offset} on, {len(data)} found; "
                f"{path} is cut off at {self._stamps[file].size} bytes"
            )
        return data

    def _pread(self, path: str, file: int, offset: int, size: int) -> bytes:
        handle = self._handle(path, file)
        data = _pread_behind(handle.fd, offset, size) if self._drops else _pread(handle.fd, offset, size)
        # Looked at after reading, so that a file rewritten in place meanwhile is noticed.
        self._compare(path, file, Stamp.of_stat(os.fstat(handle.fd)))
        return data

    def _handle(self, path: str, file: int) -> _Handle:
        """The file, open; the one that was not used for longest makes way for it."""
        with self._lock:
            handle = self._open.get(file)
            if handle is None:
                handle = self._open[file] = _Handle(path)
                if self._drops:
                    os.posix_fadvise(handle.fd, 0, 0, os.POSIX_FADV_RANDOM)
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)
            self._open.move_to_end(file)
            return handle

    def _fetch(self, url: str, file: int, offset: int, size: int) -> bytes:
        if file not in self._checked:
            self._compare(url, file, Stamp.of(url, self._options))
            self._checked.add(file)
        if size == 0:
            return b""
        with _remote(url):
            fs, inner = filesystem(url, self._options)
            data: bytes = fs.cat_file(inner, start=offset, end=offset + size)
        return data

    def _compare(self, path: str, file: int, found: Stamp) -> None:
        if found != self._stamps[file]:
            with self._lock:
                self._open.pop(file, None)
            raise OSError(
                f"{path} changed while in use: {self._stamps[file].size} bytes when the source was made, "
                f"{found.size} now (or another time of change); make the source again"
            )

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._open.clear()


@contextmanager
def scanning(path: str, options: Options | None = None) -> Iterator[Callable[[int, int], bytes]]:
    """`read(offset, size)` over one file that is gone through forwards; gives less only at the end of the file."""
    if not is_url(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield lambda offset, size: _pread(fd, offset, size)
        finally:
            os.close(fd)
        return
    with _remote(path):
        fs, inner = filesystem(path, options)
        with fs.open(inner, "rb") as file:
            yield lambda offset, size: _seek_and_read(file, offset, size)


def _seek_and_read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
