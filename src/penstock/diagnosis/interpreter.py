"""How long the training thread waits for the interpreter's lock, which other threads of its process hold.

A thread that waits for the lock sleeps in a futex, at an address within the lock; the kernel says at which address a
thread sleeps (`/proc/PID/task/TID/syscall`). Two threads that only compute show which addresses these are. A process
of its own then looks at the training thread again and again: a thread that looked would need the lock itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import struct
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Self

from penstock.lanes.processes import die_with_parent, held_signals, keep_from_signals

__all__ = ["LockWatch"]

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_INTERVAL_S = 0.002
"""Each look takes about 20 microseconds of another core: a hundredth of it."""
_CALIBRATION_S = 0.1
"""Of it each of two threads waits half, 5 ms at a time."""
_SPAN = 64
"""A condition variable's futexes lie in its 48 bytes."""
_ATTEMPTS = 3
_SURE = 5
"""Looks that must agree on it. Threads that begin and end also sleep elsewhere, briefly."""
_PR_SET_PTRACER = 0x59616D61
_COUNTS = struct.Struct("=QQ")


class LockWatch:
    """Counts, while the context is open, how often the calling thread is found waiting for the interpreter's lock.

    `share` is None where that cannot be seen: another processor, a kernel that does not say, an interpreter without the
    lock.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._thread = threading.get_native_id()
        self._places = _lock_places()
        self._watcher: _Watcher | None = None

    def __enter__(self) -> Self:
        if self._places is not None:
            self._watcher = _Watcher([self._thread], self._places, _INTERVAL_S)
        return self

    def __exit__(self, *error: object) -> None:
        if self._watcher is not None:
            found, looks = self._watcher.end()
            self.share = found / looks if looks else None
            self._watcher = None


@functools.cache
def _lock_places() -> tuple[int, int] | None:
    """The span of addresses at which threads sleep that wait for the lock."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if not has_lock or platform.machine() not in _FUTEX or not os.path.exists("/proc/self/syscall"):
        return None
    for _ in range(_ATTEMPTS):
        place, times = _sleeping_place()
        if times >= _SURE:
            return place - _SPAN, place + _SPAN
    return None


def _sleeping_place() -> tuple[int, int]:
    """Where two threads that compute sleep when it is the other's turn, and how often they were seen there."""
    until: list[float] = []
    threads = [threading.Thread(target=_compute, args=(until,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    watcher = _Watcher([thread.native_id or 0 for thread in threads], None, _INTERVAL_S / 4)
    until.append(time.perf_counter() + _CALIBRATION_S)
    for thread in threads:
        thread.join()
    return watcher.end()


def _compute(until: list[float]) -> None:
    while not until:
        time.sleep(0.001)  # not in a futex
    while time.perf_counter() < until[0]:
        pass


class _Watcher:
    """A process that looks at threads of this one until it is ended; `places` is None to find out where they sleep."""

    def __init__(self, threads: list[int], places: tuple[int, int] | None, interval_s: float) -> None:
        parent = os.getpid()
        stop, self._stop = os.pipe()
        self._answer, answer = os.pipe()
        with warnings.catch_warnings(), held_signals():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of their code
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    keep_from_signals()
                    die_with_parent(parent)
                    os.close(self._stop)
                    os.set_blocking(stop, False)
                    os.write(answer, _COUNTS.pack(*_look(parent, threads, places, interval_s, stop)))
                finally:
                    os._exit(0)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(self._pid), 0, 0, 0)  # where Yama is strict
        os.close(stop)
        os.close(answer)

    def end(self) -> tuple[int, int]:
        """How often they slept there, of how many looks; without places: where they mostly slept, and how often."""
        os.close(self._stop)
        answer = os.read(self._answer, _COUNTS.size)
        os.close(self._answer)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        first, second = _COUNTS.unpack(answer) if len(answer) == _COUNTS.size else (0, 0)
        return int(first), int(second)


def _look(
    parent: int, threads: Iterable[int], places: tuple[int, int] | None, interval_s: float, stop: int
) -> tuple[int, int]:
    paths = [f"/proc/{parent}/task/{thread}/syscall" for thread in threads]
    number = f"{_FUTEX[platform.machine()]} "
    addresses: Counter[int] = Counter()
    found = looks = 0
    while not _ended(stop):
        time.sleep(interval_s)
        for path in paths:
            try:
                with open(path) as file:
                    line = file.read()
            except OSError:  # the thread has ended
                continue
            looks += 1
            if line.startswith(number):
                address = int(line.split()[1], 16)
                addresses[address] += 1
                found += places is not None and places[0] <= address <= places[1]
    if places is None:
        return addresses.most_common(1)[0] if addresses else (0, 0)
    return found, looks


def _ended(stop: int) -> bool:
    try:
        return os.read(stop, 1) == b""
    except BlockingIOError:
        return False
