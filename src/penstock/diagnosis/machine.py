"""What a machine gives a training: cores, memory, GPUs; and what memory leaves to the page cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.options import available_cores

__all__ = ["Machine"]

_UNLIMITED = 1 << 60
"""Version 1 of the control groups writes a number about as large for no limit."""


@dataclass(frozen=True)
class Machine:
    """The resources that all ranks of this host share."""

    cores: int
    memory_bytes: int
    free_bytes: int
    """Of it, what no program holds: pages that cache files count as free."""
    gpu: str | None
    gpus: int

    @classmethod
    def here(cls) -> Machine:
        """This machine, as this process may use it."""
        total, free = _memory()
        for limit, used in _limits():
            total, free = min(total, limit), min(free, max(0, limit - used))
        gpu, gpus = _gpus()
        return cls(available_cores(), total, free, gpu, gpus)


def _memory() -> tuple[int, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    return fields["MemTotal"], fields["MemAvailable"]


def _limits() -> Iterator[tuple[int, int]]:
    """Limit, and what is used without files, of each control group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _along(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "")
        elif controllers == "memory":
            root = Path("/sys/fs/cgroup/memory")
            yield from _along(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _along(root: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[tuple[int, int]]:
    """In a container the path may be one of the host's, which is not there: its own group is then the root."""
    folder = root / path.lstrip("/")
    while folder.is_relative_to(root):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None and most < _UNLIMITED:
            yield most, max(0, now - _cached(folder / "memory.stat", prefix))
        folder = folder.parent


def _cached(stat: Path, prefix: str) -> int:
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gpus() -> tuple[str | None, int]:
    """The GPU that the script uses; asking for it must not make a process use one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, 0
    return str(torch.cuda.get_device_name()), int(torch.cuda.device_count())
