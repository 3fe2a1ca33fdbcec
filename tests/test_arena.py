"""The arena never evicts, never returns what was not stored, never exceeds its budget, whoever dies meanwhile."""

from __future__ import annotations

import os
import random
import resource
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenas import KEY, MIB, again, ended, forked, memory_of, opened, sample, shelf_of
from penstock.cache import Arena, Tally
from penstock.cache import arena as module
from penstock.limits import Room


def test_what_was_stored_comes_back_with_its_note() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        assert shelf.get(3) is None
        assert shelf.put(3, b"pixels", b"label")
        assert shelf.get(3) == (b"pixels", b"label", True)
        assert shelf.get(3) == (b"pixels", b"label", False)
        assert shelf.put(4, b"")
        assert shelf.get(4) == (b"", b"", True)


def test_ids_beyond_the_data_set_are_not_there() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        for id in (-1, 10, 2**70):
            assert shelf.get(id) is None
            assert not shelf.put(id, b"x")


def test_a_sample_is_stored_once() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        assert shelf.put(0, b"first")
        assert not shelf.put(0, b"second")
        assert shelf.get(0) == (b"first", b"", True)


def test_another_holder_sees_the_same() -> None:
    with opened() as arena:
        shelf_of(arena, 10).put(5, b"shared")
        other = again(arena)
        assert shelf_of(other, 10).get(5) == (b"shared", b"", True)
        other.close()


def test_data_sets_never_mix() -> None:
    with opened() as arena:
        one, other = shelf_of(arena, 10), shelf_of(arena, 10, b"another data set")
        longer = shelf_of(arena, 11)
        one.put(0, b"one")
        other.put(0, b"other")
        assert (one.get(0), other.get(0), longer.get(0)) == ((b"one", b"", True), (b"other", b"", True), None)


def test_a_closed_arena_holds_nothing() -> None:
    arena = Arena.create(MIB)
    shelf = shelf_of(arena, 10)
    shelf.put(0, b"x")
    arena.close()
    assert shelf.get(0) is None
    assert shelf.data(0) is None
    assert not shelf.put(1, b"x")


def test_descriptors_of_something_else_are_refused() -> None:
    fds = [os.memfd_create("penstock"), os.memfd_create("penstock")]
    for fd in fds:
        os.ftruncate(fd, MIB)
    with pytest.raises(ValueError, match="not those of an arena"):
        Arena(*fds)


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(MIB, 3 * MIB), largest=st.integers(1, 300_000), seed=st.integers(0, 2**32))
def test_every_later_epoch_hits_what_the_first_one_cached(budget: int, largest: int, seed: int) -> None:
    """And the memory stays within the budget all the time."""
    rng = random.Random(seed)
    with opened(budget) as arena:
        shelf = shelf_of(arena, 60)
        order = list(range(60))
        first: set[int] = set()
        for epoch in range(3):
            rng.shuffle(order)
            hits = {id for id in order if shelf.get(id) is not None}
            stored = {id for id in order if id not in hits and shelf.put(id, sample(id, largest))}
            assert memory_of(arena) <= arena.state().held <= budget
            first = stored if epoch == 0 else first
            assert (hits, stored) == ((set(), first) if epoch == 0 else (first, set()))
        for id in first:
            assert shelf.get(id) == (sample(id, largest), b"", False)
        assert shelf.held[0] == len(first)


def test_the_budget_is_used_up() -> None:
    """What does not fit any more is smaller than the largest sample and a page."""
    with opened(3 * MIB) as arena:
        shelf = shelf_of(arena, 1000)
        stored = sum(shelf.put(id, sample(id, 10_000)) for id in range(1000))
        assert 400 < stored < 1000
        assert shelf.held[1] > 3 * MIB - 10_000 - 4096 - 8192 - 16_384 - 64


def test_an_index_that_does_not_fit_is_refused() -> None:
    with opened(MIB) as arena:
        descriptor = Tally.create(1)
        row = Tally(descriptor, 1).row(0)
        os.close(descriptor)
        assert arena.shelf(KEY, MIB, row) is None
        assert arena.shelf(KEY, 1000, row) is not None


def test_the_budget_is_the_largest_asked_for() -> None:
    with opened(MIB) as arena:
        shelf = shelf_of(arena, 40)
        before = sum(shelf.put(id, bytes(100_000)) for id in range(40))
        arena.raise_budget(2 * MIB)
        arena.raise_budget(MIB)
        after = sum(shelf.put(id, bytes(100_000)) for id in range(40))
        assert (before, after) == (10, 10)
        assert arena.state().budget == 2 * MIB


def _damage(arena: Arena, at: int) -> None:
    (byte,) = os.pread(arena.descriptors[1], 1, at)
    os.pwrite(arena.descriptors[1], bytes([byte ^ 0x10]), at)


@pytest.mark.parametrize("at", [3, 9, 16, 57, 16 + 998, 16 + 1000, 16 + 1009])
def test_a_damaged_sample_is_noticed_and_given_up(at: int) -> None:
    """Its sizes, its checksum, its bytes, its note."""
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        shelf.put(0, random.Random(0).randbytes(1000), b"0123456789")
        _damage(arena, at)
        assert shelf.get(0) is None
        assert shelf.get(0) is None
        assert not shelf.put(0, b"again")
        assert shelf.held[0] == 0


def test_damage_after_the_first_hit_is_noticed_within_some_hits() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        shelf.put(0, bytes(1000))
        assert shelf.get(0)
        _damage(arena, 500)
        assert None in [shelf.get(0) for _ in range(32)]
        assert shelf.get(0) is None


def test_what_its_reader_finds_wrong_is_given_up() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        shelf.put(0, b"stale")
        shelf.spoil(0)
        assert shelf.get(0) is None
        assert shelf_of(again_closed(arena), 10).get(0) is None


def again_closed(arena: Arena) -> Arena:
    """Another holder, closed by the end of the process."""
    return again(arena)


def test_a_claim_that_a_dead_writer_left_lapses() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 10**6
        claims = {0: now, 1: now - 61_000}
        for id, stamp in claims.items():
            shelf._index[2 * id] = (stamp << 22 | 7) << 3 | 1
        assert shelf.get(0) is None
        assert not shelf.put(0, b"x")
        assert shelf.put(1, b"x")


# memory that is not there


def test_it_stops_growing_where_the_limits_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(128 * MIB) as arena:
        shelf = shelf_of(arena, 100)
        assert shelf.put(0, bytes(MIB))
        held = arena.state().held
        monkeypatch.setattr(module, "memory_room", lambda: Room(total=1 << 30, free=(1 << 26) + MIB))
        stored = [shelf.put(id, bytes(MIB)) for id in range(1, 100)]
        assert sum(stored) < 3
        assert not any(stored[sum(stored) :])
        state = arena.state()
        assert (state.stopped, state.error, state.held) == ("memory", 0, held)
        monkeypatch.undo()
        assert not shelf.put(99, bytes(MIB)), "it stays so, for what is cached has to stay the same"
        assert shelf.get(0)


@pytest.mark.processes
def test_it_stops_growing_where_the_kernel_refuses() -> None:
    def refused() -> None:
        with opened(128 * MIB) as arena:
            shelf = shelf_of(arena, 100)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40 * MIB, 40 * MIB))
            stored = sum(shelf.put(id, bytes(MIB)) for id in range(100))
            state = arena.state()
            assert 0 < stored < 40, stored
            assert state.stopped == "memory"
            assert state.error
            assert memory_of(arena) <= state.held
            assert sum(shelf.get(id) is not None for id in range(100)) == stored

    assert ended(forked(refused)) == 0


# giving back


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.integers(1, MIB), min_size=1, max_size=4), largest=st.integers(100, 60_000))
def test_giving_back_takes_whole_samples_from_the_end(parts: list[int], largest: int) -> None:
    with opened(2 * MIB) as arena:
        shelf = shelf_of(arena, 100)
        stored = [id for id in range(100) if shelf.put(id, sample(id, largest))]
        for nbytes in parts:
            before = arena.state()
            given = arena.give_back(lambda nbytes=nbytes: nbytes)
            state = arena.state()
            assert given >= min(nbytes, before.held - 4 * 4096)
            assert state.stopped == "given back"
            assert state.given_back == before.given_back + given
            assert memory_of(arena) <= state.held
            left = [id for id in stored if shelf.get(id) is not None]
            assert left == stored[: len(left)]
            assert shelf.held[0] == len(left) == len(stored) - state.samples_given_back
        for id in left:
            found = shelf.get(id)
            assert found is not None
            assert found[0] == sample(id, largest)
        assert not shelf.put(99, b"x")


@pytest.mark.processes
def test_readers_never_see_memory_that_is_being_given_back() -> None:
    with opened(64 * MIB) as arena:
        shelf = shelf_of(arena, 600)
        for id in range(600):
            assert shelf.put(id, bytes([id % 255 + 1]) * 100_000)

        def read() -> None:
            mine = again(arena)
            own = shelf_of(mine, 600)
            rng = random.Random(os.getpid())
            deadline = time.monotonic() + 2
            while own.held[0] and time.monotonic() < deadline:
                id = rng.randrange(600)
                found = own.get(id)
                assert found is None or found[0] == bytes([id % 255 + 1]) * 100_000

        readers = [forked(read) for _ in range(4)]
        time.sleep(0.2)
        while shelf.held[0]:
            arena.give_back(lambda: MIB)
        assert [ended(pid) for pid in readers] == [0] * 4
        arena.sweep()
        assert memory_of(arena) <= arena.state().held < MIB


# many processes


@pytest.mark.processes
def test_many_writers_publish_each_sample_once() -> None:
    samples = 400
    with opened(8 * MIB) as arena:
        shelf = shelf_of(arena, samples)
        descriptor = Tally.create(6)

        def write(number: int) -> None:
            tally = Tally(descriptor, 6)
            own = again(arena).shelf(KEY, samples, tally.row(number))
            assert own is not None
            order = list(range(samples))
            random.Random(number).shuffle(order)
            for id in order:
                found = own.get(id)
                assert found is None or found[0] == sample(id)
                if found is None:
                    own.put(id, sample(id))

        writers = [forked(lambda number=number: write(number)) for number in range(6)]
        assert [ended(pid) for pid in writers] == [0] * 6
        there = [id for id in range(samples) if shelf.get(id) is not None]
        assert len(there) == shelf.held[0] == Tally(descriptor, 6).total().stored
        os.close(descriptor)
        assert memory_of(arena) <= 8 * MIB


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(6))
def test_writers_killed_at_any_time_leave_nothing_wrong(seed: int) -> None:
    samples, largest = 3000, 20_000
    rng = random.Random(seed)
    with opened(64 * MIB) as arena:
        shelf = shelf_of(arena, samples)

        def write() -> None:
            own = shelf_of(again(arena), samples)
            order = list(range(samples))
            random.Random(os.getpid()).shuffle(order)
            for id in order:
                own.put(id, sample(id, largest), b"note %d" % id)
            signal.pause()

        writers = [forked(write) for _ in range(3)]
        for pid in writers:
            time.sleep(rng.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
            ended(pid)
        there = 0
        for id in range(samples):
            found = shelf.get(id)
            assert found is None or found[:2] == (sample(id, largest), b"note %d" % id)
            there += found is not None
        assert there == shelf.held[0]
        assert memory_of(arena) <= arena.state().held <= 64 * MIB
        fresh = next(id for id in range(samples) if shelf._index[2 * id] == 0)
        assert shelf.put(fresh, b"it goes on"), "no lock and no room was lost with them"
