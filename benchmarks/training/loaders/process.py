"""Penstock in a process beside the training's: the other place where a GPU lane could live.

Batches go through buffers on the device that are taken once and shared between the processes; events say when a buffer
is full and when it is free, so that neither process waits for the device. Kernels of two processes take turns on a GPU
unless MPS runs. Settings are keywords of `Loader`, as for `penstock`. On the CPU, which does all at once, buffers lie
in shared memory and there are no events.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.training.loaders import Batches, Job, penstock

NOTE = "one copy more on the device"
KINDS = ("image", "audio")

BUFFERS = 4
"""One in use, one that waits, one on its way back, one being filled."""
_END_S = 10.0


class _Buffer:
    """A batch's place; `full` and `free` order the streams of both processes."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, full: Any = None, free: Any = None) -> None:
        self.inputs, self.labels, self.full, self.free = inputs, labels, full, free

    @classmethod
    def like(cls, inputs: torch.Tensor, labels: torch.Tensor) -> _Buffer:
        """For batches of that kind."""
        empty = torch.empty_like(inputs), torch.empty_like(labels)
        if not inputs.is_cuda:
            return cls(*(tensor.share_memory_() for tensor in empty))
        return cls(*empty, *(torch.cuda.Event(interprocess=True) for _ in range(2)))

    def shared(self) -> tuple[Any, ...]:
        """What the other process opens it with."""
        handles = [event.ipc_handle() for event in (self.full, self.free) if event is not None]
        return self.inputs, self.labels, *handles

    @classmethod
    def opened(cls, inputs: torch.Tensor, labels: torch.Tensor, *handles: bytes) -> _Buffer:
        """As the other process has it."""
        return cls(inputs, labels, *(torch.cuda.Event.from_ipc_handle(inputs.device, handle) for handle in handles))

    def fill(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Once the training has done with what was in it."""
        if self.free is not None:
            self.free.wait()
        self.inputs.copy_(inputs)
        self.labels.copy_(labels)
        if self.full is not None:
            self.full.record()


def batches(job: Job, setting: str) -> Batches:
    """See the package."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job, setting), daemon=True)
    process.start()
    theirs.close()
    try:
        buffers = [_Buffer.opened(*shared) for shared in ours.recv()]
        while True:
            number = ours.recv()
            buffer = buffers[number]
            if buffer.full is not None:
                buffer.full.wait()
            yield buffer.inputs, buffer.labels
            if buffer.free is not None:
                buffer.free.record()
            ours.send(number)
    except EOFError as error:
        raise RuntimeError("the process that loads has ended") from error
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()


def _serve(pipe: Connection, job: Job, setting: str) -> None:
    """The other process: fills buffers until nobody wants them any more."""
    with contextlib.closing(penstock.batches(job, setting)) as made, contextlib.suppress(EOFError, OSError):
        first = next(made)
        buffers = [_Buffer.like(*first) for _ in range(BUFFERS)]
        pipe.send([buffer.shared() for buffer in buffers])
        free = deque(range(BUFFERS))
        for inputs, labels in itertools.chain([first], made):
            while not free or pipe.poll():
                free.append(pipe.recv())
            number = free.popleft()
            buffers[number].fill(inputs, labels)
            pipe.send(number)
