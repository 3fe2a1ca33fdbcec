"""The training process's side of a device: a thread that has batches prepared there, and copies what CPUs prepared.

Each slot of host memory has a *mirror* on the device, of the same layout. A GPU lane writes its rows into the mirror;
before a batch is handed over, what CPU lanes wrote to the slot is copied there too. All that was put on a batch is done
when it is handed over, so nobody waits for the device in the training loop; and a mirror is written to again only after
what the training loop had put on its stream when it gave the batch back.

The thread spends its time in C: waiting for messages, in the decoder, waiting for events. Between, it does a few calls
for each tiny-batch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.lanes import Slot
from penstock.slots import Region
from penstock.wire import Channel, ClosedError

__all__ = ["Device", "DeviceThread", "Ticket"]

_LOOK_S = 0.002
"""How long the thread waits for a message before it looks again whether what flies has landed. Each look takes the
interpreter from the training for some microseconds; messages wake it as well, and while many fly many come."""


class Ticket(Protocol):
    """Something that a device was asked to do."""

    seconds: float
    """How long it took, once it is done."""
    failed: Sequence[int]
    """Rows that could not be decoded, once it is done."""

    def done(self) -> bool:
        """Whether it is done. Raises what went wrong with the device."""

    def wait(self) -> None:
        """Wait until it is done, without the interpreter lock."""


class Device(ABC):
    """A device as its thread drives it. `lease`, `given_back`, `waiting` and `stepping` are the training thread's."""

    torch_device: torch.device
    identical: bool = False
    """The lane's images have been seen to equal a CPU lane's, bit for bit."""
    decoder_bytes: int = 0
    """Memory of the device that the lane's decoder has taken for itself."""
    areas_given_back: int = 0
    """Parts of its memory that the lane gave back, since allocations on the device failed."""

    @abstractmethod
    def open(self) -> str | None:
        """Take what is needed, in the thread. Why there can be no lane, or None where there can."""

    @abstractmethod
    def add_region(self, generation: int, region: Region, slots: int) -> None:
        """Host memory of batches; makes their mirrors."""

    @abstractmethod
    def add_stage(self, region: Region, slots: int) -> None:
        """Host memory of what is staged."""

    @abstractmethod
    def forget_region(self, generation: int) -> None:
        """Let go of it; batches that were handed out stay valid."""

    @property
    @abstractmethod
    def free(self) -> bool:
        """`prepare` would not have to wait."""

    @abstractmethod
    def prepare(self, stage: int, slot: Slot, offset: int) -> Ticket:
        """Decode, cut and step what lies in a stage slot, into the mirror of a batch's slot, where images lie from
        `offset` on. LaneError where that cannot be done any more."""

    @abstractmethod
    def copy(self, slot: Slot, spans: Sequence[tuple[int, int]]) -> Ticket:
        """Copy parts (start, bytes) of a slot to its mirror."""

    @abstractmethod
    def lease(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        """The mirror as bytes, and an object that lives for as long as a tensor over it does."""

    @abstractmethod
    def given_back(self, slot: Slot) -> None:
        """What is on the training thread's stream now may still read the mirror; what comes later does not."""

    @abstractmethod
    def waiting(self, between: bool) -> None:
        """The training thread has given the device all of a step and waits for the next batch, from now on. With
        `between`, what the lane does afterwards waits until it does so again."""

    @abstractmethod
    def stepping(self) -> None:
        """The training thread has its batch."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what was begun, and let go of all. Called by the thread."""


@dataclass
class _Flight:
    ticket: Ticket
    kind: str
    number: int


@dataclass
class DeviceThread:
    """Serves the coordinator's requests on one device until the connection closes."""

    device: Device
    channel: Channel
    problem: str | None = None
    """Why there is no GPU lane, or no longer."""
    _flights: deque[_Flight] = field(default_factory=deque)
    _waiting: deque[tuple[int, int, Slot, int]] = field(default_factory=deque)
    """Tiny-batches to be prepared, until there is room for them on the device."""
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._thread = threading.Thread(target=self._run, name="penstock device", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, which the coordinator's end brings about."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(ClosedError):
            try:
                self._open()
                while True:
                    self._step()
            except ClosedError:
                raise
            except BaseException as error:  # the lane's border: the training must hear of it
                self.channel.send(("device_failed", f"{type(error).__name__}: {error}"))
        with contextlib.suppress(Exception):  # a device that failed may fail at its end, too
            self.device.close()
        self.channel.close()

    def _open(self) -> None:
        self.problem = self.device.open()
        self.channel.send(("device_ready", self.problem, self.device.identical))

    def _step(self) -> None:
        """Take a message if one comes while something flies, or whenever it comes; see what has landed; begin more.

        So that the decoder is given the next tiny-batch while the one before is under way, nothing is waited for."""
        message = self.channel.recv(_LOOK_S if self._flights else None)
        if message is not None:
            kind, *arguments = message
            getattr(self, f"_on_{kind}")(*arguments)
        for flight in [flight for flight in self._flights if flight.ticket.done()]:
            self._flights.remove(flight)
            self._land(flight)
        while self._waiting and (self.problem is not None or self.device.free):
            self._prepare(*self._waiting.popleft())

    def _land(self, flight: _Flight) -> None:
        if flight.kind == "copied":
            self.channel.send(("copied", flight.number))
        else:
            self.channel.send(("prepared", flight.number, list(flight.ticket.failed), flight.ticket.seconds))

    def _region(self, slots: int, capacity: int) -> Region:
        fd = self.channel.take_fd()
        try:
            return Region(fd, slots, capacity, forkable=True)
        finally:
            os.close(fd)

    def _on_region(self, generation: int, slots: int, capacity: int) -> None:
        self.device.add_region(generation, self._region(slots, capacity), slots)

    def _on_stage(self, slots: int, capacity: int) -> None:
        self.device.add_stage(self._region(slots, capacity), slots)

    def _on_forget(self, generation: int) -> None:
        self.device.forget_region(generation)

    def _on_prepare(self, number: int, stage: int, slot: Slot, offset: int) -> None:
        self._waiting.append((number, stage, slot, offset))

    def _prepare(self, number: int, stage: int, slot: Slot, offset: int) -> None:
        if self.problem is not None:
            return  # the lane has failed, and the coordinator knows
        try:
            self._flights.append(_Flight(self.device.prepare(stage, slot, offset), "prepared", number))
        except Exception as error:  # the lane's border: CPU lanes can do all that it could
            self._lose_lane(error)

    def _lose_lane(self, error: Exception) -> None:
        """Go on without the lane, once nothing of it can still write to a mirror."""
        self.problem = f"{type(error).__name__}: {error}"
        for flight in [flight for flight in self._flights if flight.kind == "prepared"]:
            flight.ticket.wait()
            self._flights.remove(flight)
        self.channel.send(("lane_failed",))

    def _on_copy(self, number: int, slot: Slot, spans: Sequence[tuple[int, int]]) -> None:
        self._flights.append(_Flight(self.device.copy(slot, spans), "copied", number))
