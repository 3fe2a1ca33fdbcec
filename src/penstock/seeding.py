"""Seeds the generators that a user's function may draw from, per sample, from the sample's own key.

This runs for every sample, so it has to be cheap: `torch.manual_seed` costs 75 to 113 microseconds because it visits
every device, the CPU generator alone costs 1; `random.seed` costs 3.6 and `numpy.random.seed` 1.5, where filling the
twisters' states in memory costs 0.2 each.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from penstock.kernels.native import declare, lib

__all__ = ["preserved", "seed_all"]

_MASK = 0xFFFFFFFFFFFFFFFF
_WORDS = 624
_PYTHON, _NUMPY = 1, 2

declare("ps_twister", None, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)


def seed_all(key: int) -> None:
    """Put `random`, and `numpy` and `torch` where they are loaded, into a state that depends on the key alone."""
    _python()(key)
    if "numpy" in sys.modules:
        _numpy()(key)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(key & _MASK)


@cache
def _python() -> Callable[[int], None]:
    """Seeds the generator behind `random`'s functions; its state is found behind the object's head, or not at all."""
    generator: Any = random._inst
    position = id(generator) + object.__basicsize__
    words = position + ctypes.sizeof(ctypes.c_int)
    index = ctypes.c_int.from_address(position)
    known = random.getstate()[1]
    if tuple((ctypes.c_uint32 * _WORDS).from_address(words)) != known[:_WORDS] or index.value != known[_WORDS]:
        return random.seed
    twister = lib.ps_twister

    def seed(key: int) -> None:
        twister(key & _MASK, _PYTHON, words)
        index.value = _WORDS
        generator.gauss_next = None

    return seed


@cache
def _numpy() -> Callable[[int], None]:
    """Seeds the generator behind `numpy.random`'s functions, whose address numpy tells."""
    numpy = sys.modules["numpy"]
    reseed = numpy.random.seed
    shared = numpy.random.mtrand._rand
    generator = shared._bit_generator
    if type(generator).__name__ != "MT19937":
        return lambda key: reseed(key & 0xFFFFFFFF)
    words = generator.ctypes.state_address
    first = ctypes.c_uint32.from_address(words)
    position = ctypes.c_int.from_address(words + 4 * _WORDS)
    twister = lib.ps_twister
    filled = -1

    def seed(key: int) -> None:
        nonlocal filled
        if shared._bit_generator is not generator:  # numpy.random.set_bit_generator
            reseed(key & 0xFFFFFFFF)
            return
        if first.value != filled:
            reseed(0)  # something was drawn: drop the second half of a pair of normal numbers, which numpy keeps apart
        twister(key & _MASK, _NUMPY, words)
        position.value = _WORDS
        filled = first.value

    return seed


@contextmanager
def preserved() -> Iterator[None]:
    """What is drawn inside leaves the generators of this process as they were."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.default_generator.get_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)
