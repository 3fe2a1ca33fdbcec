"""Storage of known speed: a disk in Python behind the real page cache, and a real disk that the kernel throttles."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

__all__ = ["Disk", "Samples", "limited"]

_GROUPS = Path("/sys/fs/cgroup")


class Disk:
    """Reads files at a known rate where the page cache does not hold them, for all processes together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = multiprocessing.Value("d", 0.0)

    def read(self, path: str) -> bytes:
        """The whole file."""
        fd = os.open(path, os.O_RDONLY)
        try:
            data = bytearray(os.fstat(fd).st_size)
            if not _cached(fd, data):
                self._wait(len(data))
                os.preadv(fd, [data], 0)
            return bytes(data)
        finally:
            os.close(fd)

    def _wait(self, nbytes: int) -> None:
        with self._free_at.get_lock():
            self._free_at.value = max(self._free_at.value, time.monotonic()) + nbytes / self._rate
            until = self._free_at.value
        time.sleep(max(0.0, until - time.monotonic()))


def _cached(fd: int, data: bytearray) -> bool:
    """Filled from the page cache alone."""
    try:
        return os.preadv(fd, [data], 0, os.RWF_NOWAIT) == len(data)
    except BlockingIOError:
        return False


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Files on such a disk, each prepared in a known time."""

    def __init__(self, folder: Path, disk: Disk, prep_s: float) -> None:
        self._paths = sorted(map(str, folder.iterdir()))
        self._disk = disk
        self._prep_s = prep_s

    def __len__(self) -> int:
        return len(self._paths)

    def fetch(self, index: int) -> bytes:
        """What a sample needs from storage."""
        return self._disk.read(self._paths[index])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        head = bytearray(self.fetch(index)[:64])
        time.sleep(self._prep_s)
        return torch.frombuffer(head, dtype=torch.uint8), index


@contextlib.contextmanager
def limited(folder: Path, bytes_per_s: int, memory_bytes: int) -> Iterator[None]:
    """This process, and what it starts, reads the folder's disk so fast and has so much memory, page cache included.

    Control groups of version 1, and root, are needed.
    """
    if not (_GROUPS / "blkio").is_dir() or not (_GROUPS / "memory").is_dir() or os.geteuid() != 0:
        raise RuntimeError("limiting a disk and memory needs control groups of version 1, mounted, and root")
    settings = {
        "blkio": ("blkio.throttle.read_bps_device", f"{_disk_of(folder)} {bytes_per_s}"),
        "memory": ("memory.limit_in_bytes", str(memory_bytes)),
    }
    with contextlib.ExitStack() as stack:
        for controller, (file, value) in settings.items():
            stack.enter_context(_group(controller, file, value))
        yield


@contextlib.contextmanager
def _group(controller: str, file: str, value: str) -> Iterator[None]:
    before = _GROUPS / controller / _path_of(controller).lstrip("/")
    group = before / f"penstock-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (before / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process that is about to end is still in it
            group.rmdir()


def _path_of(controller: str) -> str:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return next(path for _, controllers, path in lines if controllers == controller)


def _disk_of(folder: Path) -> str:
    """The numbers of the disk, not of its partition, which the kernel does not throttle."""
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return ((place.parent if (place / "partition").exists() else place) / "dev").read_text().strip()
