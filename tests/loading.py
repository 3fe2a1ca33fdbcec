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


def start_script(path: Path, text: str, **options: Any) -> subprocess.Popen[str]:
    """Run a training script in a process group of its own."""
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
        **options,
    )
