"""The arena: memory of a fixed budget that many processes fill with samples, once, and read without a lock.

    arena = Arena.create(budget_bytes)           # or Arena(*descriptors), from the process that made it
    shelf = arena.shelf(key, samples, row)       # the samples of one data set in one form; key: 16 bytes that name it
    shelf.put(id, data, note)                    # True once it is there
    shelf.get(id)                                # (data, note, first), or None

Contract: the arena never evicts. A sample that is there stays there, whole and unchanged, for as long as anybody holds
the arena, unless memory runs short: then samples are given back from the end, and the arena grows no more. What `get`
returns is what `put` was given, for whatever happens to other processes meanwhile: bytes that were damaged are noticed
(native/arena.c says when), and memory that is being given back is not returned. Memory and index together never exceed
the budget. It has no name, and is gone with the last process that holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from penstock.cache.tally import Row
from penstock.kernels.native import declare, lib
from penstock.limits import memory_room

__all__ = ["KEY_BYTES", "Arena", "Seen", "Shelf", "State", "reserve_bytes"]

KEY_BYTES = 16
_MAGIC = 0x70656E73746F636B
_HEAD_BYTES = 8192
_ROW_START, _ROW_WORDS = 128, 8
_SHELVES = (_HEAD_BYTES // 8 - _ROW_START) // _ROW_WORDS
_PAGE = 4096
_STEP, _STEPS = 32 << 20, 64
"""How much memory is taken at a time: a few milliseconds' work, little beside the reserve, and a part of the budget."""
_ALIGN = 64
_READY = 2
_STATES = 7
_NOTE_BITS, _NOTES = 24, (1 << 24) - 1
_HEADER_BYTES, _ENTRY_BYTES = 16, 16
_NOTHING_GIVEN = 2**62
_PUNCH = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""


class _Head(IntEnum):
    """Words of the head; native/arena.c knows some."""

    MAGIC = 0
    BUDGET = 1
    GRANTED = 2
    USED = 3
    TOP = 4
    CONTROL = 5
    STOPPED = 6
    STOP_ERROR = 7
    GIVEN_BYTES = 8
    GIVEN_SAMPLES = 9
    SHELVES = 10


class _Column(IntEnum):
    """Words of a shelf's row; native/arena.c knows some."""

    KEY = 0
    LENGTH = 2
    PLACE = 3
    SAMPLES = 4
    BYTES = 5
    SPOILT = 6


class _Outcome(IntEnum):
    """What native/arena.c returns; less than that is an errno."""

    DONE = 0
    FIRST = 1
    ABSENT = 2
    SPOILED = 3
    TAKEN = 4
    NO_ROOM = 5


class _Shelf(ctypes.Structure):
    """As native/arena.c has it."""

    _fields_ = (
        ("data", c_void_p),
        ("mapped", c_uint64),
        ("head", c_void_p),
        ("row", c_void_p),
        ("index", c_void_p),
        ("met", c_void_p),
        ("tally", c_void_p),
        ("hits", c_uint64),
        ("fd", c_int32),
    )


declare("ps_arena_map", c_void_p, c_int32, c_int64, c_int64, c_int32)
declare("ps_arena_unmap", None, c_void_p, c_int64)
declare("ps_arena_load", c_uint64, c_void_p)
declare("ps_arena_store", None, c_void_p, c_uint64)
declare("ps_arena_add", None, c_void_p, c_uint64)
declare("ps_arena_get", c_int32, c_void_p, c_int64, c_uint64, c_char_p, c_char_p)
declare("ps_arena_look", c_int32, c_void_p, c_int64, c_void_p)
declare("ps_arena_still", c_int32, c_void_p, c_int64, c_uint64)
declare("ps_arena_spoil", c_int32, c_void_p, c_int64)
declare("ps_arena_put", c_int32, c_void_p, c_int64, c_char_p, c_uint64, c_char_p, c_uint64)
declare("ps_arena_range", None, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p)

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [c_void_p, ctypes.c_ssize_t]
_get = lib.ps_arena_get
_get_held: Any = ctypes.PyDLL(lib._name).ps_arena_get
"""The same without releasing the interpreter lock, which would take a tenth of the time of copying 100 KB."""
_get_held.argtypes, _get_held.restype = _get.argtypes, _get.restype
_LONG = (1 << 20) << 24
"""Sizes from which on it is released: a megabyte of data."""


def reserve_bytes(total: int) -> int:
    """Memory that the arena leaves free: for what else the job allocates between two looks at what is left."""
    return min(1 << 30, total // 16)


Stopped = Literal["", "memory", "given back"]
_STOPPED: Sequence[Stopped] = ("", "memory", "given back")


@dataclass(frozen=True)
class State:
    """How an arena is doing. All numbers are bytes, but those of samples."""

    budget: int
    held: int
    """Memory that it takes, its index included; never more than the budget."""
    stopped: Stopped
    """Why it grows no more although the budget is not used up: memory was not there, or had to be given back."""
    error: int
    """The errno of memory that could not be had; 0 where the limits alone forbade it."""
    given_back: int
    samples_given_back: int


class Arena:
    """One arena, as one process sees it. Takes the descriptors."""

    def __init__(self, control: int, data: int) -> None:
        self.descriptors: tuple[int, ...] = (control, data)
        """Of the control file and the data; none once it is closed."""
        self._maps: list[tuple[int, int]] = []
        self._release = weakref.finalize(self, _release, self._maps, self.descriptors)
        self._release.atexit = False
        self._shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()
        self._data = 0
        self._mapped = os.fstat(data).st_size
        self._head = self._map(control, 0, _HEAD_BYTES)
        if self._load(_Head.MAGIC) != _MAGIC:
            raise ValueError("these descriptors are not those of an arena of this version")

    @classmethod
    def create(cls, budget: int) -> Arena:
        """A new one. Memory is taken as it fills; OSError where not even its names for memory can be had."""
        control = os.memfd_create("penstock-cache-index", os.MFD_CLOEXEC)
        data = os.memfd_create("penstock-cache", os.MFD_CLOEXEC)
        try:
            os.ftruncate(data, _rounded(max(budget, _machine_bytes())))
            os.posix_fallocate(control, 0, _HEAD_BYTES)
            os.pwrite(control, _MAGIC.to_bytes(8, "little"), 0)
        except OSError:
            os.close(control)
            os.close(data)
            raise
        arena = cls(control, data)
        arena._store(_Head.BUDGET, budget)
        arena._store(_Head.CONTROL, _HEAD_BYTES)
        arena._store(_Head.TOP, _NOTHING_GIVEN)
        return arena

    def raise_budget(self, budget: int) -> None:
        """The budget is the largest that anybody asked for."""
        with self._growing():
            if budget > self._load(_Head.BUDGET):
                self._store(_Head.BUDGET, min(budget, self._mapped))

    def shelf(self, key: bytes, samples: int, row: Row) -> Shelf | None:
        """The shelf of this key, made if it is not there; None where the budget has no room for its index.

        `row` counts the hits of this process."""
        assert len(key) == KEY_BYTES
        with self._growing():
            place = self._find(key, samples)
            if place is None:
                place = self._add(key, samples)
        if place is None:
            return None
        if not self._data:
            self._data = self._map(self.descriptors[1], 0, self._mapped, writable=False)
        columns = self._head + 8 * (_ROW_START + place * _ROW_WORDS)
        index = self._map(self.descriptors[0], self._load_at(columns, _Column.PLACE), _rounded(_ENTRY_BYTES * samples))
        shelf = Shelf(self, _Mapped(self._data, self._mapped, self._head, columns, index), samples, row)
        self._shelves.add(shelf)
        return shelf

    def state(self) -> State:
        """As it is now."""
        held = _rounded(self._usable()) + self._load(_Head.CONTROL)
        return State(
            budget=self._load(_Head.BUDGET),
            held=held,
            stopped=_STOPPED[self._load(_Head.STOPPED)],
            error=self._load(_Head.STOP_ERROR),
            given_back=self._load(_Head.GIVEN_BYTES),
            samples_given_back=self._load(_Head.GIVEN_SAMPLES),
        )

    def may_hold(self, nbytes: int) -> bool:
        """Whether a sample of this size would find room, as far as the budget goes."""
        needed = self._load(_Head.USED) + nbytes
        if needed <= self._usable():
            return True
        return not self._load(_Head.STOPPED) and needed + self._load(_Head.CONTROL) <= self._load(_Head.BUDGET)

    def grow(self, nbytes: int) -> bool:
        """Take memory for a sample of this size. False where there is none, for good or for this sample."""
        with self._growing():
            granted, needed = self._load(_Head.GRANTED), self._load(_Head.USED) + nbytes
            if needed <= self._usable():
                return True
            budget = self._load(_Head.BUDGET)
            left = (budget - self._load(_Head.CONTROL) - granted) // _PAGE * _PAGE
            step = min(left, max(min(_STEP, _rounded(budget // _STEPS)), _rounded(needed - granted)))
            if self._load(_Head.STOPPED) or granted + step < needed:
                return False
            return self._take(granted, step)

    def stop(self, error: int) -> Literal[False]:
        """Memory is not there: grow no more. `error` is the errno of what the kernel refused; 0 where none did."""
        self._store(_Head.STOP_ERROR, error)
        self._store(_Head.STOPPED, _STOPPED.index("memory"))
        return False

    def give_back(self, due: Callable[[], int]) -> int:
        """Give memory back, whole samples from the end on; the arena grows no more. Returns what was given.

        How much is due is asked when nobody else is at it. Readers that are at such a sample read it from storage."""
        with self._growing():
            nbytes = due()
            if nbytes <= 0:
                return 0
            top = self._usable()
            if not top:
                if not self._load(_Head.STOPPED):
                    self.stop(0)
                return 0
            target = max(0, top - nbytes)
            found = [self._range(row, target, top) for row in self._rows()]
            self._store(_Head.STOPPED, _STOPPED.index("given back"))
            self._store(_Head.TOP, max((end for _, _, end in found), default=0))
            self._add_to(_Head.GIVEN_SAMPLES, sum(samples for samples, _, _ in found))
            given = top - self._load(_Head.TOP)
            self._add_to(_Head.GIVEN_BYTES, given)
            for row, (samples, size, _) in zip(self._rows(), found, strict=True):
                lib.ps_arena_add(row + 8 * _Column.SAMPLES, 2**64 - samples)
                lib.ps_arena_add(row + 8 * _Column.BYTES, 2**64 - size)
            self.sweep()
        return given

    def sweep(self) -> None:
        """Free the pages of what was given back: readers and writers that were late may have brought some of them
        back."""
        top, granted = _rounded(self._load(_Head.TOP)), self._load(_Head.GRANTED)
        if top < granted:
            _punch(self.descriptors[1], top, granted - top)

    def close(self) -> None:
        """Let go of it. Shelves are empty from now on."""
        for shelf in self._shelves:
            shelf.empty()
        self._release()
        self.descriptors = ()

    # inside

    def _usable(self) -> int:
        """Where the memory ends that samples may be in."""
        return min(self._load(_Head.GRANTED), self._load(_Head.TOP))

    def _take(self, granted: int, step: int) -> bool:
        """Have the kernel set memory aside now, where it can still say no."""
        room = memory_room()
        if room.free < step + reserve_bytes(room.total):
            return self.stop(0)
        try:
            os.posix_fallocate(self.descriptors[1], granted, step)
        except OSError as error:
            _punch(self.descriptors[1], granted, step)
            return self.stop(error.errno or errno.ENOMEM)
        self._store(_Head.GRANTED, granted + step)
        return True

    def _rows(self) -> list[int]:
        """The addresses of the shelves' rows."""
        return [self._head + 8 * (_ROW_START + n * _ROW_WORDS) for n in range(self._load(_Head.SHELVES))]

    def _find(self, key: bytes, samples: int) -> int | None:
        for number, row in enumerate(self._rows()):
            if ctypes.string_at(row, KEY_BYTES) == key and self._load_at(row, _Column.LENGTH) == samples:
                return number
        return None

    def _add(self, key: bytes, samples: int) -> int | None:
        number, place, size = self._load(_Head.SHELVES), self._load(_Head.CONTROL), _rounded(_ENTRY_BYTES * samples)
        left = self._load(_Head.BUDGET) - place - self._load(_Head.GRANTED)
        room = memory_room()
        if number == _SHELVES or size > left or room.free < size + reserve_bytes(room.total):
            return None
        try:
            os.posix_fallocate(self.descriptors[0], place, size)
        except OSError:
            return None
        row = self._head + 8 * (_ROW_START + number * _ROW_WORDS)
        ctypes.memmove(row, key, KEY_BYTES)
        lib.ps_arena_store(row + 8 * _Column.LENGTH, samples)
        lib.ps_arena_store(row + 8 * _Column.PLACE, place)
        self._store(_Head.CONTROL, place + size)
        self._store(_Head.SHELVES, number + 1)
        return number

    def _range(self, row: int, below: int, above: int) -> tuple[int, int, int]:
        """Of a shelf: samples and bytes between two places, and the end of the last sample before them."""
        samples, place = self._load_at(row, _Column.LENGTH), self._load_at(row, _Column.PLACE)
        size = _rounded(_ENTRY_BYTES * samples)
        result = (c_uint64 * 3)()
        index = lib.ps_arena_map(self.descriptors[0], place, size, 0)
        lib.ps_arena_range(index, samples, below, above, result)
        lib.ps_arena_unmap(index, size)
        return result[0], result[1], result[2]

    @contextlib.contextmanager
    def _growing(self) -> Iterator[None]:
        """One process at a time. The kernel lets go of the lock of one that dies."""
        fcntl.lockf(self.descriptors[0], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptors[0], fcntl.LOCK_UN)

    def _map(self, fd: int, offset: int, size: int, *, writable: bool = True) -> int:
        address: int | None = lib.ps_arena_map(fd, offset, size, writable)
        if address is None:
            raise OSError(errno.ENOMEM, f"{size:,} bytes of the cache cannot be mapped; is there a limit (ulimit -v)?")
        self._maps.append((address, size))
        return address

    def _load(self, word: _Head) -> int:
        value: int = lib.ps_arena_load(self._head + 8 * word)
        return value

    def _load_at(self, row: int, column: _Column) -> int:
        value: int = lib.ps_arena_load(row + 8 * column)
        return value

    def _store(self, word: _Head, value: int) -> None:
        lib.ps_arena_store(self._head + 8 * word, value)

    def _add_to(self, word: _Head, value: int) -> None:
        lib.ps_arena_add(self._head + 8 * word, value)


def _release(maps: list[tuple[int, int]], descriptors: tuple[int, ...]) -> None:
    for address, size in maps:
        lib.ps_arena_unmap(address, size)
    for fd in descriptors:
        os.close(fd)


@dataclass(frozen=True)
class _Mapped:
    """Addresses of what a shelf consists of."""

    data: int
    nbytes: int
    head: int
    row: int
    index: int


class Seen(NamedTuple):
    """A sample where it lies."""

    data: memoryview
    note: bytes
    word: int
    first: bool
    """This process had not met it yet."""


class Shelf:
    """The samples of one data set in one form; `Arena.shelf` makes it."""

    __slots__ = (
        *("__weakref__", "_address", "_arena", "_bytes", "_found", "_index", "_met", "_native", "_row"),
        *("_samples", "_tally"),
    )

    def __init__(self, arena: Arena, mapped: _Mapped, samples: int, row: Row) -> None:
        self._arena = arena
        self._row = mapped.row
        self._tally = row
        self._samples = samples
        self._index = _words(mapped.index, 2 * samples)
        self._met = (ctypes.c_uint8 * (samples // 8 + 1))()
        self._native = _Shelf(
            data=mapped.data,
            mapped=mapped.nbytes,
            head=mapped.head,
            row=mapped.row,
            index=mapped.index,
            met=ctypes.addressof(self._met),
            tally=row.address,
            fd=arena.descriptors[1],
        )
        self._address = ctypes.addressof(self._native)
        self._bytes = memoryview((ctypes.c_uint8 * mapped.nbytes).from_address(mapped.data)).cast("B").toreadonly()
        self._found = (c_uint64 * 3)()

    def get(self, id: int) -> tuple[bytes, bytes, bool] | None:
        """A sample's data and note, and whether this process gets it for the first time; None where it is not there."""
        if not 0 <= id < self._samples:
            return None
        sizes = self._index[2 * id + 1]
        try:
            data, note = _new_bytes(None, sizes >> _NOTE_BITS), _new_bytes(None, sizes & _NOTES)
        except MemoryError:  # the index is damaged
            return None
        outcome = (_get_held if sizes < _LONG else _get)(self._address, id, sizes, data, note)
        if outcome <= _FIRST:
            return data, note, outcome == _FIRST
        self._absent(outcome)
        return None

    def data(self, id: int) -> bytes | None:
        """The data alone of a sample that this process got before: quicker than `get`."""
        try:
            sizes = self._index[2 * id + 1]
        except IndexError:  # it is closed
            return None
        data: bytes = _new_bytes(None, sizes >> _NOTE_BITS)
        outcome = (_get_held if sizes < _LONG else _get)(self._address, id, sizes, data, None)
        if outcome <= _FIRST:
            return data
        self._absent(outcome)
        return None

    def _absent(self, outcome: int) -> None:
        if outcome == _SPOILED:
            self._tally.add(spoiled=1)

    def has(self, id: int) -> bool:
        """A sample is there, as far as the index tells."""
        return 0 <= id < self._samples and self._index[2 * id] & _STATES == _READY

    def look(self, id: int) -> Seen | None:
        """A sample where it lies, without a copy; None where it is not there. Whoever has read it there asks `still`:
        where memory was given back meanwhile, that was not the sample."""
        if not self.has(id):
            return None
        outcome = lib.ps_arena_look(self._address, id, self._found)
        if outcome > _FIRST:
            self._absent(outcome)
            return None
        word, place, sizes = self._found
        end = place + (sizes >> _NOTE_BITS)
        note = bytes(self._bytes[end : end + (sizes & _NOTES)])
        return Seen(self._bytes[place:end], note, word, outcome == _FIRST) if self.still(id, word) else None

    def still(self, id: int, word: int) -> bool:
        """What `look` found with that word has been there until now."""
        return self._samples > 0 and bool(lib.ps_arena_still(self._address, id, word))

    def put(self, id: int, data: bytes, note: bytes = b"") -> bool:
        """Keep a sample. False where there is no room, or where it is there already or given up."""
        size = len(data) + len(note)
        room = -(-(size + _HEADER_BYTES) // _ALIGN) * _ALIGN
        if not 0 <= id < self._samples or len(note) >= 1 << _NOTE_BITS or self._index[2 * id] & _STATES >= _READY:
            return False
        while self._arena.may_hold(room):
            outcome = lib.ps_arena_put(self._address, id, data, len(data), note, len(note))
            if outcome == _Outcome.DONE:
                self._tally.add(stored=1)
            if outcome < 0:
                self._arena.stop(-outcome)
            if outcome != _Outcome.NO_ROOM:
                return bool(outcome == _Outcome.DONE)
            if not self._arena.grow(room):
                return False
        return False

    def spoil(self, id: int) -> None:
        """What is there of this sample is wrong: nobody gets it again, and it is read from storage from now on."""
        if 0 <= id < self._samples:
            lib.ps_arena_spoil(self._address, id)
            self._tally.add(spoiled=1)

    def discount(self, nbytes: int) -> None:
        """A hit of so many bytes was none after all."""
        self._tally.add(hits=-1, hit_bytes=-nbytes)

    def may_hold(self, nbytes: int) -> bool:
        """See `Arena.may_hold`."""
        return self._arena.may_hold(nbytes)

    @property
    def held(self) -> tuple[int, int]:
        """Samples and bytes that are there, of all that were stored and not given back."""
        count, size, spoilt = (
            lib.ps_arena_load(self._row + 8 * c) for c in (_Column.SAMPLES, _Column.BYTES, _Column.SPOILT)
        )
        return count - spoilt, size

    def empty(self) -> None:
        """The arena is closed: nothing is there from now on."""
        self._samples = 0
        self._index = memoryview(b"").cast("Q")


_FIRST, _SPOILED = int(_Outcome.FIRST), int(_Outcome.SPOILED)


def _words(address: int, count: int) -> memoryview[int]:
    """Words of memory that is mapped."""
    return memoryview((c_uint64 * count).from_address(address)).cast("B").cast("Q")


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_fallocate: Any = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [c_int32, c_int32, c_int64, c_int64]


def _punch(fd: int, offset: int, size: int) -> None:
    """Give pages back; they read as zeros from now on."""
    if _fallocate(fd, _PUNCH, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
