"""A tiny-batch through all kernels of a GPU lane, from decoded planes to rows of a batch."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.kernels.table import Column
from penstock.kernels.triton.axes import weigh
from penstock.kernels.triton.cut import cut
from penstock.kernels.triton.finish import finish
from penstock.kernels.triton.planes import convert
from penstock.kernels.triton.steps import apply_steps, scratch_bytes

__all__ = ["Area", "run", "scratch_bytes"]


class Area(Protocol):
    """Where a tiny-batch is worked on: as many rows as the largest has."""

    planes: torch.Tensor
    images: torch.Tensor
    spare: torch.Tensor
    table: torch.Tensor
    steps: torch.Tensor
    order: torch.Tensor
    scratch: torch.Tensor


def run(area: Area, rows: int, batch: torch.Tensor) -> None:
    """Make `rows` samples from their planes, and write them to where the table says in `batch`."""
    height, width = batch.shape[1:3]
    table, images = area.table[:rows], area.images[:rows]
    weigh(area.planes, area.table, rows, height, width)
    convert(area.planes, area.table, rows, height, width)
    cut(area.planes, area.table, rows, images)
    result = apply_steps(images, area.spare[:rows], area.steps[:rows], area.scratch)
    finish(result, area.order[:rows], table[:, Column.ROW], batch, None)
