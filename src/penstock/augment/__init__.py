"""Colour and the learned augmentation policies, with torchvision's names, ranges and defaults.

What chance and the image's size decide is a tuple of steps (`penstock.kernels.pixels.Op` and plain numbers) that any
lane can apply; `pixels` is how a CPU does.
"""

from penstock.augment.auto import AutoAugment, RandAugment, TrivialAugment
from penstock.augment.colour import ColorJitter, Cutout, Normalize
from penstock.augment.deep import DeepAutoAugment, DeepPolicy, load_deep_policy, uniform_policy

__all__ = [
    "AutoAugment",
    "ColorJitter",
    "Cutout",
    "DeepAutoAugment",
    "DeepPolicy",
    "Normalize",
    "RandAugment",
    "TrivialAugment",
    "load_deep_policy",
    "uniform_policy",
]
