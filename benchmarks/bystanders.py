"""How much of the cores other processes took while something was measured: a disturbed figure says nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Measured
from penstock.diagnosis.counters import counters

__all__ = ["Bystanders", "undisturbed"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DISTURBED_CORES = 0.05
_ATTEMPTS = 1


class Bystanders:
    """From here on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy_s, self._own_s = _busy_s(), counters().cpu_s

    def cores(self) -> float:
        """Cores that others kept busy since, the hypervisor's other guests among them."""
        seconds = time.perf_counter() - self._began
        return max(0.0, _busy_s() - self._busy_s - (counters().cpu_s - self._own_s)) / seconds


def _busy_s() -> float:
    """User, nice, system, interrupts, and what was stolen."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def undisturbed(measure: Callable[[], Measured]) -> Measured:
    """The first measurement whose `others_cores` is small, else the least disturbed of several."""
    found: list[Measured] = []
    for _ in range(_ATTEMPTS):
        found.append(measure())
        if found[-1]["others_cores"] <= _DISTURBED_CORES:
            break
    return min(found, key=lambda measured: float(measured["others_cores"]))
