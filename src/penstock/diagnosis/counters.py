"""What the kernel counts of this process and of those it has started: CPU seconds, bytes that a device read for them.

A process counts a device's reads as its own where it caused them, by its reading calls or by their read-ahead. Reads of
network file systems are counted as well; what a process only finds in memory is not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Counters", "counters", "own_device_bytes"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Counters:
    """Totals so far, of a process and its descendants; children that have ended and were waited for are in them."""

    cpu_s: float
    device_bytes: int | None
    """None where a process of them does not let itself be asked, or the kernel does not count."""

    def since(self, before: Counters) -> Counters:
        """What came between two readings."""
        known = self.device_bytes is not None and before.device_bytes is not None
        read = max(0, (self.device_bytes or 0) - (before.device_bytes or 0)) if known else None
        return Counters(max(0.0, self.cpu_s - before.cpu_s), read)


def counters() -> Counters:
    """The totals of this process and its descendants."""
    cpu, read = 0.0, 0
    counted = True
    for pid in _family():
        try:
            cpu += _cpu_s(pid)
        except OSError:  # it has just ended; whoever waits for it inherits its totals
            continue
        try:
            read += _device_bytes(pid)
        except FileNotFoundError:
            counted = counted and os.path.exists("/proc/self/io")
        except PermissionError:
            counted = False
        except ProcessLookupError:
            continue
    return Counters(cpu, read if counted else None)


def own_device_bytes() -> int | None:
    """Bytes that a device read for this process; None where the kernel does not count."""
    try:
        return _device_bytes(os.getpid())
    except OSError:
        return None


def _family() -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents.setdefault(int(_stat(int(name))[1]), []).append(int(name))
            except OSError:
                continue
    family = [os.getpid()]
    for pid in family:
        family += parents.get(pid, [])
    return family


def _stat(pid: int) -> list[str]:
    """From the third field on: the second, the name, may hold anything."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    """User and system time, of waited-for children too."""
    return sum(int(field) for field in _stat(pid)[11:15]) / _TICKS_PER_S


def _device_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
