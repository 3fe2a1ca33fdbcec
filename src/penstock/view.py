"""Lets others look at a running loader: `penstock top` over an abstract Unix socket, Prometheus over HTTP.

An abstract socket has no file: it is found in /proc/net/unix while its process lives and is gone with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import OptionError
from penstock.loop import Loop
from penstock.report import prometheus
from penstock.slots import anonymous

__all__ = ["View", "running"]

_PREFIX = "penstock-view-"
_PATIENCE_S = 10.0
_PEER = struct.Struct("3i")


class View:
    """Serves snapshots from a coordinator's loop."""

    def __init__(self, loop: Loop, snapshot: Callable[[], dict[str, Any]], metrics_port: int | None) -> None:
        self._loop = loop
        self._snapshot = snapshot
        self._listen(self._local(), self._answer_local)
        self.metrics_port: int | None = None
        if metrics_port is not None:
            server = self._http(metrics_port)
            self.metrics_port = server.getsockname()[1]
            self._listen(server, self._answer_http)

    def _local(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # process numbers repeat among containers that share a network, and these names with it
        server.bind(f"\0{_PREFIX}{os.getuid()}-{os.getpid()}-{os.urandom(4).hex()}")
        return server

    def _http(self, port: int) -> socket.socket:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            server.close()
            raise OptionError(
                f"metrics_port={port} cannot be served: {error.strerror}; name a free port, or 0"
            ) from error
        return server

    def _listen(self, server: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        server.listen(16)
        server.setblocking(False)

        def accept() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                client.setblocking(False)
                answer(client)

        self._loop.watch(server.fileno(), accept)

    def _answer_local(self, client: socket.socket) -> None:
        with client:
            _, uid, _ = _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid in (0, os.getuid()):
                fd = anonymous(0)  # a text of any length goes with one message, without waiting for its reader
                with open(fd, "wb") as file:
                    file.write(json.dumps(self._snapshot()).encode())
                    file.flush()
                    socket.send_fds(client, [b"+"], [fd])

    def _answer_http(self, client: socket.socket) -> None:
        """Wait for the request, answer it, hang up."""

        def silent() -> None:
            if client.fileno() >= 0:
                self._loop.forget(client.fileno())
                client.close()

        def readable() -> None:
            self._loop.forget(client.fileno())
            with client, contextlib.suppress(OSError):
                request = client.recv(4096).split(b" ")
                found = len(request) > 1 and request[1].split(b"?")[0] in (b"/metrics", b"/")
                body = prometheus(self._snapshot()).encode() if found else b"not found: try /metrics\n"
                status = b"200 OK" if found else b"404 Not Found"
                answer = (
                    b"HTTP/1.1 %b\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                    b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body
                )
                # all of it is the kernel's at once, however slow the reader: there is nobody here to wait for it
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(answer))
                client.send(answer)

        self._loop.watch(client.fileno(), readable)
        self._loop.after(_PATIENCE_S, silent)


def running() -> Iterator[dict[str, Any]]:
    """Snapshots of all loaders that run on this machine and that this user may see."""
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if f"@{_PREFIX}" in line}
    for name in sorted(names):
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect("\0" + name.removeprefix("@"))
            _, fds, _, _ = socket.recv_fds(client, 1, 1)
            if fds:
                yield json.loads(_content(fds[0]))


def _content(fd: int) -> bytes:
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
