"""Training scripts that know nothing of Penstock, and how they are diagnosed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock

__all__ = ["PHOTOS", "Outcome", "diagnose", "plain"]

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


def diagnose(
    folder: Path, script: str, *own: object, options: Sequence[object] = (), launcher: Sequence[str] = ()
) -> Outcome:
    """Write the script into a folder and diagnose it there, with few steps."""
    path, saved = folder / "train.py", folder / "profile.json"
    path.write_text(script)
    line = ["-m", "penstock.cli", "diagnose", "--steps", 4, "--profile", saved, *options, path, "--", *own]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, line)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    profile = json.loads(saved.read_text()) if saved.exists() else None
    return Outcome(done.returncode, done.stdout, done.stderr, profile)
