"""Where tests run Triton's kernels: on the GPU if there is one, else on the CPU in Triton's interpreter.

Imported before anything that imports triton, which looks at TRITON_INTERPRET only once.

    from triton_device import DEVICE, MARKS

    pytestmark = MARKS  # `pytest -m gpu` runs the same tests on the GPU
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["DEVICE", "MARKS"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
