"""A decoder of its own beside the CPUs: tiny-batches of encoded images go in, decoded ones come out; native/decoder.c.

with Decoder(engine) as decoder:
    decoder.submit(tiny, stream)     # the stream's next work finds the planes
    for decoded in decoder.drain():  # their bytes may go; the rows in decoded.failed are for the CPU
        ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_uint64, c_void_p, create_string_buffer
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from penstock.errors import LaneError
from penstock.kernels import cuda
from penstock.kernels.engine import Engine
from penstock.kernels.native import declare, lib
from penstock.kernels.table import COLUMNS

__all__ = ["Decoded", "Decoder", "DecoderDevice", "TinyBatch"]

_FAILED = -1

_TABLE = (c_void_p, c_int32, c_int32)
_MEMORY = (c_void_p, c_int64, c_uint64, c_int64)
declare("ps_decoder_open", c_int, c_void_p, *(5 * [c_int32]), c_void_p, c_char_p)
declare("ps_decoder_close", None, c_void_p)
declare("ps_decoder_decode", c_int, c_void_p, *_TABLE, *_MEMORY, *(4 * [c_void_p]), c_char_p)
declare("ps_decoder_finished", c_int64, c_void_p)

_PROBLEMS = {
    -3: "its row leads outside the staged data or the area",
    2: "nvJPEG finds its parameters invalid",
    3: "nvJPEG finds it corrupt",
    4: "nvJPEG does not support it",
    5: "nvJPEG's memory does not suffice",
    6: "the GPU failed",
    10: "nvJPEG finds it incomplete",
}


@dataclass(frozen=True)
class TinyBatch:
    """What to decode. Addresses are plain numbers; what they stand for must live until the batch is drained."""

    key: object
    """for whoever submits it"""
    table: int
    """int32 [rows, COLUMNS] in host memory, see table.py"""
    rows: int
    data: int
    """the encoded bytes, in pinned host memory"""
    data_bytes: int
    area: int
    """where the planes go, on the device"""
    area_bytes: int
    after: cuda.Event | None
    """what must be done before the area may be written. The host waits for it: the engine does not follow its stream"""


class Decoded(NamedTuple):
    """A tiny-batch that is done."""

    tiny: TinyBatch
    failed: dict[int, str]
    """row to reason, for those that are not decoded"""


class DecoderDevice(Protocol):
    """What a lane needs of a decoder."""

    def submit(self, tiny: TinyBatch, stream: cuda.Stream) -> dict[int, str]:
        """Begin to decode, once there is room; tells already now which rows fail, and why."""

    def drain(self) -> list[Decoded]:
        """What is done since it was last asked, oldest first."""


class Decoder:
    """The device that decodes on an `Engine`; for one thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        grain: int = 16,
        states: int = 4,
        handles: int | None = None,
        width: int = 1024,
        height: int = 1024,
    ) -> None:
        """Tiny-batches are decoded `grain` images at a time, by `states` of nvJPEG in turn, on as many handles of its.

        nvJPEG's memory is taken at once for images of `width` x `height`; larger ones make it take more, for which the
        whole GPU may pause.
        """
        self._flying: deque[tuple[int, Decoded]] = deque()
        self._reason = create_string_buffer(cuda.REASON)
        handle, sizes = c_void_p(), (grain, states, states if handles is None else handles, width, height)
        if lib.ps_decoder_open(engine.handle, *sizes, byref(handle), self._reason):
            raise LaneError(
                f"no decoder of {states} states for {grain} images of {width} x {height} each: {self._words()}"
            )
        self._handle = handle.value

    def submit(self, tiny: TinyBatch, stream: cuda.Stream) -> dict[int, str]:
        """See `DecoderDevice`. What the stream is given next finds the planes of the rows that do not fail."""
        status, ticket = (c_int32 * tiny.rows)(), c_int64()
        failed = lib.ps_decoder_decode(
            *(self._handle, tiny.table, COLUMNS, tiny.rows, tiny.data, tiny.data_bytes, tiny.area, tiny.area_bytes),
            *(tiny.after.handle if tiny.after else None, stream.handle, status, byref(ticket), self._reason),
        )
        if failed == _FAILED:
            raise LaneError(self._words())
        if failed < 0:
            raise ValueError(f"a tiny-batch has at least one row and no less than no memory: {tiny}")
        failures = _failures(status) if failed else {}
        self._flying.append((ticket.value, Decoded(tiny, failures)))
        return failures

    def drain(self) -> list[Decoded]:
        """See `DecoderDevice`."""
        finished: int = lib.ps_decoder_finished(self._handle) if self._flying else 0
        if finished < 0:
            raise LaneError(f"the GPU failed while it decoded (CUDA error {-finished})")
        drained = []
        while self._flying and self._flying[0][0] <= finished:
            drained.append(self._flying.popleft()[1])
        return drained

    def close(self) -> None:
        """Wait for what is in flight and let go of all."""
        if self._handle:
            lib.ps_decoder_close(self._handle)
            self._handle = None
            self._flying.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _words(self) -> str:
        return self._reason.value.decode(errors="replace")


def _failures(status: Iterable[int]) -> dict[int, str]:
    return {row: _PROBLEMS.get(problem, f"nvJPEG's status {problem}") for row, problem in enumerate(status) if problem}
