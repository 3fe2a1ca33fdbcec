"""A batch as a tree of containers and tensors: counted, cut, copied to a device, handed out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["cut", "fresh", "nbytes", "on_device", "on_host", "rows"]


def rows(batch: Any) -> int | None:
    """Samples in a batch: the first size of its first tensor; None where it has none."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    return None


def nbytes(batch: Any) -> int:
    """Bytes of its tensors."""
    return sum(tensor.nbytes for tensor in _tensors(batch))


def fresh(batch: Any) -> Any:
    """The same tensors in containers of their own: a script may take a batch apart."""
    return _mapped(batch, lambda tensor: tensor)


def cut(batch: Any, size: int) -> Any:
    """The first samples of a batch; None where it does not say which of its sizes counts samples."""
    count = rows(batch)
    if count is None or size >= count:
        return None
    return _mapped(batch, lambda tensor: tensor[:size] if tensor.ndim and tensor.shape[0] == count else tensor)


def on_host(batch: Any) -> bool:
    """It has tensors that a step on a device would have to copy there."""
    return any(tensor.device.type == "cpu" for tensor in _tensors(batch))


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Containers of the same kinds; what is none and no tensor stays itself."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    return value
