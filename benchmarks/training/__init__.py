"""What the training benchmark is made of: models, data sets, the contenders (`loaders`), meters, one process's trial.

`benchmarks.train` measures what it is told to; `benchmarks.gpu` runs the published matrix.
"""

from __future__ import annotations

__all__ = ["AUDIO", "MODELS"]

MODELS = ("resnet18", "resnet50", "vit_b_16", "alexnet", "mobilenet_v2", "m5", "tiny")
"""torchvision's, and two that need none: `m5` hears raw waveforms, `tiny` shows on any machine that all runs."""
AUDIO = ("m5",)
