"""A CUDA device of the training process: mirrors of batches in its memory, and a lane that makes images there.

Everything the lane needs is taken when it opens: decoders, two areas to work in by turns, compiled kernels. From then
on a tiny-batch costs a few launches on a stream of its own, and nobody waits for it but the device's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from penstock.device import Device, Ticket
from penstock.errors import LaneError
from penstock.kernels import cuda, engine
from penstock.kernels.decoder import Decoder, TinyBatch
from penstock.kernels.pixels import FLAT
from penstock.kernels.table import COLUMNS, Column
from penstock.lanes import Slot
from penstock.placing import Sizes
from penstock.slots import Region
from penstock.stage import Recipe, Stage

__all__ = ["CudaDevice"]

_GAP_POLL_S = 0.001
"""How long one waits at a time for the training thread to launch what waits for it."""
_ROOM_WAIT_S = 0.1
"""How long an allocation that failed waits for the lane's thread to be between two tiny-batches."""


class _Mirror:
    """The slots of a region on the device, and the events after which each may be written to."""

    def __init__(self, region: Region, slots: int, device: torch.device) -> None:
        self.region = region
        self.capacity = region.capacity
        self.host = _address(region, slots)
        self.memory = torch.empty(slots * region.capacity, dtype=torch.uint8, device=device)
        self.free = [_event() for _ in range(slots)]

    def place(self, index: int) -> int:
        """The address of a slot on the device."""
        return self.memory.data_ptr() + index * self.capacity


class _Holder:
    """Stands for a slot's mirror in torch: its tensor keeps this object, which keeps the memory."""

    def __init__(self, mirror: _Mirror, index: int) -> None:
        self._memory = mirror.memory
        self.__cuda_array_interface__ = {
            "shape": (mirror.capacity,),
            "typestr": "|u1",
            "data": (mirror.place(index), False),
            "version": 3,
            "stream": None,
        }


class _Area:
    """What one tiny-batch is worked on in."""

    def __init__(self, recipe: Recipe, sizes: Sizes, scratch_bytes: int, device: torch.device) -> None:
        rows, layers = sizes.shape.rows, sizes.shape.layers
        self.planes = torch.empty(sizes.shape.area_bytes, dtype=torch.uint8, device=device)
        self.images, self.spare = torch.empty(
            (2, rows, recipe.height, recipe.width, 3), dtype=torch.uint8, device=device
        ).unbind()
        self.table = torch.empty((rows, COLUMNS), dtype=torch.int32, device=device)
        self.steps = torch.empty((rows, layers, FLAT), dtype=torch.float64, device=device)
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        self.decoded = _event()
        self.ticket: _Ticket | None = None


class _Ticket(Ticket):
    """Done when its event is, which is recorded once all is launched."""

    def __init__(self, failed: Sequence[int] = ()) -> None:
        self.failed = failed
        self.seconds = 0.0
        self._begun = time.perf_counter()
        self._event = _event()
        self._launched = threading.Event()

    def launched(self, stream: torch.cuda.Stream) -> None:
        """It is done when the stream has done what it was given up to now."""
        self._event.record(stream)
        self._launched.set()

    def done(self) -> bool:
        finished = self._launched.is_set() and bool(self._event.query())  # type: ignore[no-untyped-call]
        if finished:
            self.seconds = time.perf_counter() - self._begun
        return finished

    def wait(self) -> None:
        if self._launched.wait(_GAP_POLL_S):
            self._event.synchronize()


@dataclass
class _Launch:
    """The kernels of a tiny-batch whose planes are on their way."""

    area: _Area
    rows: int
    images: torch.Tensor
    free: torch.cuda.Event
    decoded: torch.cuda.Event
    ticket: _Ticket


class CudaDevice(Device):
    """See `penstock.device.Device`. Without a recipe batches are only copied."""

    def __init__(self, device: torch.device, recipe: Recipe | None, sizes: Sizes | None) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._recipe = recipe
        self._sizes = sizes
        self._mirrors: dict[int, _Mirror] = {}
        self._areas: deque[_Area] = deque()
        self._decoder: Decoder | None = None
        self._stage: Region | None = None
        self._rest, self._decoding = contextlib.ExitStack(), contextlib.ExitStack()
        """What is let go of at the end; and the decoder, which may go earlier."""
        self._preparing = threading.Lock()
        """Areas are taken, or taken away."""
        self._starved = False
        """An allocation on this GPU failed; the lane is to give an area back."""
        self._turn = threading.Lock()
        self._between = False
        """Kernels wait for the training thread to wait."""
        self._deferred: list[_Launch] = []
        self._wants_between = False

    # the device's thread

    def open(self) -> str | None:
        index = self.torch_device.index
        cuda.load()
        self._rest.enter_context(cuda.device(index))
        torch.cuda.set_device(index)
        self._stream, self._copies = (torch.cuda.Stream(index) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._driver_stream = _DriverStream(self._stream.cuda_stream)
        if self._recipe is None or self._sizes is None:
            return "none is wanted"
        try:
            self._open_lane(index, self._recipe, self._sizes)
        except Exception as error:  # the lane's border: batches are copied all the same
            self._areas.clear()
            self._decoding.close()
            return f"{type(error).__name__}: {error}"
        return None

    def _open_lane(self, index: int, recipe: Recipe, sizes: Sizes) -> None:
        from penstock.kernels.triton import lane

        self._run = lane.run
        engine.load()
        _watch_memory()
        self._rest.enter_context(self._decoding)
        self._engine = self._decoding.enter_context(engine.Engine(index))
        self._decoder = self._decoding.enter_context(Decoder(self._engine))
        self.decoder_bytes = self._engine.counts().device_bytes
        for number in range(sizes.areas):
            try:
                self._areas.append(_Area(recipe, sizes, lane.scratch_bytes(sizes.shape.rows), self.torch_device))
            except torch.OutOfMemoryError:
                if not number:
                    raise
        self._try(recipe, sizes)
        _LANES.add(self)

    def _try(self, recipe: Recipe, sizes: Sizes) -> None:
        """Compile the kernels by making some images, and see whether they are what a CPU lane makes of the same."""
        files = _examples()[: sizes.shape.rows]
        units = np.random.default_rng(0).random((len(files), recipe.units)).tolist()
        nbytes = sizes.shape.data + sum(map(len, files)) + (1 << 16)
        memory = mmap.mmap(-1, nbytes)
        staged = Stage(memoryview(memory), replace(sizes.shape, nbytes=nbytes))
        staged.begin()
        for row, (data, draws) in enumerate(zip(files, units, strict=True)):
            if not staged.add(recipe, {"image": data}, draws, row):
                raise LaneError("an image of its own making does not fit into its memory; raise device_bytes")
        host: int = staged.head.__array_interface__["data"][0]
        cuda.register(host, nbytes)
        try:
            made = torch.empty((len(files), recipe.height, recipe.width, 3), dtype=torch.uint8)
            images = made.to(self.torch_device)
            self._submit(host, staged.head, self._areas[0], images, _event()).wait()
            made.copy_(images)
        finally:
            self._stream.synchronize()
            cuda.unregister(host)
        cpu = [recipe.on_cpu(data, draws) for data, draws in zip(files, units, strict=True)]
        self.identical = all(np.array_equal(one, other) for one, other in zip(made.numpy(), cpu, strict=True))

    def add_region(self, generation: int, region: Region, slots: int) -> None:
        mirror = self._mirror(region, slots)
        cuda.register(mirror.host, slots * region.capacity)
        self._mirrors[generation] = mirror

    def _mirror(self, region: Region, slots: int) -> _Mirror:
        """Batches need it more than the lane needs its areas."""
        while True:
            had = len(self._areas)
            try:
                return _Mirror(region, slots, self.torch_device)
            except torch.OutOfMemoryError:
                if not had:
                    raise
                with self._preparing:
                    if len(self._areas) == had:
                        self._shrink()

    def add_stage(self, region: Region, slots: int) -> None:
        self._stage = region
        self._stage_host = _address(region, slots)
        cuda.register(self._stage_host, slots * region.capacity)
        self._rest.callback(cuda.unregister, self._stage_host)

    def forget_region(self, generation: int) -> None:
        mirror = self._mirrors.pop(generation)
        self._copies.synchronize()
        cuda.unregister(mirror.host)

    @property
    def free(self) -> bool:
        with self._preparing:  # whose allocation failed may take an area away
            area = self._areas[0] if self._areas else None
            return area is None or area.ticket is None or area.ticket.done()

    def prepare(self, stage: int, slot: Slot, offset: int) -> Ticket:
        with self._preparing:
            if self._starved:
                self._shrink()
            if not self._areas:
                self._decoding.close()
                raise LaneError("an allocation on the GPU failed, and the lane has given all of its memory back")
            return self._prepare(stage, slot, offset)

    def _prepare(self, stage: int, slot: Slot, offset: int) -> Ticket:
        assert self._stage is not None
        area, mirror = self._areas[0], self._mirrors[slot[0]]
        self._areas.rotate(-1)
        while area.ticket is not None and not area.ticket.done():
            area.ticket.wait()
        host = self._stage_host + stage * self._stage.capacity
        head = np.frombuffer(self._stage.slot(stage), np.int64, 8)
        return self._submit(host, head, area, self._images(mirror, slot[1], offset), mirror.free[slot[1]])

    def _submit(
        self, host: int, head: NDArray[np.int64], area: _Area, images: torch.Tensor, free: torch.cuda.Event
    ) -> _Ticket:
        """Decode what is staged at `host`, and have the rest launched in its turn."""
        assert self._sizes is not None
        assert self._decoder is not None
        shape, rows, data_bytes = self._sizes.shape, int(head[0]), int(head[1])
        planes = area.planes.data_ptr(), area.planes.numel()
        tiny = TinyBatch(None, host + shape.table, rows, host + shape.data, data_bytes, *planes, None)
        problems = self._decoder.submit(tiny, self._driver_stream)
        self._decoder.drain()
        cuda.copy(area.table.data_ptr(), host + shape.table, 4 * COLUMNS * rows, self._driver_stream)
        cuda.copy(area.steps.data_ptr(), host + shape.steps, 8 * FLAT * shape.layers * rows, self._driver_stream)
        area.decoded.record(self._stream)
        ticket = area.ticket = _Ticket([_row(host + shape.table, index) for index in problems])
        self._launch_in_turn(_Launch(area, rows, images, free, area.decoded, ticket))
        return ticket

    def _shrink(self) -> None:
        """Give an area back, one at rest if there is any."""
        self._starved = False
        resting = self._resting()
        area = self._areas[0] if resting is None else resting
        self._areas.remove(area)
        self.areas_given_back += 1
        while area.ticket is not None and not area.ticket.done():
            area.ticket.wait()

    def _resting(self) -> _Area | None:
        """An area that nothing works in."""
        return next((area for area in self._areas if area.ticket is None or area.ticket.done()), None)

    def make_room(self) -> None:
        """In whatever thread an allocation failed: an area is given back now, or else with the next tiny-batch."""
        self._starved = bool(self._areas)
        if self._starved and self._preparing.acquire(timeout=_ROOM_WAIT_S):
            try:
                if self._resting() is not None:
                    self._shrink()
            finally:
                self._preparing.release()

    def _launch_in_turn(self, launch: _Launch) -> None:
        with self._turn:
            if self._between:
                self._deferred.append(launch)
                return
        self._launch(launch, self._stream)

    def _launch(self, launch: _Launch, stream: torch.cuda.Stream) -> None:
        """On the calling thread's current stream, which is this one."""
        stream.wait_event(launch.free)
        stream.wait_event(launch.decoded)
        self._run(launch.area, launch.rows, launch.images)
        launch.ticket.launched(stream)

    def _images(self, mirror: _Mirror, index: int, offset: int) -> torch.Tensor:
        """The rows of a batch's images, as many as there is room for."""
        assert self._recipe is not None
        size = self._recipe.height * self._recipe.width * 3
        start = index * mirror.capacity + offset
        rows = (mirror.capacity - offset) // size
        images = mirror.memory[start : start + rows * size]
        return images.view(rows, self._recipe.height, self._recipe.width, 3)

    def copy(self, slot: Slot, spans: Sequence[tuple[int, int]]) -> Ticket:
        mirror = self._mirrors[slot[0]]
        self._copies.wait_event(mirror.free[slot[1]])
        to, source = mirror.place(slot[1]), mirror.host + slot[1] * mirror.capacity
        stream = _DriverStream(self._copies.cuda_stream)
        for start, nbytes in spans:
            cuda.copy(to + start, source + start, nbytes, stream)
        ticket = _Ticket()
        ticket.launched(self._copies)
        return ticket

    def close(self) -> None:
        with contextlib.suppress(LaneError):
            self._stream.synchronize()
            self._copies.synchronize()
        for generation in list(self._mirrors):
            self.forget_region(generation)
        self._areas.clear()
        self._rest.close()
        self._stage = None

    def counts(self) -> engine.Counts:
        """What the decoder has taken for itself."""
        return self._engine.counts()

    # the training thread

    def waiting(self, between: bool) -> None:
        with self._turn:
            launches, self._deferred = self._deferred, []
            self._between = False
        if launches:
            stream = torch.cuda.current_stream(self.torch_device)
            with torch.cuda.device(self.torch_device):
                for launch in launches:
                    self._launch(launch, stream)
        self._wants_between = between

    def stepping(self) -> None:
        with self._turn:
            self._between = self._wants_between

    def lease(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        holder = _Holder(self._mirrors[slot[0]], slot[1])
        return torch.as_tensor(holder, device=self.torch_device), holder

    def given_back(self, slot: Slot) -> None:
        mirror = self._mirrors.get(slot[0])
        if mirror is not None:
            mirror.free[slot[1]].record(torch.cuda.current_stream(self.torch_device))


class _DriverStream(cuda.Stream):
    """A stream of torch's, for the driver's calls."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


def _row(table: int, index: int) -> int:
    """The row of its batch that a row of a table stands for."""
    return ctypes.c_int32.from_address(table + 4 * (COLUMNS * index + Column.ROW)).value


def _examples() -> list[bytes]:
    """Small photographs, of the samplings that there are."""
    rng = np.random.default_rng(0)
    files = []
    for number in range(8):
        width, height = (int(side) for side in rng.integers(65, 260, 2))
        coarse = rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        if number == 7:
            image.convert("L").save(stream, "JPEG", quality=90)
        else:
            image.save(stream, "JPEG", quality=90, subsampling=number % 3)
        files.append(stream.getvalue())
    return files


def _address(region: Region, slots: int) -> int:
    address: int = np.frombuffer(region.slot(0), np.uint8).__array_interface__["data"][0]
    return address


def _event() -> torch.cuda.Event:
    """Whoever waits for it sleeps."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


_LANES: weakref.WeakSet[CudaDevice] = weakref.WeakSet()
"""Devices whose lanes give memory back when the training runs out of it."""


@cache
def _watch_memory() -> None:
    """Have torch tell of allocations that failed. What a lane lets go of, torch finds when it is asked again."""

    def failed(device: int, wanted: int, total: int, free: int) -> None:
        for lane in _LANES:
            if lane.torch_device.index == device:
                lane.make_room()

    getattr(torch._C, "_cuda_attach_out_of_memory_observer")(failed)  # noqa: B009 - not in torch's type hints
