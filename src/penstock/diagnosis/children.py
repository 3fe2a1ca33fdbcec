"""Runs functions in forked children: what they do to the data set, to random generators, to hooks, ends with them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.diagnosis.counters import own_device_bytes
from penstock.errors import DiagnosisError
from penstock.lanes.processes import die_with_parent, held_signals, keep_from_signals

__all__ = ["Task", "Turnout", "apart", "crew"]

_T = TypeVar("_T")
_I = TypeVar("_I")
Task = Callable[[_I], int]
"""Does one thing and returns how many bytes it got."""
_PATIENCE_S = 120.0
"""For what takes seconds."""
_TURN = struct.Struct("=I")
_MOST_TURNS = 8192
"""Numbers of turns wait in a pipe, which holds 64 KiB."""


@dataclass(frozen=True)
class Turnout:
    """What a crew has done."""

    items: int
    seconds: float
    bytes: int
    cpu_s: float
    device_bytes: int | None


def apart(function: Callable[[], _T]) -> _T:
    """The function's result, from a child of this process. DiagnosisError says what it raised there."""
    with _child(function, _PATIENCE_S) as answer:
        result: _T = _result(answer())
    return result


def crew(size: int, make: Callable[[], Task[_I]], items: Sequence[_I], seconds: float, lead: int = 0) -> Turnout:
    """So many children do the items, each taking the next; each makes its task for itself, before time counts.

    The first `lead` items of each do not count. After so many seconds no further item is begun.
    """
    turns, feed = os.pipe()
    ready, is_ready = os.pipe()
    gate, opens = os.pipe()
    count = min(len(items), _MOST_TURNS)

    def member() -> tuple[int, float, float, int, float, int | None]:
        os.close(opens)
        task = make()
        os.write(is_ready, b"r")
        os.close(is_ready)
        os.read(gate, 1)  # the end of the pipe, for all at once
        for turn in itertools.takewhile(len, (os.read(turns, _TURN.size) for _ in range(lead))):
            task(items[_TURN.unpack(turn)[0]])
        return _work(task, items, turns, seconds)

    os.write(feed, b"".join(_TURN.pack(turn) for turn in range(count)))
    os.close(feed)
    with contextlib.ExitStack() as stack:
        try:
            answers = [stack.enter_context(_child(member, seconds + _PATIENCE_S)) for _ in range(size)]
            os.close(is_ready)
            _read(ready, size, _PATIENCE_S)  # less comes where one has failed
        finally:
            for fd in (opens, turns, ready, gate):
                os.close(fd)
        return _together([_result(answer()) for answer in answers])


def _work(
    task: Task[_I], items: Sequence[_I], turns: int, seconds: float
) -> tuple[int, float, float, int, float, int | None]:
    before, cpu, start = own_device_bytes(), time.process_time(), time.perf_counter()
    done, got = 0, 0
    while time.perf_counter() - start < seconds and (turn := os.read(turns, _TURN.size)):
        got += task(items[_TURN.unpack(turn)[0]])
        done += 1
    end, after = time.perf_counter(), own_device_bytes()
    read = None if before is None or after is None else after - before
    return done, start, end, got, time.process_time() - cpu, read


def _together(parts: Sequence[tuple[int, float, float, int, float, int | None]]) -> Turnout:
    """perf_counter is the same clock in all processes."""
    done, starts, ends, got, cpu, read = zip(*parts, strict=True)
    device = None if None in read else sum(number for number in read if number is not None)
    return Turnout(sum(done), max(ends) - min(starts), sum(got), sum(cpu), device)


@contextlib.contextmanager
def _child(function: Callable[[], Any], limit_s: float) -> Any:
    """A child that runs the function, and a way to wait so long for its answer. It does not outlive the context."""
    parent = os.getpid()
    answer, write = os.pipe()
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sys.stdout.flush()
    with warnings.catch_warnings(), held_signals():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of their code
        pid = os.fork()
        if pid == 0:
            _run(function, parent, write)
    os.close(write)
    try:
        yield lambda: _read(answer, None, limit_s)
    finally:
        os.close(answer)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run(function: Callable[[], Any], parent: int, write: int) -> None:
    try:
        keep_from_signals()
        die_with_parent(parent)
        gc.disable()  # or objects that the script left would be finalised here too
        _one_thread()
        try:
            answer = pickle.dumps((function(), ""))
        except BaseException as error:  # whatever the user's data set raises
            answer = pickle.dumps((None, f"{type(error).__name__}: {error}"))
        with os.fdopen(write, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _one_thread() -> None:
    """As torch's workers have it; the threads of the pool are not there after a fork anyway."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _read(fd: int, most: int | None, limit_s: float) -> bytes:
    """What comes until the other end is closed, there is enough, or time is up."""
    parts: list[bytes] = []
    deadline = time.monotonic() + limit_s
    while most is None or sum(map(len, parts)) < most:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return b""
        part = os.read(fd, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _result(answer: bytes) -> Any:
    """A lock that another thread held when the child was forked may keep it for ever."""
    result, error = pickle.loads(answer) if answer else (None, "its process died, or hung and was ended")
    if error:
        raise DiagnosisError(error)
    return result
