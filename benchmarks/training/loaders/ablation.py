"""Penstock with one part of the GPU lane after another, as FusionFlow's Figure 15(b) adds them.

Settings: "none" (every tiny-batch takes its memory and its decoder when it comes, and is waited for; unsorted), "ahead"
(all of that is taken once, ahead of time), "affinity" (large samples go to the GPU lane, small ones to CPU lanes),
"threshold" (CPU lanes leave the last rows of a batch to it): each has what those before it have. All run beside the
training's steps. On the CPU there is no lane, and only the order of work differs.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import penstock as ps
import penstock.loader
from benchmarks.training.loaders import Batches, Job
from benchmarks.training.loaders.penstock import pipe
from penstock.coordinator import Policy
from penstock.device import Device, Ticket
from penstock.placing import Sizes
from penstock.stage import Recipe

NOTE = ""
KINDS = ("image",)
SETTINGS = ("none", "ahead", "affinity", "threshold")


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    if setting not in SETTINGS:
        raise ValueError(f"the setting must be one of {', '.join(SETTINGS)}, not {setting!r}")
    level = SETTINGS.index(setting)

    class Ablated(ps.Loader):
        _policy = Policy(sort=level >= 2, leave_last=level >= 3)

    options: dict[str, Any] = {"device": job.device, "workers": job.cores, "seed": job.seed}
    if job.device == "cuda":
        options["gpu_lane"] = "beside"
    opens = mock.patch.object(penstock.loader, "open_device", penstock.loader.open_device if level else _on_demand)
    with opens, Ablated(pipe(job, normalise=True), **options) as loader:
        while True:
            for batch in loader:
                yield batch["image"], batch["label"]


def _on_demand(device: str, recipe: Recipe | None, sizes: Sizes | None) -> Device:
    """A device that takes what a tiny-batch needs when it comes."""
    from penstock import gpu
    from penstock.kernels.triton.lane import scratch_bytes

    class OnDemand(gpu.CudaDevice):
        def _prepare(self, stage: int, slot: tuple[int, int], offset: int) -> Ticket:
            assert self._recipe is not None
            assert self._sizes is not None
            self._areas.clear()
            scratch = scratch_bytes(self._sizes.shape.rows)
            self._areas.append(gpu._Area(self._recipe, self._sizes, scratch, self.torch_device))
            with gpu.Decoder(self._engine, states=1) as self._decoder:
                ticket = super()._prepare(stage, slot, offset)
                while not ticket.done():
                    ticket.wait()
            return ticket

    return OnDemand(torch.device(device), recipe, sizes)
