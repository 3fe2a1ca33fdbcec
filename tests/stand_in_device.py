"""A device without a GPU: mirrors in this process's memory, and a lane that does with the CPU's kernels what the table
of a stage slot says. What it makes can equal a CPU lane's bit for bit only if the stage holds all that was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.crop import View
from penstock.decode import oriented
from penstock.device import Device, Ticket
from penstock.errors import LaneError
from penstock.kernels import jpeg
from penstock.kernels.pixels import Op, apply
from penstock.kernels.resample import FILTERS
from penstock.kernels.table import Column, Kind
from penstock.lanes import Slot
from penstock.placing import Sizes
from penstock.slots import Region
from penstock.stage import Recipe, Stage


class Done(Ticket):
    """Something that is done after a while."""

    def __init__(self, failed: Sequence[int] = (), after_s: float = 0.0) -> None:
        self.failed = failed
        self.seconds = after_s
        self._due = time.monotonic() + after_s

    def done(self) -> bool:
        return time.monotonic() >= self._due

    def wait(self) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))


class StandIn(Device):
    """`damaged` tells the rows of the table that the decoder refuses; after `breaks_after` tiny-batches it fails."""

    torch_device = torch.device("cpu")

    def __init__(self, recipe: Recipe | None, sizes: Sizes | None, name: str = "cuda") -> None:
        self.name = name
        self.recipe, self.sizes = recipe, sizes
        self.mirrors: dict[int, tuple[Region, NDArray[np.uint8]]] = {}
        self.rows = self.tiny_batches = self.copied_bytes = 0
        self.held: set[Slot] = set()
        self.breaks_after: int | None = None
        self.takes_s = self.busy_until = 0.0
        self.damaged: Callable[[NDArray[np.int32]], bool] = lambda row: False
        self.closed = False

    def open(self) -> str | None:
        return "none is wanted" if self.recipe is None else None

    def add_region(self, generation: int, region: Region, slots: int) -> None:
        self.mirrors[generation] = region, np.full((slots, region.capacity), 77, np.uint8)

    def add_stage(self, region: Region, slots: int) -> None:
        self.stage = region

    def forget_region(self, generation: int) -> None:
        del self.mirrors[generation]

    @property
    def free(self) -> bool:
        return time.monotonic() >= self.busy_until

    def prepare(self, stage: int, slot: Slot, offset: int) -> Ticket:
        if self.breaks_after is not None and self.tiny_batches >= self.breaks_after:
            raise LaneError("the stand-in was told to break")
        assert self.recipe is not None
        assert self.sizes is not None
        assert slot not in self.held, "a mirror that the user holds is written to"
        self.tiny_batches += 1
        staged = Stage(self.stage.slot(stage), self.sizes.shape)
        data = self.stage.slot(stage)[self.sizes.shape.data :]
        shape = (self.recipe.height, self.recipe.width, 3)
        size = int(np.prod(shape))
        failed = []
        for row, steps in zip(staged.table[: staged.head[0]], staged.steps, strict=False):
            if self.damaged(row):
                failed.append(int(row[Column.ROW]))
                continue
            start = offset + int(row[Column.ROW]) * size
            self.mirrors[slot[0]][1][slot[1], start : start + size] = made(row, steps, data).reshape(-1)
            self.rows += 1
        self.busy_until = time.monotonic() + self.takes_s
        return Done(failed, self.takes_s)

    def copy(self, slot: Slot, spans: Sequence[tuple[int, int]]) -> Ticket:
        assert slot not in self.held, "a mirror that the user holds is written to"
        region, mirror = self.mirrors[slot[0]]
        for start, nbytes in spans:
            mirror[slot[1], start : start + nbytes] = np.frombuffer(region.slot(slot[1]), np.uint8, nbytes, start)
            self.copied_bytes += nbytes
        return Done()

    def lease(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        self.held.add(slot)
        owner = self.mirrors[slot[0]][1][slot[1]][:]
        return torch.from_numpy(owner), owner

    def given_back(self, slot: Slot) -> None:
        self.held.discard(slot)

    def waiting(self, between: bool) -> None:
        self.between = between

    def stepping(self) -> None:
        """Its lane waits for nobody."""

    def close(self) -> None:
        self.mirrors.clear()
        self.__dict__.pop("stage", None)
        self.closed = True


def made(row: NDArray[np.int32], steps: NDArray[np.float64], data: memoryview) -> NDArray[np.uint8]:
    """What the table says, with the CPU's kernels."""
    column = {name: int(row[name]) for name in Column}
    encoded = data[column[Column.DATA] : column[Column.DATA] + column[Column.LENGTH]]
    assert column[Column.KIND] in (Kind.YCC, Kind.GRAY)
    whole = (0, 0, column[Column.WIDTH], column[Column.HEIGHT])
    image = oriented(jpeg.decode(encoded, whole), column[Column.ORIENTATION])
    x, y = column[Column.WINDOW_LEFT], column[Column.WINDOW_TOP]
    box = tuple(column[name] for name in (Column.LEFT, Column.TOP, Column.RIGHT, Column.BOTTOM))
    height, width = column[Column.RESIZED_HEIGHT], column[Column.RESIZED_WIDTH]
    window = (x, y, min(width, x + SIZE), min(height, y + SIZE))
    view = View(box, height, width, FILTERS[column[Column.FILTER]], window, bool(column[Column.FLIP]))
    chain = [(Op(int(step[0])), tuple(step[1:])) for step in steps if step[0] >= 0]
    return apply(view.pixels(image), chain)


SIZE = 24
"""Height and width of the images of all pipelines here."""
