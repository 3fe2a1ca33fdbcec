"""What CPU processes prepare for a GPU lane: the stage, memory with encoded images and all that was decided for them.

    recipe = cook(graph)             # pure: what a GPU lane would do; a text says why it cannot
    stage = Stage(buffer, shape)     # a slot of memory that the lane's process has pinned
    staged = stage.add(...)          # sample by sample, until it is full

Everything by chance is decided here, so that a lane only applies. A sample that a lane cannot take is left to the CPU
lanes, which also find the words for what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import PIL

from penstock.augment.base import StepOperator
from penstock.crop import Flip, View
from penstock.decode import encoded
from penstock.fuse import DecodeCrop
from penstock.graph import Graph, Sample, Units
from penstock.image import Pixels
from penstock.kernels.facts import Facts, examine
from penstock.kernels.pixels import FLAT, Op, Step
from penstock.kernels.resample import FILTERS
from penstock.kernels.table import COLUMNS, Column, Kind, place
from penstock.tail import Gate

__all__ = ["Recipe", "Stage", "StageShape", "cook"]

_ALIGN = 256
_PITCH = 64
"""Planes begin, and their rows too, where the engine writes whole cache lines."""
_TALL_FIRST = int(PIL.__version__.split(".")[0]) >= 13


@dataclass(frozen=True)
class Recipe:
    """How a GPU lane makes the field `image`: decoded and cut, then stepped through."""

    cut: DecodeCrop
    steps: tuple[StepOperator | Flip, ...]
    height: int
    width: int

    @cached_property
    def blank(self) -> Pixels:
        """Stands for an image that the lane makes, where batches are laid out; takes no memory."""
        return np.broadcast_to(np.uint8(0), (self.height, self.width, 3))

    @property
    def layers(self) -> int:
        """The most steps of one sample."""
        return sum(step.layers if isinstance(step, StepOperator) else 1 for step in self.steps)

    def decide(self, sample: Sample, units: Units, height: int, width: int) -> tuple[View, list[Step]] | None:
        """The cut of an upright image of this size, and its steps; None where the lane cannot cut so."""
        used = self.cut.units
        view = self.cut.view(sample, units[:used], height, width)
        if view is None:
            return None
        steps: list[Step] = []
        for operator in self.steps:
            decision: Any = operator.decide(units[used : used + operator.units], self.height, self.width)
            used += operator.units
            if "boxes" in sample:
                sample["boxes"] = operator.boxes(sample["boxes"], decision, self.height, self.width)
            steps += _mirroring(operator, decision, self.height, self.width) if isinstance(operator, Flip) else decision
        return view, steps

    @property
    def units(self) -> int:
        """Draws that it takes."""
        return self.cut.units + sum(step.units for step in self.steps)

    def on_cpu(self, data: bytes, units: Units) -> Pixels:
        """What a CPU lane makes of an encoded image."""
        sample = self.cut.apply({"image": data}, units[: self.cut.units])
        used = self.cut.units
        for operator in self.steps:
            sample = operator.apply(sample, units[used : used + operator.units])
            used += operator.units
        image: Pixels = sample["image"]
        return image


def _mirroring(flip: Flip, decision: bool, height: int, width: int) -> list[Step]:
    """Every pixel is the one on the other side, exactly."""
    if not decision:
        return []
    if flip.axis == "horizontal":
        return [(Op.AFFINE, (-1.0, 0.0, float(width), 0.0, 1.0, 0.0, 0.0, 0.0, 0.0))]
    return [(Op.AFFINE, (1.0, 0.0, 0.0, 0.0, -1.0, float(height), 0.0, 0.0, 0.0))]


def cook(graph: Graph) -> Recipe | str:
    """The recipe of a graph whose decode is joined with its crops; or why a GPU lane cannot follow it."""
    cut = graph.operators[0] if graph.operators else None
    if not isinstance(cut, DecodeCrop):
        return "the pipeline does not begin with decode and a crop or resize"
    rest = graph.operators[1:]
    steps: list[StepOperator | Flip] = []
    for operator in rest:
        if isinstance(operator, StepOperator | Flip):
            steps.append(operator)
        elif not isinstance(operator, Gate):
            return f"no kernel does {operator.name}"
    image = graph.spec["image"]
    if cut.decode.channels != 3:
        return "images are decoded to one channel"
    if not image.fixed or not all(field.fixed for field in graph.spec.values()):
        return "the samples' shapes are not known beforehand"
    height, width, _ = map(int, image.shape or ())  # type: ignore[arg-type]  # the field is fixed
    return Recipe(cut, tuple(steps), height, width)


@dataclass(frozen=True)
class StageShape:
    """How stage slots are laid out: a head of eight numbers, the table, the steps, the encoded bytes."""

    rows: int
    layers: int
    nbytes: int
    area_bytes: int
    """Memory on the device in which the images of one slot are decoded and cut."""

    @property
    def table(self) -> int:
        """Where the table begins."""
        return _ALIGN

    @property
    def steps(self) -> int:
        """Where the steps begin."""
        return _aligned(self.table + 4 * COLUMNS * self.rows)

    @property
    def data(self) -> int:
        """Where the encoded bytes begin."""
        return _aligned(self.steps + 8 * FLAT * self.layers * self.rows)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Stage:
    """A stage slot being filled. `head`: rows, bytes of data, bytes of the area."""

    def __init__(self, buffer: memoryview, shape: StageShape) -> None:
        self.shape = shape
        self.head = np.frombuffer(buffer, np.int64, 8)
        self.table = np.frombuffer(buffer, np.int32, COLUMNS * shape.rows, shape.table).reshape(-1, COLUMNS)
        steps = np.frombuffer(buffer, np.float64, FLAT * shape.layers * shape.rows, shape.steps)
        self.steps = steps.reshape(shape.rows, shape.layers, FLAT)
        self._data = buffer[shape.data : shape.nbytes]

    def begin(self) -> None:
        """Empty it."""
        self.head[:] = 0

    def add(self, recipe: Recipe, sample: Sample, units: Units, row: int) -> bool | None:
        """Stage a sample as row `row` of its batch. None where no lane can take it, False where this slot is full.

        Its boxes follow; its `image` stays as it is.
        """
        data = encoded(sample["image"])
        facts = examine(data)
        if facts.refusal is not None:
            return None
        orientation = facts.orientation if recipe.cut.decode.exif else 1
        if not orientation:
            return None
        upright = (facts.height, facts.width) if orientation < 5 else (facts.width, facts.height)
        decided = recipe.decide(sample, units, *upright)
        if decided is None:
            return None
        return self._put(data, facts, orientation, recipe, *decided, row)

    def _put(
        self, data: Any, facts: Facts, orientation: int, recipe: Recipe, view: View, steps: Sequence[Step], row: int
    ) -> bool | None:
        count, start, area = (int(number) for number in self.head[:3])
        numbers = _numbers(facts, orientation, view, row)
        numbers[Column.DATA], numbers[Column.LENGTH] = start, facts.length
        end = place(numbers, _planes(numbers, facts, area), recipe.height, recipe.width, _TALL_FIRST)
        if start + facts.length > len(self._data) or end > self.shape.area_bytes or count == self.shape.rows:
            return None if count == 0 else False
        self._data[start : start + facts.length] = memoryview(data)[: facts.length]
        self.table[count] = numbers
        self._write_steps(count, steps)
        self.head[:3] = count + 1, start + -(-facts.length // _PITCH) * _PITCH, end
        return True

    def _write_steps(self, count: int, steps: Sequence[Step]) -> None:
        self.steps[count, :, 0] = -1.0
        for layer, (op, parameters) in enumerate(steps):
            self.steps[count, layer] = (float(op), *parameters, *(0.0,) * (FLAT - 1 - len(parameters)))


def _numbers(facts: Facts, orientation: int, view: View, row: int) -> list[int]:
    """The sample's row of the table, without the places of anything."""
    numbers = [0] * COLUMNS
    numbers[Column.KIND] = facts.kind
    numbers[Column.WIDTH], numbers[Column.HEIGHT] = facts.width, facts.height
    numbers[Column.SUB_X], numbers[Column.SUB_Y] = facts.sub_x, facts.sub_y
    numbers[Column.ORIENTATION] = orientation
    numbers[Column.LEFT : Column.BOTTOM + 1] = view.box
    numbers[Column.RESIZED_HEIGHT], numbers[Column.RESIZED_WIDTH] = view.height, view.width
    numbers[Column.WINDOW_LEFT], numbers[Column.WINDOW_TOP] = view.window[:2]
    numbers[Column.FLIP], numbers[Column.ROW] = view.flip, row
    numbers[Column.FILTER] = FILTERS.index(view.filter)
    return numbers


def _planes(numbers: list[int], facts: Facts, start: int) -> int:
    """Decide where the decoded planes lie; returns where they end."""
    pitch = -(-facts.width // _PITCH) * _PITCH
    numbers[Column.PLANE0], numbers[Column.PITCH0] = start, pitch
    start += pitch * facts.height
    if facts.kind is Kind.YCC:
        width, height = (facts.width - 1) // facts.sub_x + 1, (facts.height - 1) // facts.sub_y + 1
        pitch = -(-width // _PITCH) * _PITCH
        numbers[Column.PITCH1] = pitch
        numbers[Column.PLANE1], numbers[Column.PLANE2] = start, start + pitch * height
        start += 2 * pitch * height
    return -(-start // _ALIGN) * _ALIGN
