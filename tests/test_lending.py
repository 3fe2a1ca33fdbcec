"""Ranks on one machine lend each other workers: those that wait get them, and every one comes home."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import penstock as ps
from loading import Batch, assert_same, copied, template, wait_until
from penstock.lending import Lending, Patience
from penstock.loop import Loop
from steps import steady


def test_patience_waits_before_it_acts_and_longer_before_it_gives_back() -> None:
    patience = Patience()
    assert [patience.look(waits=True, spare=False) for _ in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert [patience.look(waits=False, spare=True) for _ in range(16)] == [0] * 14 + [-1, 0]
    for waits, spare in [(True, False), (True, False), (False, False)] * 9:
        assert patience.look(waits=waits, spare=spare) == 0, "what changes all the time is left as it is"


class Rank:
    """Lends and borrows numbers."""

    def __init__(self, group: str, workers: int) -> None:
        self.loop = Loop()
        self.own = workers
        self.changes: list[int] = []
        self.lending = Lending(self.loop, group, lambda: self.workers, lambda: self.changes.append(self.workers))

    @property
    def workers(self) -> int:
        return self.own + self.lending.balance

    def look(self, waits: bool = False, spare: bool = False, times: int = 1) -> None:
        for _ in range(times):
            self.lending.look(waits=waits, spare=spare)

    def end(self) -> None:
        """As when its process dies."""
        for loan in [self.lending._server, *self.lending._lent, *self.lending._borrowed]:
            with contextlib.suppress(OSError):
                self.loop.forget(loan.fileno())
                loan.close()


def settle(*ranks: Rank) -> None:
    """Until nothing more happens."""
    for _ in range(10):
        for rank in ranks:
            rank.loop.after(0.0, lambda: None)
            rank.loop.step()


@pytest.fixture
def group() -> str:
    return os.urandom(8).hex()


@pytest.fixture
def ranks(group: str) -> Iterator[list[Rank]]:
    ranks = [Rank(group, 3) for _ in range(3)]
    yield ranks
    for rank in ranks:
        rank.end()


def test_who_waits_borrows_of_who_has_to_spare(ranks: list[Rank]) -> None:
    poor, rich, other = ranks
    rich.look(spare=True)
    other.look()
    poor.look(waits=True, times=3)
    settle(*ranks)
    assert [rank.workers for rank in ranks] == [4, 2, 3], "the one that is no better off lends nothing"
    assert (poor.lending.borrowed, rich.lending.lent) == (1, 1)
    poor.look(spare=True, times=15)
    settle(*ranks)
    assert [rank.workers for rank in ranks] == [3, 3, 3]
    assert (poor.changes, rich.changes, other.changes) == ([4, 3], [2, 3], [])


def test_who_waits_itself_calls_home_first(ranks: list[Rank]) -> None:
    poor, rich, other = ranks
    for rank in (rich, other):
        rank.look(spare=True)
    poor.look(waits=True, times=3)
    settle(*ranks)
    lender = rich if rich.lending.lent else other
    lender.look(waits=True, times=3)
    settle(*ranks)
    assert [rank.workers for rank in ranks] == [3, 3, 3]


def test_the_last_worker_is_never_lent(ranks: list[Rank]) -> None:
    poor, rich, other = ranks
    for _ in range(6):
        rich.look(spare=True)
        other.look()
        poor.look(waits=True, times=3)
        settle(*ranks)
    assert [rank.workers for rank in ranks] == [5, 1, 3]


def test_who_borrows_does_not_lend_on(ranks: list[Rank]) -> None:
    poor, rich, other = ranks
    rich.look(spare=True)
    poor.look(waits=True, times=3)
    settle(*ranks)
    poor.look(spare=True)
    rich.look()
    other.look(waits=True, times=3)
    settle(*ranks)
    assert [rank.workers for rank in ranks] == [4, 2, 3]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_has_lent_and_borrowed_nothing(ranks: list[Rank], victim: int) -> None:
    poor, rich, _ = ranks
    rich.look(spare=True)
    poor.look(waits=True, times=3)
    settle(*ranks)
    ranks[victim].end()
    left = ranks[1 - victim]
    settle(left)
    assert left.workers == 3


def test_jobs_do_not_meet(ranks: list[Rank]) -> None:
    stranger = Rank(os.urandom(8).hex(), 3)
    try:
        stranger.look(spare=True)
        ranks[0].look(waits=True, times=3)
        settle(*ranks, stranger)
        assert stranger.workers == ranks[0].workers == 3
    finally:
        stranger.end()


@pytest.mark.parametrize("options", [{"world_size": 1}, {"world_size": 2, "workers": 0}, {"lend": 1}])
def test_what_cannot_lend_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ps.OptionError, match="lend"):
        ps.Loader(ps.arrays(x=np.arange(64)).batch(4), **{"lend": True, "workers": 2, **options})


# ---- loaders


def _loader(rank: int, seed: int, **options: int) -> ps.Loader:
    pipe = ps.arrays(x=np.arange(20_000)).map(steady).batch(8)
    return ps.Loader(pipe, rank=rank, world_size=2, seed=seed, start="clean", **{"lend": True, "workers": 2, **options})


def _borrowed(slow: Iterator[Batch], fast: Iterator[Batch], loader: ps.Loader, count: int) -> list[Batch]:
    """Batches of the fast rank, until it has so many workers of others; the slow one takes one in twenty."""
    found: list[Batch] = []
    while loader.stats()["borrowed"] != count:
        found.append(copied(next(fast)))
        if len(found) % 20 == 0:
            next(slow)
        assert len(found) < 3000, "nothing was ever lent"
    return found


@pytest.mark.processes
def test_workers_move_to_the_rank_that_waits_and_come_back() -> None:
    with _loader(0, 1) as rich, _loader(1, 1) as poor:
        slow, fast = iter(rich), iter(poor)
        next(slow)
        found = _borrowed(slow, fast, poor, 1)
        assert (rich.stats()["lent"], poor.stats()["borrowed"]) == (1, 1)
        wait_until(lambda: len(rich.stats()["workers"]) == 1)
        wait_until(lambda: len(poor.stats()["workers"]) == 3)
        assert "lent to ranks on this machine" in rich.explain()
        wait_until(lambda: poor.stats()["borrowed"] == 0, 20)  # its training takes nothing any more
        wait_until(lambda: len(rich.stats()["workers"]) == len(poor.stats()["workers"]) == 2)
        found += [copied(next(fast)) for _ in range(10)]
        assert rich.stats()["workers_lost"] == poor.stats()["workers_lost"] == 0
    with _loader(1, 1, lend=False) as alone:
        batches = iter(alone)
        assert_same(found, [copied(next(batches)) for _ in found])


@pytest.mark.processes
def test_a_killed_rank_sends_the_workers_home() -> None:
    with _loader(0, 2) as rich, _loader(1, 2) as poor:
        slow = iter(rich)
        next(slow)
        _borrowed(slow, iter(poor), poor, 1)
        os.kill(psutil.Process(template(poor)).ppid(), signal.SIGKILL)
        wait_until(lambda: rich.stats()["lent"] == 0)
        wait_until(lambda: len(rich.stats()["workers"]) == 2)
        next(slow)
