"""What the machine and this process's control groups leave of memory. Standard library only.

A process may use what the machine has free, cut by the limit of its control group and of each one around it. Pages that
only cache files count as free: the kernel gives them up when it has to. Both versions of control groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Room", "memory_room", "memory_stall_s"]

_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Room:
    """How much memory there is, and how much of it can still be had."""

    total: int
    free: int


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups says what."""

    folder: str
    controller: str
    """The field of /proc/self/cgroup that names the group."""
    limit: str
    used: str
    prefix: str


_VERSIONS = (
    _Version(_ROOT, "", "memory.max", "memory.current", ""),
    _Version(f"{_ROOT}/unified", "", "memory.max", "memory.current", ""),
    _Version(f"{_ROOT}/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def memory_room() -> Room:
    """Of the machine and the control groups, whichever leaves least."""
    machine = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    machine_total, free = (int(machine[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    total = machine_total
    for version in _VERSIONS:
        for folder in _folders(version):
            limit, used = _read(f"{folder}/{version.limit}"), _read(f"{folder}/{version.used}")
            if limit.isdigit() and used.isdigit() and int(limit) < machine_total:  # most groups have no limit
                total = min(total, int(limit))
                free = min(free, max(0, int(limit) - int(used) + _file_pages(folder, version)))
    return Room(total, free)


def memory_stall_s() -> float:
    """Seconds so far in which some task waited for memory, by the kernel's own account; 0 where it keeps none."""
    for version in _VERSIONS[:2]:
        for folder in _folders(version):
            text = _read(f"{folder}/memory.pressure")
            if text:
                return _stalled(text)
    return _stalled(_read("/proc/pressure/memory"))


def _stalled(text: str) -> float:
    some = next((line for line in text.splitlines() if line.startswith("some")), "")
    _, _, total = some.partition("total=")
    return int(total) / 1e6 if total.isdigit() else 0.0


def _folders(version: _Version) -> Iterator[str]:
    """The process's group and those around it, innermost first. In a container its own group is often the root."""
    path = _group(version.controller)
    while path:
        yield version.folder + path
        path = path.rpartition("/")[0]
    yield version.folder


def _group(controller: str) -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path.rstrip("/")
    return ""


def _file_pages(folder: str, version: _Version) -> int:
    stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
    return sum(int(stat.get(f"{version.prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
