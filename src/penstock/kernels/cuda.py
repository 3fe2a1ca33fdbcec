"""The CUDA driver as a lane's thread uses it: without torch, and without the interpreter lock while a call waits.

    load()
    with device(0):  # this thread, from here on
        stream, event = Stream(priority=0), Event()
        copy(to, source, nbytes, stream)
        event.record(stream)
        event.synchronize()  # sleeps

Streams and events are handles of the driver, as torch's are: `torch.cuda.ExternalStream(stream.handle)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p, create_string_buffer

from penstock.errors import LaneError
from penstock.kernels.native import declare, lib

__all__ = ["REASON", "Event", "Stream", "copy", "device", "fill", "load", "register", "unregister", "version"]

REASON = 200
"""Bytes of a message from native code."""

declare("ps_cuda_bind", c_int, c_char_p, c_char_p)
declare("ps_cuda_reason", None, c_char_p, c_int, c_char_p)
declare("ps_cuda_version", c_int)
declare("ps_cuda_enter", c_int, c_int, c_void_p)
declare("ps_cuda_leave", c_int, c_int, c_int)
declare("ps_cuda_stream", c_int, c_int, c_void_p)
declare("ps_cuda_stream_wait", c_int, c_void_p, c_void_p)
declare("ps_cuda_event", c_int, c_void_p)
declare("ps_cuda_event_record", c_int, c_void_p, c_void_p)
declare("ps_cuda_event_done", c_int, c_void_p)
declare("ps_cuda_copy", c_int, c_uint64, c_uint64, c_int64, c_void_p)
declare("ps_cuda_fill", c_int, c_uint64, c_uint32, c_int64, c_void_p)
declare("ps_cuda_register", c_int, c_void_p, c_int64)
for _name in ("stream_close", "stream_synchronize", "event_close", "event_synchronize", "unregister"):
    declare(f"ps_cuda_{_name}", c_int, c_void_p)


def load(path: str = "libcuda.so.1") -> None:
    """Find the driver. Call before all else here; again does no harm."""
    reason = create_string_buffer(REASON)
    if lib.ps_cuda_bind(path.encode(), reason):
        raise LaneError(
            f"a GPU lane needs an NVIDIA GPU and its driver, and {path} cannot be used: "
            f"{reason.value.decode(errors='replace')}. Where nvidia-smi shows a GPU, a container may lack the driver's "
            "libraries (NVIDIA_DRIVER_CAPABILITIES=compute,utility,video)"
        )


def version() -> tuple[int, int]:
    """The newest CUDA version that the driver runs."""
    number: int = lib.ps_cuda_version()
    return number // 1000, number % 1000 // 10


@contextlib.contextmanager
def device(index: int) -> Iterator[None]:
    """Use a GPU in this thread, in the context that torch uses too.

    The thread's calls then neither break a graph that another thread captures nor are refused because of it.
    """
    mode = c_int()
    _check(lib.ps_cuda_enter(index, byref(mode)), f"GPU {index} cannot be used")
    try:
        yield
    finally:
        _check(lib.ps_cuda_leave(index, mode), f"GPU {index} cannot be left")


class Event:
    """A point in a stream's work."""

    def __init__(self) -> None:
        handle = c_void_p()
        _check(lib.ps_cuda_event(byref(handle)), "no event can be made")
        self.handle = handle.value or 0

    def record(self, stream: Stream) -> None:
        """Stand for all that the stream has been given up to now."""
        _check(lib.ps_cuda_event_record(self.handle, stream.handle), "an event cannot be recorded")

    def done(self) -> bool:
        """Whether all that it stands for is done; True before it is recorded."""
        state: int = lib.ps_cuda_event_done(self.handle)
        _check(max(0, -state), "the GPU's work failed")
        return state == 1

    def synchronize(self) -> None:
        """Sleep until it is done."""
        _check(lib.ps_cuda_event_synchronize(self.handle), "the GPU's work failed")

    def close(self) -> None:
        """Let go of it."""
        _check(lib.ps_cuda_event_close(self.handle), "an event cannot be closed")


class Stream:
    """Work for the GPU in order. Lower priorities are more urgent: torch's streams have 0, the most urgent is -5."""

    def __init__(self, priority: int = 0) -> None:
        handle = c_void_p()
        _check(lib.ps_cuda_stream(priority, byref(handle)), "no stream can be made")
        self.handle = handle.value or 0

    def wait(self, event: Event) -> None:
        """What is given from now on waits for the event."""
        _check(lib.ps_cuda_stream_wait(self.handle, event.handle), "a stream cannot wait for an event")

    def synchronize(self) -> None:
        """Sleep until all that it was given is done."""
        _check(lib.ps_cuda_stream_synchronize(self.handle), "the GPU's work failed")

    def close(self) -> None:
        """Let go of it; what it was given still happens."""
        _check(lib.ps_cuda_stream_close(self.handle), "a stream cannot be closed")


def copy(to: int, source: int, nbytes: int, stream: Stream) -> None:
    """Between addresses of any kind; asynchronous where the host's memory is registered."""
    _check(lib.ps_cuda_copy(to, source, nbytes, stream.handle), f"{nbytes:,} bytes cannot be copied")


def fill(to: int, word: int, words: int, stream: Stream) -> None:
    """Set 32-bit words on the device."""
    _check(lib.ps_cuda_fill(to, word, words, stream.handle), f"{words:,} words cannot be filled")


def register(address: int, nbytes: int) -> None:
    """Pin memory of this process, such as a mapped slot, for asynchronous copies. About 0.8 s per GiB."""
    _check(lib.ps_cuda_register(address, nbytes), f"{nbytes:,} bytes cannot be pinned (see ulimit -l)")


def unregister(address: int) -> None:
    """Take `register` back."""
    _check(lib.ps_cuda_unregister(address), "memory cannot be unpinned")


def _check(error: int, what: str) -> None:
    if error:
        reason = create_string_buffer(REASON)
        lib.ps_cuda_reason(what.encode(), error, reason)
        raise LaneError(reason.value.decode(errors="replace"))
