"""RandAugment, AutoAugment and TrivialAugment: which operators, how strong, which sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.augment.base import MovingOperator, rgb, whole
from penstock.augment.policies import POLICIES
from penstock.augment.steps import AUTO, RAND, TRIVIAL, Frame, Space, magnitude, step
from penstock.errors import GraphError
from penstock.graph import Units
from penstock.kernels.pixels import Step

__all__ = ["AutoAugment", "RandAugment", "TrivialAugment"]

_AUTO_BINS = 10


_RAND_NAMES, _TRIVIAL_NAMES = tuple(RAND), tuple(TRIVIAL)


@dataclass(frozen=True)
class RandAugment(MovingOperator):
    """`n` operators drawn from fourteen, each at magnitude `m` of `bins` (Cubuk et al., 2020)."""

    n: int = 2
    m: int = 9
    bins: int = 31

    name = "rand_augment"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.name, "n", self.n, 1)
        whole(self.name, "bins", self.bins, 2)
        whole(self.name, "m", self.m, 0)
        if self.m >= self.bins:
            raise GraphError(f"{self.name}: m must be less than bins, which is {self.bins}; it is {self.m}")

    @property
    def units(self) -> int:
        """An operator and a sign for each of n."""
        return 2 * self.n

    @property
    def layers(self) -> int:
        return self.n

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """n steps, fewer where Identity was drawn."""
        frame = Frame(height, width, self.sampler, rgb(self.fill))
        steps = []
        for k in range(self.n):
            name = _RAND_NAMES[int(units[2 * k] * len(_RAND_NAMES))]
            steps.append(_signed(RAND, name, self.m, self.bins, units[2 * k + 1], frame))
        return tuple(one for one in steps if one is not None)


@dataclass(frozen=True)
class TrivialAugment(MovingOperator):
    """One operator at one of `bins` magnitudes, of the wide ranges (Müller and Hutter, 2021)."""

    bins: int = 31

    name = "trivial_augment"
    units = 3  # operator, magnitude, sign
    layers = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.name, "bins", self.bins, 2)

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """One step, or none where Identity was drawn."""
        frame = Frame(height, width, self.sampler, rgb(self.fill))
        name = _TRIVIAL_NAMES[int(units[0] * len(_TRIVIAL_NAMES))]
        one = _signed(TRIVIAL, name, int(units[1] * self.bins), self.bins, units[2], frame)
        return () if one is None else (one,)


@dataclass(frozen=True)
class AutoAugment(MovingOperator):
    """One of 25 learned pairs of operators (Cubuk et al., 2019)."""

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"

    name = "auto_augment"
    units = 5  # the pair; for each of it whether, and which sign
    layers = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in POLICIES:
            raise GraphError(f"{self.name}: policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")

    def decide(self, units: Units, height: int, width: int) -> tuple[Step, ...]:
        """Up to two steps."""
        frame = Frame(height, width, self.sampler, rgb(self.fill))
        pairs = POLICIES[self.policy]
        steps = []
        for k, (name, chance, bin) in enumerate(pairs[int(units[0] * len(pairs))]):
            if units[1 + 2 * k] <= chance:
                steps.append(_signed(AUTO, name, bin, _AUTO_BINS, units[2 + 2 * k], frame))
        return tuple(one for one in steps if one is not None)


def _signed(space: Space, name: str, bin: int, bins: int, sign: float, frame: Frame) -> Step | None:
    span = space[name]
    value = magnitude(span, bin, bins, frame.height, frame.width)
    return step(name, -value if span is not None and span.signed and sign >= 0.5 else value, frame)
