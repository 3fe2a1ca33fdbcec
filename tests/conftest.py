"""What the tests of running loaders share: a small tree of photographs, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

import penstock.loader
from penstock.placing import Sizes
from penstock.stage import Recipe
from stand_in_device import StandIn

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 10.0


def pytest_configure() -> None:
    """Orphans of processes that tests start become children of this process, so that none goes unseen.

    And an interrupt is one, for those processes too: a shell that runs the tests in the background has it ignored.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of ten JPEGs each, of various sizes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(30):
        folder = root / f"class{index % 3}"
        folder.mkdir(exist_ok=True)
        height, width = rng.integers(40, 90, 2)
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height)).save(folder / f"{index:02}.jpg", quality=90)
    return root


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """What loaders have opened."""
    opened: list[StandIn] = []

    def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> StandIn:
        opened.append(StandIn(recipe, sizes, device))
        return opened[-1]

    monkeypatch.setattr(penstock.loader, "open_device", open_device)
    monkeypatch.setattr(penstock.loader, "missing", lambda device: None)
    return opened


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("processes") is None:
        yield
        return
    before = _left_over()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _left_over() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    for what in left:
        if what.startswith("process "):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(what.split()[1]), signal.SIGKILL)
    assert not left, f"left behind: {', '.join(sorted(left))}"


def _left_over() -> set[str]:
    """Processes and memory that are there now. (/dev/shm is shared with others; one test has its own.)"""
    return {*_processes(), *_memory()}


def _processes() -> Iterator[str]:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                yield f"process {child.pid} {' '.join(child.cmdline())[:60]!r}"
            elif child.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _memory() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "memfd:" in target:
                yield f"descriptor {fd} of {target}"
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock" in line:
            yield f"mapping {line.split()[0]} of {line.split(maxsplit=5)[5]}"
