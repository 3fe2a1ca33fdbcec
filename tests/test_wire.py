"""Messages between processes arrive whole, in order, with their descriptors, whatever their size."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import LaneError
from penstock.wire import MOST_FDS, Channel, ClosedError, pair

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    a, b = pair()
    channels = Channel(a), Channel(b)
    yield channels
    for channel in channels:
        channel.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbered(count: int) -> list[int]:
    """Descriptors that can be told apart by what lies in them."""
    fds = []
    for number in range(count):
        fd = os.memfd_create(f"n{number}")
        os.write(fd, b"%d" % number)
        fds.append(fd)
    return fds


def number_in(fd: int) -> int:
    text = os.pread(fd, 16, 0)
    os.close(fd)
    return int(text)


plain = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(max_size=200_000),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).map(lambda value: ("message", value))


@settings(max_examples=60, deadline=None)
@given(st.lists(plain, max_size=8))
def test_what_is_sent_arrives_in_order(messages: list[Any]) -> None:
    a, b = map(Channel, pair())
    sender = threading.Thread(target=lambda: [a.send(message) for message in messages])
    sender.start()
    assert [b.recv(5) for _ in messages] == messages
    sender.join()
    a.close()
    b.close()


@pytest.mark.parametrize("count", [1, 2, MOST_FDS])
@pytest.mark.parametrize("how", ["send", "post"])
def test_descriptors_go_with_their_message(ends: Ends, count: int, how: str) -> None:
    a, b = ends
    before = open_fds()
    fds = numbered(count)
    if how == "send":
        a.send(("first", count), fds)
        for fd in fds:
            os.close(fd)
    else:
        a.post(("first", count), fds)
    a.send(("second",))
    assert b.recv(5) == ("first", count)
    assert [number_in(b.take_fd()) for _ in range(count)] == list(range(count))
    assert b.recv(5) == ("second",)
    assert open_fds() == before


def test_posting_does_not_wait_and_flushing_goes_on(ends: Ends) -> None:
    a, b = ends
    big = os.urandom(3_000_000)
    fds = numbered(2)
    a.post(("big", big), fds[:1])
    a.post(("small",), fds[1:])
    assert a.backlog
    arrived: list[Any] = []
    while len(arrived) < 2:
        a.flush()
        arrived += b.arrived()
    assert not a.backlog
    assert arrived == [("big", big), ("small",)]
    assert [number_in(b.take_fd()), number_in(b.take_fd())] == [0, 1]


def test_several_messages_in_one_read(ends: Ends) -> None:
    a, b = ends
    for number in range(20):
        a.send((number,))
    assert b.recv(1) == (0,)
    assert list(b.buffered()) == [(number,) for number in range(1, 20)]


def test_waiting_ends_in_time(ends: Ends) -> None:
    assert ends[0].recv(0.01) is None


def test_what_was_sent_before_the_end_still_arrives(ends: Ends) -> None:
    a, b = ends
    b.send(("unread",))
    a.send(("last words",))
    a.close()
    assert b.recv(1) == ("last words",)
    with pytest.raises(ClosedError):
        b.recv(1)


def test_a_side_that_is_gone_is_an_error_for_who_waits_and_silence_for_who_posts(ends: Ends) -> None:
    a, b = ends
    b.close()
    before = open_fds()
    with pytest.raises(ClosedError):
        a.send(("anyone?",))
    a.post(("anyone?",), numbered(3))
    assert not a.backlog
    assert open_fds() == before


def test_closing_lets_go_of_descriptors_on_their_way() -> None:
    before = open_fds()
    a, b = map(Channel, pair())
    a.send(("come",), fds := numbered(2))
    for fd in fds:
        os.close(fd)
    assert b.recv(1) == ("come",)
    a.post(("stuck", bytes(4_000_000)))
    a.post(("behind it",), numbered(3))
    assert a.backlog
    a.close()
    b.close()
    assert open_fds() == before


def test_running_out_of_descriptors_is_said(ends: Ends) -> None:
    a, b = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    a.post(("fds",), numbered(MOST_FDS))
    spare = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
    try:
        while True:
            try:
                spare.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(LaneError, match="ulimit -n"):
            b.recv(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
