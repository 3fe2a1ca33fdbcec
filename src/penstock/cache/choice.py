"""Which share of the samples is cached decoded, as the first samples of the first epoch suggest.

The processes that fill a cache have to agree on that share, and so have later jobs that use the same memory. The first
that has measured enough samples settles it, in the cache itself, where nothing is ever changed. Until then samples are
cached encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from penstock.cache.arena import Shelf
from penstock.cache.forms import Costs, Form, chosen, split

__all__ = ["Choice", "Settled", "settled"]

_MEASURED = 16
"""Samples that a process measures before it settles the share: 30 ms of work, and a few MB that stay encoded."""


@dataclass(frozen=True)
class Settled:
    """The share of samples that are cached decoded, and the measured costs behind it."""

    share: float
    costs: Costs


def settled(shelf: Shelf) -> Settled | None:
    """What was settled, if it was."""
    found = shelf.get(0)
    if found is None:
        return None
    said = json.loads(found[0])
    return Settled(said["share"], Costs(**said["costs"]))


class Choice:
    """The form of each sample, as one process sees it. `shelf` has one place, for what is settled; `room` tells the
    bytes that these samples may take."""

    def __init__(self, shelf: Shelf, samples: int, room: Callable[[], int]) -> None:
        self._shelf = shelf
        self._samples = samples
        self._room = room
        self._share: float | None = None
        self._met: list[Costs] = []

    @property
    def measuring(self) -> bool:
        """Samples are still measured."""
        if self._share is None:
            found = settled(self._shelf)
            self._share = found.share if found is not None else None
        return self._share is None

    def form(self, id: int) -> Form:
        """How to cache this sample."""
        return "encoded" if self.measuring else chosen(id, self._share or 0.0)

    def learn(self, costs: Costs) -> None:
        """What a sample cost."""
        self._met.append(costs)
        if len(self._met) < _MEASURED:
            return
        mean = _mean(self._met)
        share = split(mean, self._samples, self._room()).share
        self._shelf.put(0, json.dumps({"share": share, "costs": asdict(mean)}).encode())
        self._met.clear()


def _mean(met: list[Costs]) -> Costs:
    """Of sizes the mean, of times the median: a pause of the machine's is no cost of a sample's."""
    sizes = [(costs.encoded_bytes, costs.decoded_bytes) for costs in met]
    encoded, decoded = (sum(column) / len(met) for column in zip(*sizes, strict=True))
    fetch, decode = (
        sorted(column)[len(met) // 2] for column in zip(*((one.fetch_s, one.decode_s) for one in met), strict=True)
    )
    return Costs(encoded, decoded, fetch, max(0.0, decode))
