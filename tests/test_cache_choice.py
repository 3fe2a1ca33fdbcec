"""The share of decoded samples is settled once, for all processes and loaders that use the memory."""

from __future__ import annotations

import json

import pytest

from arenas import again, ended, forked, opened, shelf_of
from penstock.cache.choice import Choice, settled
from penstock.cache.forms import Costs, chosen, split

FAST = Costs(100e3, 570e3, 1e-5, 0.9e-3)
SLOW = Costs(100e3, 570e3, 5e-3, 0.9e-3)


def taught(choice: Choice, costs: Costs, samples: int = 16) -> None:
    for _ in range(samples):
        assert choice.measuring
        choice.learn(costs)


def test_it_is_settled_after_some_samples_and_encoded_until_then() -> None:
    with opened() as arena:
        choice = Choice(shelf_of(arena, 1), 1000, lambda: 57_000_000)
        assert {choice.form(id) for id in range(50)} == {"encoded"}
        taught(choice, FAST)
        assert not choice.measuring
        assert {choice.form(id) for id in range(50)} == {"decoded"}


def test_the_room_there_is_counts() -> None:
    samples, room = 1000, 147_000_000
    with opened() as arena:
        choice = Choice(shelf_of(arena, 1), samples, lambda: room)
        taught(choice, SLOW)
        share = split(SLOW, samples, room).share
        assert share == pytest.approx(0.1)
        assert [choice.form(id) for id in range(samples)] == [chosen(id, share) for id in range(samples)]


def test_who_comes_first_settles_it_for_all() -> None:
    with opened() as arena:
        first, second = (Choice(shelf_of(arena, 1), 1000, lambda: 57_000_000) for _ in range(2))
        taught(first, FAST)
        for _ in range(20):
            second.learn(SLOW)
        assert second.form(1) == "decoded"
        later = again(arena)
        assert Choice(shelf_of(later, 1), 1000, lambda: 0).form(1) == "decoded"
        later.close()


def test_a_pause_is_no_cost_and_times_are_those_of_most_samples() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 1)
        choice = Choice(shelf, 1000, lambda: 57_000_000)
        for number in range(16):
            choice.learn(Costs(90e3 + 20e3 * (number % 2), 570e3, 5.0 if number == 3 else 1e-5, 0.9e-3))
        found = settled(shelf)
        assert found is not None
        assert found.costs == Costs(100e3, 570e3, 1e-5, 0.9e-3)
        assert found.share == 1.0


def test_decoding_is_never_thought_to_cost_less_than_nothing() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 1)
        taught(Choice(shelf, 10, lambda: 10**9), Costs(100e3, 570e3, 1e-3, -1e-5))
        found = settled(shelf)
        assert found is not None
        assert found.costs.decode_s == 0.0
        assert found.share == 0.0
        assert json.loads(shelf.get(0)[0])  # type: ignore[index]


@pytest.mark.processes
def test_processes_agree() -> None:
    with opened() as arena:

        def work(costs: Costs) -> None:
            choice = Choice(shelf_of(again(arena), 1), 1000, lambda: 57_000_000)
            while choice.measuring:
                choice.learn(costs)

        pids = [forked(lambda costs=costs: work(costs)) for costs in (FAST, SLOW) * 3]
        assert [ended(pid) for pid in pids] == [0] * 6
        found = settled(shelf_of(arena, 1))
        assert found is not None
        assert found.share in (0.0, 1.0)
