"""torch DataLoader over an ImageFolder: Pillow decodes, crops and resizes. What most training scripts do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.contenders import Job
from benchmarks.contenders.torch_loader import epochs, transforms

NOTE = ""
AUGMENTS = ("default", "rand")
WORKERS = (0, 1)


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """See the package."""
    return epochs(ImageFolder(job.root, v2.Compose([*transforms(job), v2.PILToTensor()])), job)
