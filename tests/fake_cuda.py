"""A GPU of the imagination: `penstock.gpu` runs on it as it is, with its kernels in Triton's interpreter.

Memory of the device is memory of this process, streams do at once what they are given, and the JPEG engine decodes with
Pillow: gray images, and those whose chroma is not subsampled, for these Pillow gives planes. It refuses the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock.gpu
from penstock.kernels.decoder import TinyBatch
from penstock.kernels.engine import Counts
from penstock.kernels.table import COLUMNS, Column, Kind

__all__ = ["FakeGpu", "install"]


class FakeGpu:
    """What was asked of it."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.copied_bytes = 0
        self.decoded = self.refused = 0
        self.entered = self.engines = self.decoders = 0


class _Event:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "whoever waits sleeps"

    def record(self, stream: _Stream) -> None:
        assert isinstance(stream, _Stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """All is done."""


class _Stream:
    def __init__(self, index: int = 0) -> None:
        self.cuda_stream = 1000 + index

    def wait_event(self, event: _Event) -> None:
        assert isinstance(event, _Event)

    def synchronize(self) -> None:
        """All is done."""


class _Torch:
    """torch, with a device that it does not know of."""

    def __init__(self) -> None:
        user = _Stream()
        self.cuda = SimpleNamespace(
            init=lambda: None,
            current_device=lambda: 0,
            set_device=lambda index: None,
            set_stream=lambda stream: None,
            current_stream=lambda device: user,
            device=lambda device: contextlib.nullcontext(),
            Stream=_Stream,
            Event=_Event,
        )
        self._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=lambda observer: None)

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu", index)

    def as_tensor(self, holder: Any, device: torch.device) -> torch.Tensor:
        """Over the memory that the holder names; keeps the holder."""
        interface = holder.__cuda_array_interface__
        (nbytes,), (address, read_only) = interface["shape"], interface["data"]
        assert interface["typestr"] == "|u1"
        assert not read_only
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.holder = holder  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Driver:
    """`penstock.kernels.cuda`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def load(self) -> None:
        """It is there."""

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self._gpu.entered += 1
        yield
        self._gpu.entered -= 1

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self._gpu.pinned
        self._gpu.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self._gpu.pinned[address]

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        assert any(start <= source and source + nbytes <= start + size for start, size in self._gpu.pinned.items())
        ctypes.memmove(to, source, nbytes)
        self._gpu.copied_bytes += nbytes


class _Held:
    """Something that is let go of."""

    def __init__(self, gpu: FakeGpu, what: str) -> None:
        self._gpu, self._what = gpu, what

    def __enter__(self) -> Any:
        setattr(self._gpu, self._what, getattr(self._gpu, self._what) + 1)
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(self._gpu, self._what, getattr(self._gpu, self._what) - 1)


class _Engine(_Held):
    def counts(self) -> Counts:
        return Counts(1, 0, 7 << 20, 0, 7 << 20, 13, 0, 0, 1, 8)


class _Decoder(_Held):
    def submit(self, tiny: TinyBatch, stream: Any) -> dict[int, str]:
        numbers = (ctypes.c_int32 * (COLUMNS * tiny.rows)).from_address(tiny.table)
        table = np.frombuffer(numbers, np.int32).reshape(-1, COLUMNS)
        data = bytes((ctypes.c_uint8 * tiny.data_bytes).from_address(tiny.data))
        area = np.frombuffer((ctypes.c_uint8 * tiny.area_bytes).from_address(tiny.area), np.uint8)
        failed = {}
        for index, row in enumerate(table):
            planes = _planes(data[row[Column.DATA] : row[Column.DATA] + row[Column.LENGTH]], row)
            if planes is None:
                failed[index] = "it is subsampled"
            for number, plane in enumerate(planes or ()):
                height, width = plane.shape
                start, pitch = row[Column.PLANE0 + number], row[Column.PITCH1 if number else Column.PITCH0]
                area[start : start + height * pitch].reshape(height, pitch)[:, :width] = plane
        self._gpu.refused += len(failed)
        self._gpu.decoded += tiny.rows - len(failed)
        return failed

    def drain(self) -> None:
        """Nothing is in flight."""


def _planes(data: bytes, row: Any) -> list[Any] | None:
    if row[Column.SUB_X] != 1 or row[Column.SUB_Y] != 1:
        return None
    with Image.open(io.BytesIO(data)) as image:
        if row[Column.KIND] == Kind.GRAY:
            return [np.asarray(image)]
        image.draft("YCbCr", None)
        return list(np.moveaxis(np.asarray(image), -1, 0))


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Have `penstock.gpu` run on one."""
    gpu = FakeGpu()
    monkeypatch.setattr(penstock.gpu, "torch", _Torch())
    monkeypatch.setattr(penstock.gpu, "cuda", _Driver(gpu))
    monkeypatch.setattr(
        penstock.gpu, "engine", SimpleNamespace(load=lambda: None, Engine=lambda index: _Engine(gpu, "engines"))
    )
    monkeypatch.setattr(penstock.gpu, "Decoder", lambda engine, states=4: _Decoder(gpu, "decoders"))
    penstock.gpu._watch_memory.cache_clear()
    return gpu
