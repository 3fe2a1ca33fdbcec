"""WebDataset: tar shards read in sequence, shuffled in a buffer, decoded in DataLoader workers.

Decoded by torchvision, or by Pillow where RandAugment follows, which is faster on Pillow's images than on tensors.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks.contenders import Job
from benchmarks.contenders.torch_loader import transforms

NOTE = "shuffles within a buffer of 1,000"
AUGMENTS = ("default", "rand")
WORKERS = (0, 1)

SHARDS = 12


def prepare(job: Job) -> None:
    """Write the shards, the samples in random order as is the convention."""
    files = job.files()
    random.Random(job.seed).shuffle(files)
    for shard in range(SHARDS):
        with tarfile.open(job.own / f"{shard:03}.tar", "w") as tar:
            for key, (path, label) in enumerate(files[shard::SHARDS]):
                _add(tar, f"{shard:03}-{key:06}.jpg", Path(path).read_bytes())
                _add(tar, f"{shard:03}-{key:06}.cls", str(label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


def _decode(key: str, data: bytes) -> Tensor | int:
    if key.endswith("cls"):
        return int(data)
    image: Tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return image


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    shards = [str(path) for path in sorted(job.own.iterdir())]
    rand = job.augment == "rand"
    steps = [*transforms(job), v2.PILToTensor()] if rand else transforms(job)
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), seed=job.seed)
        .shuffle(1000)
        .decode("pil" if rand else _decode)
        .to_tuple("jpg", "cls")
        .map_tuple(v2.Compose(steps), int)
        .batched(job.batch)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=job.workers > 0)
    while True:
        yield from loader
