"""Messages between the processes of one loader: pickled plain data with file descriptors, over Unix stream sockets.

Only plain data crosses the coordinator (it must not import what users import): whatever belongs to the user travels as
bytes that the coordinator passes on unopened.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import LaneError

__all__ = ["MOST_FDS", "Channel", "ClosedError", "pair"]

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 16
MOST_FDS = 16
"""Descriptors that may go with one message."""
_BUFFER_BYTES = 1 << 20


class ClosedError(Exception):
    """The other side is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with room for a few hundred messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


class Channel:
    """One end of a connection. `recv` and `send` block; `arrived` and `post` with `flush` do not, for an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()
        self._drop_fds()

    def _drop_fds(self) -> None:
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        while self._fds:
            os.close(self._fds.popleft())

    # blocking side

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send one message, waiting as long as it takes. The descriptors stay the caller's."""
        data = memoryview(_frame(message, fds))
        try:
            sent = self._sock.sendmsg([data], _ancillary(fds)) if fds else self._sock.send(data)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ClosedError from error

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message; None when `timeout_s` passed without one."""
        while True:
            message = self._parse()
            if message is not None:
                return message[0]
            if timeout_s is not None:
                poll = select.poll()
                poll.register(self._sock, select.POLLIN)
                if not poll.poll(timeout_s * 1000):
                    return None
            self._fill()

    def take_fd(self) -> int:
        """The next descriptor that came along; the receiver of a message knows how many belong to it."""
        return self._fds.popleft()

    # event loop side

    def arrived(self) -> Iterator[Any]:
        """All complete messages, after one read of a readable socket. Raises ClosedError at the end of the stream."""
        self._fill()
        yield from self.buffered()

    def buffered(self) -> Iterator[Any]:
        """Messages that an earlier read brought along."""
        while (message := self._parse()) is not None:
            yield message[0]

    def post(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Queue one message and send what goes without waiting. The descriptors are closed once sent."""
        self._out.append((memoryview(_frame(message, fds)), fds))
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting. Where the other side is gone nothing is sent; reading will say so."""
        while self._out:
            data, fds = self._out[0]
            try:
                sent = self._sock.sendmsg([data], _ancillary(fds), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._drop_fds()
                return
            for fd in fds:
                os.close(fd)
            if sent < len(data):
                self._out[0] = (data[sent:], ())
            else:
                self._out.popleft()

    @property
    def backlog(self) -> bool:
        """Something waits to be sent."""
        return bool(self._out)

    def _fill(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                _CHUNK, socket.CMSG_SPACE(4 * MOST_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise ClosedError from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % 4])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise LaneError("no more files can be opened in this process; raise its limit (ulimit -n)")
        if not data:
            raise ClosedError
        self._in += data

    def _parse(self) -> tuple[Any] | None:
        if len(self._in) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._in)
        end = _HEAD.size + length
        if len(self._in) < end:
            return None
        with memoryview(self._in) as view:
            message = pickle.loads(view[_HEAD.size : end])
        del self._in[:end]
        return (message,)


def _frame(message: Any, fds: Sequence[int]) -> bytes:
    assert len(fds) <= MOST_FDS
    data = pickle.dumps(message, protocol=5)
    return _HEAD.pack(len(data)) + data


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
