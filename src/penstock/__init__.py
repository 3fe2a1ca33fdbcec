"""Penstock: a PyTorch input pipeline that keeps accelerators fed.

import penstock as ps

pipe = ps.files("data/train").decode().random_resized_crop(224).flip().batch(64)
with ps.Loader(pipe, seed=0) as loader:
    for batch in loader:
        batch["image"], batch["label"], batch["id"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dataloader import DataLoader
    from penstock.diagnosis import diagnose
    from penstock.errors import (
        DiagnosisError,
        GraphError,
        LaneError,
        MissingExtraError,
        OptionError,
        PenstockError,
        SampleError,
        SourceError,
        StalledError,
        StateError,
    )
    from penstock.loader import Loader
    from penstock.lowering import lower
    from penstock.pipe import Pipe, arrays, dataset, files, parquet, source, tars

__version__ = "0.1.0"

_WHERE = {
    "penstock.errors": (
        "DiagnosisError",
        "GraphError",
        "LaneError",
        "MissingExtraError",
        "OptionError",
        "PenstockError",
        "SampleError",
        "SourceError",
        "StalledError",
        "StateError",
    ),
    "penstock.dataloader": ("DataLoader",),
    "penstock.diagnosis": ("diagnose",),
    "penstock.loader": ("Loader",),
    "penstock.lowering": ("lower",),
    "penstock.pipe": ("Pipe", "arrays", "dataset", "files", "parquet", "source", "tars"),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [  # noqa: RUF022 - sorted by what they are
    "Loader",
    "DataLoader",
    "lower",
    "Pipe",
    "files",
    "tars",
    "parquet",
    "arrays",
    "dataset",
    "source",
    "diagnose",
    "PenstockError",
    "DiagnosisError",
    "GraphError",
    "LaneError",
    "MissingExtraError",
    "OptionError",
    "SampleError",
    "SourceError",
    "StalledError",
    "StateError",
]


def __getattr__(name: str) -> Any:
    """Import on first use: workers and the coordinator import this package without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
