"""Training scripts that know nothing of Penstock, and storage whose speed is known."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import penstock

__all__ = ["Disk", "Outcome", "Samples", "command", "diagnose", "plain"]

SOURCES = str(Path(penstock.__file__).parent.parent)

PHOTOS = """
import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def resize(image):
    return image.resize((32, 32))


def to_tensor(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()


class Photos(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root).rglob("*.jpg"))
        self.transform = Compose([resize, to_tensor])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


parser = argparse.ArgumentParser()
parser.add_argument("root")
parser.add_argument("--epochs", type=int, required=True)
options = parser.parse_args()
torch.set_num_threads(1)
loader = DataLoader(Photos(options.root), batch_size=5, shuffle=True, num_workers=1)
check = DataLoader(Photos(options.root), batch_size=4)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
for epoch in range(options.epochs):
    with torch.no_grad():
        for batch in check:
            model(batch)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
print("the script has ended")
"""
"""Photographs, with a second loader that trains nothing."""

_PLAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], 0.1)
loader = DataLoader(TensorDataset(torch.zeros({samples}, 3)), batch_size=2)
for epoch in range({epochs}):
    for number, (batch,) in enumerate(loader):
        {body}
print("the script has ended")
"""


def plain(body: str, samples: int = 200, epochs: int = 1) -> str:
    """A training of data in memory, without workers."""
    return _PLAIN.format(body=body, samples=samples, epochs=epochs)


@dataclass(frozen=True)
class Outcome:
    """What the command did."""

    status: int
    out: str
    err: str
    profile: dict[str, Any] | None


def command(*arguments: object) -> list[str]:
    """Run as a program; -X importtime and the like are not wanted here, warnings of the script are its own."""
    return [sys.executable, "-m", "penstock.cli", *map(str, arguments)]


def diagnose(
    folder: Path, script: str, *own: object, options: Sequence[object] = (), launcher: Sequence[str] = ()
) -> Outcome:
    """Write the script into a folder and diagnose it there, with few steps."""
    path, saved = folder / "train.py", folder / "profile.json"
    path.write_text(script)
    line = command("diagnose", "--steps", 4, "--profile", saved, *options, path, "--", *own)
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *line[1:]] if launcher else line,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    profile = json.loads(saved.read_text()) if saved.exists() else None
    return Outcome(done.returncode, done.stdout, done.stderr, profile)


class Disk:
    """Reads files at a rate that is known where the page cache does not hold them, for all processes together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = multiprocessing.Value("d", 0.0)

    def read(self, path: str) -> bytes:
        """The whole file."""
        fd = os.open(path, os.O_RDONLY)
        try:
            data = bytearray(os.fstat(fd).st_size)
            if not _cached(fd, data):
                self._wait(len(data))
                os.preadv(fd, [data], 0)
            return bytes(data)
        finally:
            os.close(fd)

    def _wait(self, nbytes: int) -> None:
        with self._free_at.get_lock():
            self._free_at.value = max(self._free_at.value, time.monotonic()) + nbytes / self._rate
            until = self._free_at.value
        time.sleep(max(0.0, until - time.monotonic()))


def _cached(fd: int, data: bytearray) -> bool:
    """Filled from the page cache alone."""
    try:
        return os.preadv(fd, [data], 0, os.RWF_NOWAIT) == len(data)
    except BlockingIOError:
        return False


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Files on such a disk, each prepared in a time that is known."""

    def __init__(self, folder: Path, disk: Disk, prep_s: float) -> None:
        self._paths = sorted(map(str, folder.iterdir()))
        self._disk = disk
        self._prep_s = prep_s

    def __len__(self) -> int:
        return len(self._paths)

    def fetch(self, index: int) -> bytes:
        """What a sample needs from storage."""
        return self._disk.read(self._paths[index])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        head = bytearray(self.fetch(index)[:64])
        time.sleep(self._prep_s)
        return torch.frombuffer(head, dtype=torch.uint8), index
