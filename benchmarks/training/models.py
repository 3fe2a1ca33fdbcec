"""The models, and a step of their training: bf16 autocast, channels last, SGD with momentum (AdamW for ViT).

On the CPU, where a training shows no more than that all runs, it is float32: many have no fast bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training import AUDIO

__all__ = ["Trainer"]

RATE = 0.005
"""Small enough for AlexNet, which has no batch norm: with noise as data a larger one ends in NaN."""


class M5(nn.Sequential):
    """The five-layer network of "Very deep convolutional neural networks for raw waveforms" (Dai et al., 2017)."""

    def __init__(self, classes: int) -> None:
        layers: list[nn.Module] = []
        for before, after, kernel, stride in ((1, 128, 80, 4), (128, 128, 3, 1), (128, 256, 3, 1), (256, 512, 3, 1)):
            layers += [nn.Conv1d(before, after, kernel, stride), nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(4)]
        super().__init__(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(512, classes))


class Tiny(nn.Sequential):
    """Two convolutions."""

    def __init__(self, classes: int) -> None:
        first, second = nn.Conv2d(3, 8, 7, 4), nn.Conv2d(8, 16, 3, 2)
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), pool, nn.Flatten(), nn.Linear(16, classes))


def _built(name: str, classes: int) -> nn.Module:
    own = {"m5": M5, "tiny": Tiny}
    if name in own:
        return own[name](classes)
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, num_classes=classes)
    return model


class Trainer:
    """A model in training."""

    def __init__(self, name: str, classes: int, device: str, compile: str) -> None:
        """`compile` is a mode of torch.compile, or empty for eager."""
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        self.device = device
        layout = torch.contiguous_format if name in AUDIO else torch.channels_last
        self.model = _built(name, classes).to(device).to(memory_format=layout)  # type: ignore[call-overload]
        self.optimiser = _optimiser(name, self.model)
        self.forward: Any = torch.compile(self.model, mode=compile) if compile else self.model
        self.loss = torch.zeros(())

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Forward, backward, update. Asks nothing of the device, so that launches run ahead of it."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = nn.functional.cross_entropy(self.forward(inputs), labels)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def freeze_graphs(self) -> None:
        """From here on a batch of another layout is an error, not a minute of compilation in the middle of a run."""
        if self.forward is not self.model:
            torch._dynamo.config.error_on_recompile = True


def _optimiser(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name.startswith("vit"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4, fused=True)
