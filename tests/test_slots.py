"""The pool: what is taken is nobody else's, what is given back can be taken, and nothing exceeds the budget."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.slots import Books, Region, anonymous, slot_bytes

PAGE = 1 << 16


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(st.integers(0, 1 << 40))
def test_a_slot_holds_its_batch_in_whole_pages(nbytes: int) -> None:
    size = slot_bytes(nbytes)
    assert size >= max(1, nbytes)
    assert size % PAGE == 0
    assert size - nbytes < PAGE or nbytes == 0


def test_books_begin_empty() -> None:
    books = Books(1 << 20)
    assert (books.current, books.capacity, books.slots, books.free) == (-1, 0, 0, 0)
    assert books.take() is None
    assert books.generations == []


@pytest.mark.parametrize(("wanted", "slots"), [(2, 2), (4, 4), (100, 16)])
def test_as_many_slots_as_wanted_or_as_the_budget_allows(wanted: int, slots: int) -> None:
    books = Books(16 * PAGE)
    fd = books.grow(PAGE, wanted)
    assert books.slots == books.free == slots
    assert os.fstat(fd).st_size == slots * books.capacity <= 16 * PAGE
    os.close(fd)


def test_a_budget_for_less_than_two_batches_is_refused_with_what_it_takes() -> None:
    books = Books(3 * PAGE)
    with pytest.raises(OptionError, match=r"100,000 bytes.*memory_bytes=196,608; give at least 262,144 or use smaller"):
        books.grow(100_000, 4)
    assert books.current == -1


def test_each_slot_is_taken_once() -> None:
    books = Books(8 * PAGE)
    os.close(books.grow(1, 8))
    taken = [books.take() for _ in range(8)]
    assert sorted(taken) == [(0, index) for index in range(8)]  # type: ignore[type-var]
    assert books.take() is None
    assert books.give((0, 5)) is None
    assert books.take() == (0, 5)


def test_an_outgrown_region_goes_with_its_last_slot() -> None:
    before = open_fds()
    books = Books(64 * PAGE)
    books.grow(PAGE, 4)
    first, second = books.take(), books.take()
    assert first is not None
    assert second is not None
    books.grow(3 * PAGE, 4)
    assert books.generations == [0, 1]
    assert books.region(0)[1:] == (4, PAGE)
    assert books.take() == (1, 0), "from the new region only"
    assert books.give(first) is None
    assert books.give(second) == 0, "useless now"
    assert books.generations == [1]
    assert open_fds() == before + 1
    os.close(books.region(1)[0])


@given(st.integers(0, 10**6))
def test_no_slot_has_two_owners_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    books = Books(64 * PAGE)
    held: set[tuple[int, int]] = set()
    gone: set[int] = set()
    books.grow(PAGE, 4)
    for _ in range(60):
        chance = rng.random()
        if chance < 0.5:
            slot = books.take()
            assert slot not in held
            if slot is not None:
                assert slot[0] == books.current
                held.add(slot)
            else:
                assert books.free == 0
        elif chance < 0.95 and held:
            slot = rng.choice(sorted(held))
            held.remove(slot)
            useless = books.give(slot)
            if useless is not None:
                assert useless != books.current
                assert not any(generation == useless for generation, _ in held)
                gone.add(useless)
        elif chance > 0.97 and books.capacity < 8 * PAGE and held:
            books.grow(books.capacity + 1, 4)
        assert not gone & set(books.generations)
        assert {generation for generation, _ in held} <= set(books.generations)
    for generation in books.generations:
        os.close(books.region(generation)[0])


def test_processes_see_the_same_memory_and_slots_do_not_overlap() -> None:
    fd = anonymous(4 * PAGE)
    here, there = Region(fd, 4, PAGE, forkable=True), Region(fd, 4, PAGE, forkable=False)
    os.close(fd)
    for index in range(4):
        here.slot(index)[:] = bytes([index]) * PAGE
    assert [bytes(there.slot(index)) for index in range(4)] == [bytes([index]) * PAGE for index in range(4)]


def test_memory_has_no_name_and_goes_with_its_last_user() -> None:
    shared = set(os.listdir("/dev/shm"))
    before = open_fds()
    fd = anonymous(PAGE)
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:penstock")
    assert not os.get_inheritable(fd)
    region = Region(fd, 1, PAGE, forkable=False)
    os.close(fd)
    view = region.slot(0)
    del region
    view[0] = 7
    assert view[0] == 7, "a view keeps what it shows"
    del view
    assert open_fds() == before
    assert set(os.listdir("/dev/shm")) == shared
    with open("/proc/self/maps") as maps:
        assert "memfd:penstock" not in maps.read()


def test_a_region_whose_slots_are_all_back_goes_when_a_larger_one_begins() -> None:
    books = Books(1 << 24)
    books.grow(1000, 4)
    books.grow(1 << 17, 4)
    assert books.release(0)
    assert books.generations == [1]
