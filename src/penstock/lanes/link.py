"""The coordinator's connection to the thread that serves a device in the training process (see device.py).

Through it batches are copied to the device, and a GPU lane has its tiny-batches prepared there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import LaneError
from penstock.lanes import Events, Slot
from penstock.lanes.crew import Crew
from penstock.lanes.gpu import GpuLane
from penstock.layout import Layout
from penstock.loop import Loop
from penstock.slots import Books
from penstock.wire import Channel
from penstock.work import Request, failure

__all__ = ["DeviceConfig", "DeviceEvents", "DeviceLink", "image_column"]


@dataclass(frozen=True)
class DeviceConfig:
    """How batches get to a device. Plain data."""

    lane: bool
    """There is to be a GPU lane."""
    stagers: int
    """Workers that stage for each device's lane."""
    depth: int
    """Tasks of each device's lane, each in a stage slot: one for every stager, one staged, the others on the device."""
    stage_bytes: int
    grain: int
    """Rows that the GPU lane takes at a time."""
    spare: bool
    """There are cores for CPU lanes to decode on, beside the stagers and the training process."""
    exact: bool
    """Where the lane's images differ from a CPU lane's, every row that it can take is its."""


class DeviceEvents(Events, Protocol):
    """What the link reports to the coordinator, beside what lanes report."""

    def batch_copied(self, seq: int) -> None:
        """All of a batch is on the device."""

    def device_open(self) -> None:
        """A device has said whether it has a lane."""

    def gpu_failed(self) -> None:
        """A device's lane has returned all that it had begun, and can do no more."""


def image_column(layout: Layout) -> int:
    """The column that a GPU lane fills."""
    return next(index for index, column in enumerate(layout.columns) if column.image)


class DeviceLink:
    """One device. Its lane, where it is to have one, is number `number`, as are those of all devices."""

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        events: DeviceEvents,
        books: Books,
        crew: Crew,
        config: DeviceConfig,
        number: int,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._events = events
        self._crew = crew
        self.lane: GpuLane | None = None
        self.open = False
        """The device has said whether it has a lane."""
        self.identical = False
        """The lane's images have been seen to equal a CPU lane's."""
        loop.listen(channel, self._from_device, closed=self._gone)
        if config.lane:
            generation = books.keep(config.stage_bytes, config.depth)
            fd, slots, capacity = books.region(generation)
            self._post(("stage", slots, capacity), (os.dup(fd),))
            stage_slots = [(generation, index) for index in range(slots)]
            self.lane = GpuLane(number, events, stage_slots, self._stage, self._prepare)

    def region(self, generation: int, fd: int, slots: int, capacity: int) -> None:
        """Memory of batches begins to be used; the descriptor is taken."""
        self._post(("region", generation, slots, capacity), (fd,))

    def forget(self, generation: int) -> None:
        """No slot of this region will be used again."""
        self._post(("forget", generation))

    def copy(self, seq: int, slot: Slot, spans: Sequence[tuple[int, int]]) -> None:
        """Have parts of a slot copied; `batch_copied` follows."""
        self._post(("copy", seq, slot, spans))

    def run(self, task: int, index: int, request: Request, slot: Slot) -> None:
        """Have the device's lane run a piece."""
        assert self.lane is not None
        lane = self.lane
        if lane.lost:  # it answers at once, and nobody may hear of a piece's end who is still handing it out
            self._loop.after(0.0, lambda: lane.run(task, index, request, slot))
        else:
            lane.run(task, index, request, slot)

    # inside

    def _post(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        self._loop.post(self._channel, message, fds)

    def _stage(self, stager: int, number: int, request: Request, slot: Slot) -> None:
        self._crew.run(stager, number, [(request, slot)])

    def _prepare(self, number: int, stage: Slot, slot: Slot, layout: bytes) -> None:
        laid = Layout.unpack(layout)
        self._post(("prepare", number, stage[1], slot, laid.columns[image_column(laid)].offset))

    def _from_device(self, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_device_ready(self, problem: str | None, identical: bool) -> None:
        self.open, self.identical = True, identical
        if self.lane is not None and problem is not None:
            self.lane.lose()
        self._events.device_open()

    def _on_lane_failed(self) -> None:
        assert self.lane is not None
        self.lane.lose()
        self._events.gpu_failed()

    def _on_device_failed(self, reason: str) -> None:
        self._events.lanes_failed(failure(LaneError(f"batches cannot be brought to the device: {reason}")))

    def _on_prepared(self, number: int, failed: Sequence[int], seconds: float) -> None:
        assert self.lane is not None
        self.lane.landed(number, failed, seconds)

    def _on_copied(self, seq: int) -> None:
        self._events.batch_copied(seq)

    def _gone(self) -> None:
        """The training process ends; its own connection says so."""
        self._channel.close()
