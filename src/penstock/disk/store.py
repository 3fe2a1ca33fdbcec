"""The files of one data set in the disk tier, as one process sees them; their layout is in the package's text."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np

from penstock.disk.plan import DiskPlan, held_bytes
from penstock.kernels.checksum import checksum

__all__ = ["Disk", "survey"]

_MAGIC = b"penstock disk 1\n"
_HEAD = struct.Struct("<16s16s16s16x")
"""The head of both files: magic, identity of the data set, and a token that the two share."""
_ENTRY = struct.Struct("<4Q")
"""Offset, length and checksum of a record; the checksum of these three. The seed of both checksums is the id."""
_SUMMED = 24
_UNUSED = bytes(_ENTRY.size)
_MOST_BYTES = 1 << 30
"""Of a record: what one call reads and writes."""
_OPEN_WAIT_S = 10.0
_PUT_WAIT_S = 0.25
"""A job that is stopped while it holds the lock must not stop others, which keep nothing meanwhile."""
_BLOCK = 4096
"""What reads past the page cache begin and end at."""
_DROP_BYTES = 8 << 20
"""The page cache is told to forget this much of what was written at once: it holds it in large pieces."""


_here = threading.Lock()
"""The lock of a file is a process's; this one keeps its threads apart."""
os.register_at_fork(after_in_child=lambda: globals().update(_here=threading.Lock()))


class Disk:
    """Records by id, for one process.

    Raises OSError when it cannot be opened; after that `get` and `put` raise nothing. `problem` says why no more is
    kept, where that is not the budget.
    """

    def __init__(self, plan: DiskPlan) -> None:
        self._plan = plan
        self._room = _MOST_BYTES
        """A record that is larger than this finds no room; it only shrinks."""
        self._dropped: int | None = None
        """How far the page cache was told to forget what was written; None where it is not."""
        self._direct = -1
        """The data, opened to be read past the page cache; -1 where that is not wanted or not to be had."""
        self._buffer = mmap.mmap(-1, _BLOCK)
        self.problem: str | None = None
        self.damaged = 0
        """Records that were found damaged, and forgotten."""
        self._lock = os.open(os.path.join(plan.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._data = self._index = -1
        try:
            with self._locked(_OPEN_WAIT_S) as held:
                if not held:
                    raise OSError(errno.EAGAIN, "another process does not let go of its lock", plan.folder)
                self._open_or_begin()
        except BaseException:
            self.close()
            raise
        os.posix_fadvise(self._data, 0, 0, os.POSIX_FADV_RANDOM)

    def get(self, id: int) -> bytes | None:
        """The record, if there is one and it is whole."""
        try:
            entry = self._entry(id)
            if entry == _UNUSED:
                return None
            record = self._record(id, entry)
            if record is None:
                self.damaged += 1
                if self._entry(id) == entry:  # nobody has kept it anew meanwhile
                    self.forget(id)
            return record
        except OSError:
            return None

    def put(self, id: int, record: bytes) -> bool:
        """Keep a record, unless there is no room, or there is one of this id."""
        if self.problem is not None or len(record) > self._room:
            return False
        try:
            if self._entry(id) != _UNUSED:
                return False
            offset = self._claim(len(record))
            if offset is None:
                return False
            try:
                self._fill(id, offset, record)
            except OSError:
                self._give_back(offset, len(record))
                raise
            return True
        except OSError as error:
            self.problem = f"{os.path.join(self._plan.place, 'data')}: {error.strerror or error}"
            return False

    def forget(self, id: int) -> None:
        """The record is not of what is stored now."""
        with contextlib.suppress(OSError):
            os.pwrite(self._index, _UNUSED, _HEAD.size + _ENTRY.size * id)

    def spare_page_cache(self) -> None:
        """From now on what is read and written need not stay in the page cache: it is kept elsewhere."""
        with contextlib.suppress(OSError):
            self._dropped = os.fstat(self._data).st_size
            self._direct = os.open(f"/proc/self/fd/{self._data}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the files."""
        with _here:  # to close a file ends the process's lock of it, also where another thread has taken it
            for fd in (self._lock, self._data, self._index, self._direct):
                if fd >= 0:
                    os.close(fd)
        self._lock = self._data = self._index = self._direct = -1

    # opening

    def _open_or_begin(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._open()
            heads = os.pread(self._data, _HEAD.size, 0), os.pread(self._index, _HEAD.size, 0)
            if heads[0] == heads[1] and heads[0][:32] == self._head(b"")[:32] and self._index_whole:
                return
        self._begin()
        self._open()

    def _open(self) -> None:
        for fd in (self._data, self._index):
            if fd >= 0:
                os.close(fd)
        self._data = self._index = -1
        self._data = os.open(os.path.join(self._plan.place, "data"), os.O_RDWR | os.O_CLOEXEC)
        self._index = os.open(os.path.join(self._plan.place, "index"), os.O_RDWR | os.O_CLOEXEC)

    def _begin(self) -> None:
        """Empty files in the place of whatever is there. Whoever has that open goes on with it, but keeps no more."""
        plan = self._plan
        os.makedirs(plan.place, exist_ok=True)
        for name in ("data", "index"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(plan.place, name))
        index_bytes = self._index_bytes
        if held_bytes(plan.folder) + index_bytes + _HEAD.size > plan.budget_bytes:
            raise OSError(
                errno.ENOSPC, f"the budget of {plan.budget_bytes:,} bytes has no room for an index", plan.place
            )
        with open(os.path.join(plan.place, "about.json"), "w") as about:
            about.write(plan.about)
        head = self._head(os.urandom(16))
        for name, size in (("index", index_bytes), ("data", _HEAD.size)):
            with open(os.path.join(plan.place, name), "xb") as file:
                file.write(head)
                file.truncate(size)

    def _head(self, token: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, bytes.fromhex(self._plan.identity), token)

    @property
    def _index_bytes(self) -> int:
        return _HEAD.size + _ENTRY.size * self._plan.samples

    @property
    def _index_whole(self) -> bool:
        """It has its size, which the budget counts on."""
        return os.fstat(self._index).st_size == self._index_bytes

    # reading

    def _entry(self, id: int) -> bytes:
        """As it stands; what is not whole counts as none."""
        entry = os.pread(self._index, _ENTRY.size, _HEAD.size + _ENTRY.size * id)
        if entry == _UNUSED or len(entry) < _ENTRY.size:
            return _UNUSED
        return entry if checksum(entry[:_SUMMED], id) == _ENTRY.unpack(entry)[3] else _UNUSED

    def _record(self, id: int, entry: bytes) -> bytes | None:
        offset, length, expected, _ = _ENTRY.unpack(entry)
        record = os.pread(self._data, length, offset) if self._direct < 0 else self._read_past(offset, length)
        return record if len(record) == length and checksum(record, id) == expected else None

    def _read_past(self, offset: int, size: int) -> bytes:
        """Read past the page cache, in whole blocks."""
        start = offset // _BLOCK * _BLOCK
        blocks = -(-(offset + size - start) // _BLOCK) * _BLOCK
        if blocks > len(self._buffer):
            self._buffer.close()
            self._buffer = mmap.mmap(-1, blocks)
        with memoryview(self._buffer) as view:
            done = os.preadv(self._direct, [view[:blocks]], start)
        return self._buffer[offset - start : min(offset + size - start, done)]

    # writing

    @contextlib.contextmanager
    def _locked(self, wait_s: float) -> Iterator[bool]:
        """Hold the folder's lock; False where it was not to be had in time."""
        deadline, mine = time.monotonic() + wait_s, _here
        if not mine.acquire(timeout=wait_s):
            yield False
            return
        try:
            while not (held := self._try_lock()) and time.monotonic() < deadline:
                time.sleep(0.0005)
            try:
                yield held
            finally:
                if held:
                    fcntl.lockf(self._lock, fcntl.LOCK_UN)
        finally:
            mine.release()

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # as POSIX lets systems choose
            return False
        return True

    def _claim(self, size: int) -> int | None:
        """Room at the end of `data`; None where the budget has none left, or the lock cannot be had."""
        with self._locked(_PUT_WAIT_S) as held:
            if not held:
                return None
            data = os.fstat(self._data)
            if not data.st_nlink or not self._index_whole:
                raise OSError(errno.ENOENT, "it was deleted while in use, or its index was")
            room = self._plan.budget_bytes - held_bytes(self._plan.folder)
            if size > room:
                self._room = max(0, room)
                return None
            os.ftruncate(self._data, data.st_size + size)
            return data.st_size

    def _give_back(self, offset: int, size: int) -> None:
        """The disk is full: what was claimed last need not stand empty."""
        with contextlib.suppress(OSError), self._locked(_PUT_WAIT_S) as held:
            if held and os.fstat(self._data).st_size == offset + size:
                os.ftruncate(self._data, offset)

    def _fill(self, id: int, offset: int, record: bytes) -> None:
        """The record first, then the entry that leads to it."""
        _write(self._data, record, offset)
        summed = _ENTRY.pack(offset, len(record), checksum(record, id), 0)[:_SUMMED]
        _write(self._index, summed + checksum(summed, id).to_bytes(8, "little"), _HEAD.size + _ENTRY.size * id)
        if self._dropped is not None and offset > self._dropped + _DROP_BYTES:
            self._drop_written(self._dropped, offset)

    def _drop_written(self, start: int, end: int) -> None:
        """Pages that are not on the disk yet only begin to be written now; they are dropped by the next call."""
        start = max(0, start - _DROP_BYTES)
        os.posix_fadvise(self._data, start, end - start, os.POSIX_FADV_DONTNEED)
        self._dropped = end


def _write(fd: int, data: bytes, offset: int) -> None:
    """All of it: a disk that fills up takes a part first, and says what is wrong when asked again."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def survey(plan: DiskPlan) -> tuple[int, int]:
    """How many samples of the data set are kept, and the bytes of all data sets in the folder."""
    try:
        entries = np.fromfile(os.path.join(plan.place, "index"), np.uint64, offset=_HEAD.size)
    except FileNotFoundError:
        return 0, held_bytes(plan.folder)
    whole = entries[: len(entries) // 4 * 4].reshape(-1, 4)
    return int(np.count_nonzero(whole[:, 3])), held_bytes(plan.folder)
