"""Where the parts of a pipeline run when batches go to a device: on CPU lanes, on a GPU lane, behind the copy.

placing = place(graph, layers of options)   # pure
placing.head      # what lanes run
placing.tail      # what the device applies to whole batches, if anything
placing.recipe    # how a GPU lane follows the head; or why there is none
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.augment import Normalize
from penstock.fuse import fuse_decode
from penstock.graph import Graph
from penstock.stage import Recipe, StageShape, cook
from penstock.tail import Tail, split

__all__ = ["Placing", "Sizes", "place"]

PASSES = (fuse_decode,)
"""Rewrites of the graph before it runs; none changes a batch."""


@dataclass(frozen=True)
class Placing:
    """Which part of a graph runs where."""

    head: Graph
    tail: Tail | None = None
    recipe: Recipe | None = None
    why_no_lane: str = "batches stay in host memory"


def place(graph: Graph, *, device: bool, lane: bool, exact: bool) -> Placing:
    """Decide; `exact` leaves to the device only what it does bit for bit."""
    if not device:
        return Placing(graph.rewritten(PASSES))
    head, tail = split(graph)
    if exact and tail is not None and not all(isinstance(gate.operator, Normalize) for gate in tail.gates):
        head, tail = graph, None
    head = head.rewritten(PASSES)
    if not lane:
        return Placing(head, tail, None, "as asked")
    recipe = cook(head)
    return Placing(head, tail, None, recipe) if isinstance(recipe, str) else Placing(head, tail, recipe, "")


_MIB = 1 << 20
_BYTES_PER_FILE = 160 << 10
"""Room for the encoded bytes of an image, on average."""
_AREAS = 2
_DECODER_BYTES = 256 * _MIB
"""Room for what nvJPEG takes for itself; `explain()` says how much that is."""
_BATCHES = 4
"""Batches for whose mirrors there must be room: one in use, one that waits, two that are prepared."""


@dataclass(frozen=True)
class Sizes:
    """How a GPU lane divides its memory: `workspace_bytes` on the device for everything but mirrors."""

    grain: int
    shape: StageShape
    areas: int
    workspace_bytes: int

    @classmethod
    def of(cls, recipe: Recipe, batch: int, device_bytes: int) -> Sizes:
        """For batches of that size within a budget, of which the decoder and mirrors of batches have their part."""
        grain = max(1, min(batch, 128))
        image = recipe.height * recipe.width * 3
        images = 2 * grain * image
        room = device_bytes - _DECODER_BYTES - _BATCHES * batch * image
        area = max(16 * _MIB, min(192 * _MIB, room // _AREAS - images))
        layers = max(1, recipe.layers)
        shape = StageShape(grain, layers, 0, area)
        nbytes = shape.data + max(grain * _BYTES_PER_FILE, 4 * _MIB)
        workspace = _DECODER_BYTES + _AREAS * (area + images)
        return cls(grain, StageShape(grain, layers, nbytes, area), _AREAS, workspace)
