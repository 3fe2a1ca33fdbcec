"""Where the disk tier keeps a data set, and how much of it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import dataclass

from penstock.cache.reader import encoded_key, why_not_cached
from penstock.errors import OptionError
from penstock.graph import Source

__all__ = ["DiskPlan", "held_bytes", "plan_disk"]

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "ramfs", "overlay"}
"""File systems that one host alone can mount."""
_MOUNTS = "/proc/self/mountinfo"


@dataclass(frozen=True)
class DiskPlan:
    """Where samples are kept, and how much. Plain data."""

    folder: str
    """Of all data sets; the lock lies here."""
    identity: str
    """Of this data set, 32 hexadecimal digits: the name of its folder."""
    samples: int
    budget_bytes: int
    """Of all data sets in the folder together."""
    about: str
    """What people who look into the folder are told."""

    @property
    def place(self) -> str:
        """The data set's folder."""
        return os.path.join(self.folder, self.identity)


def plan_disk(source: Source, folder: str, budget: int | float) -> DiskPlan:
    """Settle folder and budget: bytes, or a fraction of what the folder could have. OptionError where it cannot be."""
    why_not = why_not_cached(source)
    if why_not is not None:
        raise OptionError(f"cache_folder keeps encoded samples as they are stored, and {why_not}; leave it out")
    try:
        os.makedirs(folder, exist_ok=True)
        own = _for_this_host(os.path.realpath(folder))
        os.makedirs(own, exist_ok=True)
        with tempfile.TemporaryFile(dir=own):
            pass
        budget_bytes = budget if isinstance(budget, int) else int(budget * _room(own))
    except OSError as error:
        raise OptionError(
            f"cache_folder={folder!r} cannot be written to ({error.strerror}); name a folder on a local disk that can"
        ) from error
    about = {"source": type(source).__name__.lower(), "samples": len(source), "first": source.place(0)}
    return DiskPlan(own, encoded_key(source).hex(), len(source), budget_bytes, json.dumps(about))


def _for_this_host(folder: str) -> str:
    """The folder itself on a disk of this host's; where other hosts may see it too, one in it of this host's name."""
    return folder if file_system(folder) in _LOCAL else os.path.join(folder, f"host-{socket.gethostname()}")


def file_system(folder: str, mounts: str = _MOUNTS) -> str:
    """The type of the file system that a folder lies on, as the kernel calls it; "" where it is not to be had."""
    longest, found = 0, ""
    try:
        with open(mounts) as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                point = left.split()[4].replace("\\040", " ")
                if len(point) >= longest and f"{folder}/".startswith(f"{point.rstrip('/')}/"):
                    longest, found = len(point), right.split()[0]  # a later mount at a place hides the earlier one
    except OSError:
        return ""
    return found


def _room(folder: str) -> int:
    """Bytes that this folder could have: what is free, and what it holds already."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize + held_bytes(folder)


def held_bytes(folder: str) -> int:
    """The size of all files of all data sets."""
    held = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                held += _size(f"{entry.path}/data") + _size(f"{entry.path}/index")
    return held


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
