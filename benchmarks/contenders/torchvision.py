"""torch DataLoader with torchvision's tensor path: libjpeg-turbo to a uint8 tensor, vectorised resize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from benchmarks.contenders import Job
from benchmarks.contenders.torch_loader import epochs, transforms

NOTE = ""
AUGMENTS = ("default", "rand")
WORKERS = (0, 1)


def _load(path: str) -> Tensor:
    image: Tensor = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return image


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    return epochs(ImageFolder(job.root, v2.Compose(transforms(job)), loader=_load), job)
