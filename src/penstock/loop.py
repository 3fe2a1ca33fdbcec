"""The coordinator's event loop: readable things and timers, each with the function it calls."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.wire import Channel, ClosedError

__all__ = ["Loop"]


class Loop:
    """Single-threaded. Functions registered here must not block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call whenever the descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, lambda _events: call())

    def forget(self, what: int | Channel) -> None:
        """No longer watch this; harmless where it is not watched."""
        if self._key(what) is not None:
            self._selector.unregister(what)

    def listen(self, channel: Channel, call: Callable[[Any], None], closed: Callable[[], None]) -> None:
        """Call with every message of a channel, and `closed` once at its end."""

        def arrived(events: int) -> None:
            if events & selectors.EVENT_WRITE:
                channel.flush()
                self._watch_backlog(channel)
            if events & selectors.EVENT_READ:
                try:
                    for message in channel.arrived():
                        call(message)
                except ClosedError:
                    self.forget(channel)
                    closed()

        self._selector.register(channel, selectors.EVENT_READ, arrived)
        for message in channel.buffered():
            call(message)

    def post(self, channel: Channel, message: Any, fds: Sequence[int] = ()) -> None:
        """Send without waiting; what does not go now goes when the socket takes it. The descriptors are closed then."""
        channel.post(message, fds)
        self._watch_backlog(channel)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, later."""
        self._timers.append((time.monotonic() + seconds, call))

    def step(self) -> None:
        """Wait for something to happen and call what is registered for it."""
        timeout = max(0.0, min(due for due, _ in self._timers) - time.monotonic()) if self._timers else None
        for key, events in self._selector.select(timeout):
            if self._key(key.fileobj) is key:  # what was called before may have closed it
                key.data(events)
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for call in due:
            call()

    def _key(self, what: Any) -> selectors.SelectorKey | None:
        try:
            return self._selector.get_key(what)
        except (KeyError, ValueError):  # not watched; closed
            return None

    def _watch_backlog(self, channel: Channel) -> None:
        key = self._key(channel)
        if key is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog else 0)
        if key.events != events:
            self._selector.modify(channel, events, key.data)
