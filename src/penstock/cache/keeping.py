"""In which form a loader's cache keeps samples, as its option `cache_form` asks for it and its pipeline lets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cache.forms import CacheForm
from penstock.errors import OptionError
from penstock.graph import Graph
from penstock.stem import Stem, stem

__all__ = ["Keeping"]


@dataclass(frozen=True)
class Keeping:
    """What is kept of a sample."""

    form: CacheForm
    stem: Stem | None = None
    """What the kept pixels are; None where all is kept encoded."""
    why_encoded: str = ""
    """Where another form was asked for."""
    lane: bool = False
    """A GPU lane decodes beside the CPU lanes."""

    @classmethod
    def decide(cls, form: CacheForm, graph: Graph, *, lane: bool) -> Keeping:
        """For a graph as lanes run it."""
        if form == "encoded":
            return cls(form)
        found = stem(graph)
        if isinstance(found, str):
            if form == "decoded":
                raise OptionError(f"cache_form='decoded' keeps pixels, and {found}; use cache_form='encoded'")
            return cls("encoded", why_encoded=found)
        if form == "auto" and lane:
            return cls("encoded", why_encoded="the GPU lane decodes for itself")
        return cls(form, found, lane=lane)

    def explanation(self) -> Iterator[str]:
        """What is kept."""
        if self.stem is None:
            why = f", for {self.why_encoded}" if self.why_encoded else ""
            yield f"  keeps samples encoded, as they are stored{why}"
            return
        which = "as many as saves most time" if self.form == "auto" else "all that find room"
        yield f"  keeps samples as pixels, {which}: after {self.stem.name}, before anything that depends on chance"
        if self.lane:
            yield "  pixels serve the CPU lanes alone; what the GPU lane takes first is kept encoded"

    def state(self, state: Mapping[str, Any]) -> Iterator[str]:
        """How that went, by the cache's part of `stats()`."""
        if self.stem is None:
            return
        yield f"  holds {state['decoded_samples']:,} samples as pixels in {state['decoded_bytes']:,} bytes"
        if self.form == "auto":
            yield from _share(state["settled"])


def _share(settled: Mapping[str, Any] | None) -> Iterator[str]:
    """How the cache is divided between encoded and decoded samples."""
    if settled is None:
        yield "  the share of pixels is settled when some samples have been measured; until then all are kept encoded"
        return
    costs = settled["costs"]
    yield (
        f"  {settled['share']:.0%} of those that find room are to be pixels: a sample takes "
        f"{1000 * costs['fetch_s']:.2f} ms to read, and {1000 * costs['decode_s']:.2f} ms more to prepare from "
        f"{costs['encoded_bytes']:,.0f} encoded bytes than from {costs['decoded_bytes']:,.0f} bytes of pixels"
    )
