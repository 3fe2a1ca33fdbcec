"""Functions for pipelines whose workers come from a clean process; without torch, so that they start soon."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.lanes.processes import STACK_SIGNAL

Sample = dict[str, Any]


def steady(sample: Sample) -> Sample:
    """Some milliseconds of work, and something random."""
    time.sleep(0.003)
    return {"x": sample["x"], "draw": random.random(), "row": np.full(3000, sample["x"])}


def spin() -> None:
    while True:
        pass


def sleep_long() -> None:
    time.sleep(3600)


def block_in_c() -> None:
    ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter lock


def end_when_asked_for_the_stack() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    while STACK_SIGNAL not in signal.sigpending():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


class Hanging:
    """Hangs once, at sample 13."""

    def __init__(self, how: Callable[[], None], mark: str) -> None:
        self.how, self.mark = how, mark

    def __call__(self, sample: Sample) -> Sample:
        if sample["x"] == 13 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            self.how()
        return sample
