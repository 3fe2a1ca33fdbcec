"""What a machine gives a training: cores, memory, GPUs; and what memory leaves to the page cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from penstock.limits import memory_room
from penstock.options import available_cores

__all__ = ["Machine"]


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
        room, (gpu, gpus) = memory_room(), _gpus()
        return cls(available_cores(), room.total, room.free, gpu, gpus)


def _gpus() -> tuple[str | None, int]:
    """The GPU that the script uses; asking for it must not make a process use one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, 0
    return str(torch.cuda.get_device_name()), int(torch.cuda.device_count())
