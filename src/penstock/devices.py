"""Which devices there are, and what opens them."""

from __future__ import annotations

import importlib

import torch

from penstock.device import Device
from penstock.placing import Sizes
from penstock.stage import Recipe

__all__ = ["missing", "open_device"]


def missing(device: str) -> str | None:
    """What this machine lacks for a device; None where it has all."""
    if device == "cpu":
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install a build with it, as pytorch.org says"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU; does nvidia-smi show one, and does its driver suit torch's CUDA?"
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} GPUs, and they count from 0"
    return None


def open_device(device: str, recipe: Recipe | None, sizes: Sizes | None) -> Device:
    """A device for batches; with a recipe it is to have a GPU lane."""
    gpu = importlib.import_module("penstock.gpu")
    opened: Device = gpu.CudaDevice(torch.device(device), recipe, sizes)
    return opened
