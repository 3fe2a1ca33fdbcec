"""What the tests of the cache share: arenas that are closed, samples that follow from their number, child processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from penstock.cache import Arena, Shelf, Tally, finding

KEY = b"a set of samples"
MIB = 1 << 20
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> str:
    """A test's loaders find only each other."""
    prefix = f"penstock-cache-test-{os.getpid()}-{next(_numbers)}-"
    monkeypatch.setattr(finding, "_PREFIX", prefix)
    return prefix


@contextlib.contextmanager
def opened(budget: int = 4 * MIB) -> Iterator[Arena]:
    """An arena for the time of a test."""
    arena = Arena.create(budget)
    try:
        yield arena
    finally:
        arena.close()


def again(arena: Arena) -> Arena:
    """The same arena as another process would see it."""
    control, data = map(os.dup, arena.descriptors)
    return Arena(control, data)


def shelf_of(arena: Arena, samples: int, key: bytes = KEY) -> Shelf:
    """A shelf, counting for itself."""
    descriptor = Tally.create(1)
    tally = Tally(descriptor, 1)
    os.close(descriptor)
    shelf = arena.shelf(key, samples, tally.row(0))
    assert shelf is not None
    return shelf


def sample(id: int, largest: int = 40_000) -> bytes:
    """Bytes and length follow from the number."""
    rng = random.Random(id)
    return rng.randbytes(rng.randrange(largest))


def memory_of(arena: Arena) -> int:
    """What the kernel has set aside for it."""
    return sum(os.fstat(fd).st_blocks * 512 for fd in arena.descriptors)


def forked(run: Callable[[], object]) -> int:
    """A child that runs this; its exit status is 0 if that went well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            run()
            status = 0
        except BaseException:  # nothing may unwind into the tests
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    """The exit status of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def joined() -> Iterator[Arena]:
    """The arena that loaders of these tests hold, held here too."""
    arena = next(finding._others())
    try:
        yield arena
    finally:
        arena.close()
