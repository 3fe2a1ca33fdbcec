"""A GPU lane gives memory back when an allocation on its GPU fails. Without a GPU: areas that only say if they rest."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock.gpu
from penstock.device import Ticket
from penstock.errors import LaneError
from penstock.gpu import CudaDevice


class Work(Ticket):
    """Something that an area is used for."""

    def __init__(self, done: bool) -> None:
        self.finished = done
        self.waits = 0

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.waits += 1
        self.finished = True


class Lane(CudaDevice):
    """The lane's memory, without a GPU behind it."""

    def __init__(self, *areas: Any) -> None:
        self._areas = deque(areas)
        self._preparing = threading.Lock()
        self._decoding = contextlib.ExitStack()
        self.decoding = True
        self._decoding.callback(lambda: setattr(self, "decoding", False))
        self._starved = False

    def _prepare(self, stage: int, slot: Any, offset: int) -> Any:
        return self._areas[0]

    def areas(self) -> list[Any]:
        return list(self._areas)


def _area(done: bool | None = None) -> Any:
    return SimpleNamespace(ticket=None if done is None else Work(done))


def test_an_area_at_rest_is_given_back_at_once() -> None:
    busy, rested = _area(False), _area(True)
    lane = Lane(busy, rested)
    lane.make_room()
    assert lane.areas() == [busy]
    assert lane.areas_given_back == 1
    assert lane.prepare(0, (0, 0), 0) is busy
    assert lane.areas_given_back == 1, "once for each allocation that failed"


def test_where_all_are_busy_the_next_tiny_batch_waits_for_one() -> None:
    first, second = _area(False), _area(False)
    lane = Lane(first, second)
    lane.make_room()
    assert lane.areas() == [first, second], "whoever lacks memory does not wait"
    assert first.ticket.waits == 0
    assert lane.prepare(0, (0, 0), 0) is second
    assert first.ticket.waits == 1


def test_while_a_tiny_batch_begins_nothing_is_taken_from_it() -> None:
    lane = Lane(_area(), _area())
    with lane._preparing:
        lane.make_room()
        assert len(lane.areas()) == 2
    lane.prepare(0, (0, 0), 0)
    assert len(lane.areas()) == 1


def test_without_areas_there_is_no_lane_and_no_decoder() -> None:
    lane = Lane(_area())
    lane.make_room()
    with pytest.raises(LaneError, match="has given all of its memory back"):
        lane.prepare(0, (0, 0), 0)
    assert not lane.decoding
    lane.make_room()
    assert lane.areas_given_back == 1


def test_batches_come_before_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for batches that cannot be had is taken from the lane."""
    lane, tries = Lane(_area(), _area()), []

    def mirror(*arguments: Any) -> str:
        tries.append(len(lane.areas()))
        if lane.areas():
            raise torch.OutOfMemoryError
        return "mirror"

    monkeypatch.setattr(penstock.gpu, "_Mirror", mirror)
    lane.torch_device = torch.device("cuda", 0)
    assert lane._mirror(None, 3) == "mirror"  # type: ignore[arg-type]
    assert tries == [2, 1, 0]
    monkeypatch.setattr(penstock.gpu, "_Mirror", _never)
    with pytest.raises(torch.OutOfMemoryError):
        lane._mirror(None, 3)  # type: ignore[arg-type]


def _never(*arguments: Any) -> None:
    raise torch.OutOfMemoryError
