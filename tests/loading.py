"""What the tests of loaders share: collecting and comparing batches, finding a loader's processes, running scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import penstock as ps

Batch = dict[str, Any]


def copied(batch: Batch) -> Batch:
    """The batch in memory of its own."""
    return {name: _copy(value) for name, value in batch.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copy(item) for item in value] if isinstance(value, list) else value


def epochs(pipe: ps.Pipe, count: int = 1, **options: Any) -> list[list[Batch]]:
    """The batches of some epochs."""
    with ps.Loader(pipe, **options) as loader:
        return [[copied(batch) for batch in loader] for _ in range(count)]


def rest(loader: Iterable[Batch]) -> list[Batch]:
    """The batches of one iteration."""
    return [copied(batch) for batch in loader]


def ids(batches: Iterable[Batch]) -> list[int]:
    """The numbers of the samples, in order."""
    return [id for batch in batches for id in batch["id"].tolist()]


def assert_same(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    """Bit for bit: the same fields in the same order, of the same types, shapes, memory formats and values."""
    assert ids(found) == ids(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name in one:
            _assert_equal(one[name], other[name])


def _assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.view(torch.uint8).equal(other.view(torch.uint8)) if one.dim() else one.equal(other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    else:
        assert one == other


def workers(loader: ps.Loader, count: int | None = None) -> list[int]:
    """The processes of a loader's workers; with `count`, once so many are ready."""
    pids: list[int] = []

    def ready() -> bool:
        pids[:] = [worker["pid"] for worker in loader.stats()["workers"] if psutil.pid_exists(worker["pid"])]
        return count is None or len(pids) >= count

    wait_until(ready)
    return pids


def coordinator() -> int:
    """The only coordinator among this process's children."""
    (found,) = [p.pid for p in psutil.Process().children() if "penstock.coordinator" in " ".join(p.cmdline())]
    return found


def template(loader: ps.Loader) -> int:
    """The process that a loader's workers are forked from."""
    return psutil.Process(workers(loader, 1)[0]).ppid()


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Until it holds; fails when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """The process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_LAUNCHER = """
import os, sys
import numpy, psutil, torch
import penstock.loader
import penstock as ps

def launch():
    for line in sys.stdin:
        path = line.strip()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            for fd, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(path + "." + name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
            return path
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

path = launch()
if path:
    exec(compile(open(path).read(), path, "exec"))
"""


class Launcher:
    """Runs training scripts, one at a time, each in a process group of its own; they need not import torch again."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, path: Path, text: str) -> Script:
        """Run a script that is written to this path."""
        path.write_text(text)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return Script(self, path)

    def line(self) -> int:
        """The next number that it says."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Script:
    """A script that runs."""

    def __init__(self, launcher: Launcher, path: Path) -> None:
        self._launcher = launcher
        self._path = path
        self.pid = launcher.line()

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self._read("out")

    def _read(self, name: str) -> str:
        file = Path(f"{self._path}.{name}")
        return file.read_text() if file.exists() else ""

    def first_line(self) -> str:
        """What it says first."""
        wait_until(lambda: "\n" in self.output or gone(self.pid))
        assert "\n" in self.output, self._read("err")
        return self.output.splitlines()[0]

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code, what it wrote to the standard error."""
        return self._launcher.line(), self._read("err")
