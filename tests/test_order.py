"""The laws of steps, as the module states them."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import Order, Step

sizes = st.integers(1, 200)
batches = st.integers(1, 12)
worlds = st.integers(1, 9)


def ranks(n: int, batch: int, drop_last: bool, world: int, consumed: int = 0) -> list[list[Step]]:
    """Every rank's remaining steps; examples that no ranks can share are left to a test of their own."""
    try:
        return [list(Order(n, batch, drop_last, rank, world).steps(consumed)) for rank in range(world)]
    except OptionError:
        assume(False)
        raise


def taken(steps: list[list[Step]]) -> list[int]:
    return [position for rank in steps for step in rank for position in range(step.first, step.first + step.rows)]


@given(sizes, batches, st.booleans(), worlds)
def test_every_position_once_on_one_rank(n: int, batch: int, drop_last: bool, world: int) -> None:
    steps = ranks(n, batch, drop_last, world)
    assert sorted(taken(steps)) == list(range(n - n % (batch * world) if drop_last else n))


@given(sizes, batches, st.booleans(), worlds)
def test_every_rank_has_the_same_number_of_steps_and_none_is_empty(
    n: int, batch: int, drop_last: bool, world: int
) -> None:
    steps = ranks(n, batch, drop_last, world)
    assert {len(rank) for rank in steps} == {Order(n, batch, drop_last, 0, world).count()}
    assert all(1 <= step.rows <= batch for rank in steps for step in rank)


@given(sizes, batches, st.booleans(), worlds)
def test_steps_are_global_batches_but_for_the_tail(n: int, batch: int, drop_last: bool, world: int) -> None:
    steps = ranks(n, batch, drop_last, world)
    totals = [sum(step.rows for step in at_once) for at_once in zip(*steps, strict=True)]
    whole, tail = divmod(n, batch * world)
    if tail == 0 or drop_last:
        assert totals == [batch * world] * whole
    elif tail >= world:
        assert totals == [batch * world] * whole + [tail]
    else:
        last_two = batch * world + tail
        assert totals == [batch * world] * (whole - 1) + [(last_two + 1) // 2, last_two // 2]
    for at_once in zip(*steps, strict=True):
        assert max(step.rows for step in at_once) - min(step.rows for step in at_once) <= 1, "spread evenly"
        assert len({step.end for step in at_once}) == 1
        assert [a.first + a.rows for a in at_once[:-1]] == [b.first for b in at_once[1:]], "contiguous parts"
        assert at_once[-1].first + at_once[-1].rows == at_once[-1].end


@given(sizes, batches, st.booleans(), worlds, st.data())
def test_resuming_goes_on_as_if_nothing_had_happened(
    n: int, batch: int, drop_last: bool, world: int, data: st.DataObject
) -> None:
    steps = ranks(n, batch, drop_last, world)
    done = data.draw(st.integers(0, len(steps[0])))
    consumed = steps[0][done - 1].end if done else 0
    for rank in range(world):
        order = Order(n, batch, drop_last, rank, world)
        assert list(order.steps(consumed)) == steps[rank][done:]
        assert order.count(consumed) == len(steps[rank]) - done


@given(sizes, st.integers(1, 24), st.booleans(), st.data())
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(
    n: int, global_batch: int, drop_last: bool, data: st.DataObject
) -> None:
    divisors = st.sampled_from([d for d in range(1, global_batch + 1) if global_batch % d == 0])
    before, after = data.draw(divisors), data.draw(divisors)
    first = ranks(n, global_batch // before, drop_last, before)
    done = data.draw(st.integers(0, len(first[0])))
    consumed = first[0][done - 1].end if done else 0
    second = ranks(n, global_batch // after, drop_last, after, consumed) if consumed < n else [[]]
    part = [rank[:done] for rank in first]
    assert sorted(taken(part) + taken(second)) == sorted(taken(first))
    ends_before = [step.end for step in first[0][done:]]
    ends_after = [step.end for step in second[0]]
    full = [end for end in ends_before if (end - consumed) % global_batch == 0 and n - end >= global_batch]
    assert ends_after[: len(full)] == full, "the same samples in every step but the last two"


@given(sizes, batches, worlds, st.data())
def test_only_what_cannot_be_shared_is_refused(n: int, batch: int, world: int, data: st.DataObject) -> None:
    """Where there is an error, no even split into steps without an empty part exists."""
    consumed = data.draw(st.integers(0, n - 1))
    remaining = n - consumed
    try:
        list(Order(n, batch, False, 0, world).steps(consumed))
    except OptionError:
        fewest = -(-remaining // (batch * world))
        assert fewest * world > remaining


def test_the_refusal_names_the_remedies() -> None:
    with pytest.raises(OptionError, match=r"3 samples .* 4 ranks .* batch size 8; use drop_last=True, fewer ranks"):
        list(Order(3, 8, world_size=4).steps())
    with pytest.raises(OptionError, match="a batch size of at least 2"):
        list(Order(9, 1, world_size=4).steps())


def test_the_tail_of_an_epoch() -> None:
    def rows(rank: int) -> list[int]:
        return [step.rows for step in Order(17, 4, rank=rank, world_size=2).steps()]

    assert rows(0) == [4, 2, 2]
    assert rows(1) == [4, 3, 2]
