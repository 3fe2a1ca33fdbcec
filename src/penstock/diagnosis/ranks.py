"""Which rank of a distributed training this process is, as torchrun and its like say it in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Ranks", "gathered", "here"]


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    on_host: int


def here() -> Ranks:
    """Alone, unless the environment says otherwise."""
    rank, world, local = (
        _number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    )
    return Ranks(rank, world, local)


def gathered(value: Any) -> list[Any]:
    """Each rank's value, where the script has joined its ranks; every rank asks at the same point."""
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
