"""In which form samples are cached: encoded as they are stored, or decoded to pixels. Arithmetic over plain numbers.

An encoded sample saves its fetch from storage. A decoded one saves its decoding too, and takes more memory. So a byte
of the budget goes where it saves most seconds of a worker's time; samples count as alike, of the average size and cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["CacheForm", "Costs", "Form", "Split", "chosen", "split"]

Form = Literal["encoded", "decoded"]
CacheForm = Form | Literal["auto"]
"""What the user asks for."""

_SPREAD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples fill the range evenly."""


@dataclass(frozen=True)
class Costs:
    """A sample, on average."""

    encoded_bytes: float
    decoded_bytes: float
    fetch_s: float
    """What a worker waits for storage; `encoded_bytes` over the rate at which it reads."""
    decode_s: float
    """What it takes longer to prepare the sample from its encoded bytes than from its pixels; at least 0."""

    @property
    def encoded_gain(self) -> float:
        """Seconds saved by a byte of an encoded sample."""
        return self.fetch_s / self.encoded_bytes

    @property
    def decoded_gain(self) -> float:
        """Seconds saved by a byte of a decoded sample."""
        return (self.fetch_s + self.decode_s) / self.decoded_bytes


class Split(NamedTuple):
    """How many samples to cache in either form."""

    encoded: int
    decoded: int

    @property
    def share(self) -> float:
        """Of the cached samples, those that are decoded."""
        return self.decoded / max(1, self.encoded + self.decoded)


def split(costs: Costs, samples: int, budget_bytes: float) -> Split:
    """What saves most within the budget."""
    small, large = costs.encoded_bytes, costs.decoded_bytes
    if costs.decoded_gain > costs.encoded_gain:
        return Split(0, min(samples, int(budget_bytes / large)))
    if budget_bytes <= samples * small or large <= small:
        return Split(min(samples, int(budget_bytes / small)), 0)
    # all are cached, encoded at least: what is left decodes as many as it can
    decoded = min(samples, int((budget_bytes - samples * small) / (large - small))) if costs.decode_s > 0 else 0
    return Split(samples - decoded, decoded)


def chosen(id: int, share: float) -> Form:
    """The form of a sample where that share is decoded: the same in every process, and mixed evenly over the ids."""
    return "decoded" if (id * _SPREAD & (2**64 - 1)) < share * 2**64 else "encoded"
