"""What a trial reads off: CPU time of a tree of processes, GPU memory, how long the device waited for batches."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Measured

__all__ = ["DevicePace", "HostPace", "Pace", "cpu_seconds", "in_use_mib", "machine", "pace", "synchronise"]

AHEAD = 3
"""Steps that launches run ahead of the device, at most. Where a step is one graph's launch nothing else bounds it."""


def cpu_seconds(root: int) -> float:
    """CPU time of a process and of all below it, with those that ended and were waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                parents[int(entry)], ticks[int(entry)] = int(fields[1]), sum(map(int, fields[11:15]))
    return sum(ticks[process] for process in ticks if _below(process, root, parents)) / os.sysconf("SC_CLK_TCK")


def _below(process: int, root: int, parents: dict[int, int]) -> bool:
    while process != root and process in parents:
        process = parents[process]
    return process == root


def synchronise(device: str) -> None:
    """Wait for all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_use_mib(device: str) -> float:
    """GPU memory in use by all processes."""
    if device != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


class HostPace:
    """Where steps run in the calling thread."""

    def __init__(self) -> None:
        self._waited, self._ended = 0.0, time.perf_counter()

    def ready(self) -> None:
        """A batch is there, its step begins."""
        self._waited += time.perf_counter() - self._ended

    def done(self) -> None:
        """The step is over."""
        self._ended = time.perf_counter()

    def finish(self) -> float:
        """Seconds between steps."""
        return self._waited


class DevicePace:
    """Where steps are launched: seconds for which the device had no step between two, by its own events."""

    def __init__(self) -> None:
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._ended = self._event()
        self._ended.record()
        self._waited_ms = 0.0

    def ready(self) -> None:
        """A batch is there, its step begins."""
        self._running.append((self._event(), self._event()))
        self._running[-1][0].record()

    def done(self) -> None:
        """The step is launched; wait until no more than AHEAD are under way."""
        self._running[-1][1].record()
        if len(self._running) > AHEAD:
            self._retire()

    def finish(self) -> float:
        """Seconds between steps, once all are over."""
        while self._running:
            self._retire()
        return self._waited_ms / 1000

    def _retire(self) -> None:
        begun, ended = self._running.popleft()
        ended.synchronize()
        self._waited_ms += self._ended.elapsed_time(begun)
        self._ended = ended

    @staticmethod
    def _event() -> torch.cuda.Event:
        """One that is waited for asleep, for a waiting thread must not take a core from the loader."""
        return torch.cuda.Event(enable_timing=True, blocking=True)


Pace = HostPace | DevicePace


def pace(device: str) -> Pace:
    """The one for a device."""
    return DevicePace() if device == "cuda" else HostPace()


def machine(device: str) -> Measured:
    """What the measuring process runs on."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_mib": properties.total_memory >> 20, "cuda": torch.version.cuda}
        found |= {"cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return found


def _driver() -> str:
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return ""
