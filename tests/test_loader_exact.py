"""Which batches a loader gives does not depend on how it prepares them."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from loading import Batch, assert_same, copied, epochs, ids, rest, workers

pytestmark = pytest.mark.processes


def _noisy(sample: Batch) -> Batch:
    """Draws from every generator that is seeded for a user's function; gives fields of every kind."""
    return {
        "x": sample["x"],
        "python": random.random(),
        "numpy": np.random.normal(size=3).astype(np.float16),
        "torch": torch.rand(2).to(torch.bfloat16),
        "flag": bool(sample["id"] % 2),
        "name": f"sample {sample['id']}",
    }


def _count(n: int, batch: int, **options: Any) -> ps.Pipe:
    return ps.arrays(x=np.arange(n)).batch(batch, **options)


@pytest.fixture(scope="module")
def pipes(photos: Path) -> dict[str, ps.Pipe]:
    varied = ps.files(photos).decode().resize(24)
    opaque = ps.arrays(x=np.arange(53 * 4, dtype=np.float32).reshape(53, 4)).map(_noisy)
    return {
        "images": ps.files(photos).decode().random_resized_crop(24).flip().rand_augment().batch(8),
        "opaque": opaque.batch(6),
        "list": varied.batch(7, ragged="list"),
        "pad": varied.batch(7, ragged="pad"),
    }


@pytest.mark.parametrize("name", ["images", "opaque", "list", "pad"])
def test_batches_do_not_depend_on_the_number_or_the_start_of_workers(pipes: dict[str, ps.Pipe], name: str) -> None:
    pipe = pipes[name]
    expected = epochs(pipe, 2, workers=0, seed=3)
    runs = [epochs(pipe, 2, workers=count, seed=3, start=start) for count, start in ((1, "auto"), (7, "fork"))]
    if name != "opaque":
        runs.append(epochs(pipe, 2, workers=2, seed=3, start="clean"))
    for run in runs:
        for found, wanted in zip(run, expected, strict=True):
            assert_same(found, wanted)


def test_epochs_differ_in_order_and_augmentation(pipes: dict[str, ps.Pipe]) -> None:
    first, second = epochs(pipes["images"], 2, workers=2)
    assert ids(first) != ids(second)
    assert sorted(ids(first)) == sorted(ids(second))
    one = {id: image for batch in first for id, image in zip(batch["id"].tolist(), batch["image"], strict=True)}
    other = {id: image for batch in second for id, image in zip(batch["id"].tolist(), batch["image"], strict=True)}
    assert not any(one[id].equal(other[id]) for id in one)


def test_the_callers_generators_are_left_alone(pipes: dict[str, ps.Pipe]) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    for count in (0, 1):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        epochs(pipes["opaque"], workers=count)
        found = draws()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert found == draws()


@pytest.mark.parametrize(("n", "batch", "world", "drop_last"), [(53, 4, 3, False), (53, 4, 3, True), (48, 4, 3, False)])
def test_every_sample_comes_once_over_all_ranks(n: int, batch: int, world: int, drop_last: bool) -> None:
    pipe = _count(n, batch, drop_last=drop_last)
    ranks = [epochs(pipe, workers=1, rank=rank, world_size=world)[0] for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    everyone = ids([batch for batches in ranks for batch in batches])
    assert len(set(everyone)) == len(everyone)
    assert len(everyone) == (n // (batch * world) * batch * world if drop_last else n)


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_resumes_at_every_step(pipes: dict[str, ps.Pipe], count: int) -> None:
    pipe = pipes["opaque"]
    with ps.Loader(pipe, workers=count) as loader:
        states = [loader.state_dict()]
        batches: list[Batch] = []
        for batch in loader:
            batches.append(copied(batch))
            states.append(loader.state_dict())
        following = rest(loader)
    for step, state in enumerate(states):
        with ps.Loader(pipe, workers=count) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict()["samples"] % 53 == state["samples"] % 53
            assert_same(rest(loader), batches[step:] or following)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_resumes_on_another_number_of_ranks(world: int) -> None:
    n, whole, before = 52, 8, 3
    with ps.Loader(_count(n, whole // 2), workers=1, rank=0, world_size=2) as loader:
        batches = iter(loader)
        for _ in range(before):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
    (expected,) = epochs(_count(n, whole), workers=0)
    ranks = []
    for rank in range(world):
        with ps.Loader(_count(n, whole // world), workers=1, rank=rank, world_size=world) as loader:
            loader.load_state_dict(state)
            ranks.append(rest(loader))
    for step, wanted in enumerate(expected[before:]):
        assert ids([batches[step] for batches in ranks]) == ids([wanted])


def _slow_first(sample: Batch) -> Batch:
    """The first samples of the order take longest, so that later batches are ready first."""
    import time

    time.sleep(0.05 if sample["x"] < 4 else 0.001)
    return sample


def test_order_ready_gives_the_same_batches_and_resumes_without_loss() -> None:
    pipe = ps.arrays(x=np.arange(40)).map(_slow_first).batch(4)
    (expected,) = epochs(pipe, workers=0, shuffle=False)
    wanted = {tuple(batch["id"].tolist()): batch for batch in expected}
    overtaken = False
    for stop in range(1, 10, 2):
        with ps.Loader(pipe, workers=3, order="ready", shuffle=False) as loader:
            batches = iter(loader)
            first = [copied(next(batches)) for _ in range(stop)]
            state = json.loads(json.dumps(loader.state_dict()))
        overtaken |= bool(state["ahead"])
        with ps.Loader(pipe, workers=3, order="ready", shuffle=False) as loader:
            loader.load_state_dict(state)
            found = first + rest(loader)
        assert sorted(ids(found)) == list(range(40))
        for batch in found:
            assert_same([batch], [wanted[tuple(batch["id"].tolist())]])
    assert overtaken


def test_a_state_saved_ahead_is_only_for_its_rank_and_batch_size() -> None:
    with ps.Loader(_count(40, 4), workers=0) as loader:
        state = {**loader.state_dict(), "ahead": [8]}
    for other in (ps.Loader(_count(40, 2), workers=0), ps.Loader(_count(40, 4), workers=0, world_size=2)):
        with pytest.raises(ps.StateError, match="rank and batch size"):
            other.load_state_dict(state)


def test_set_epoch_and_iterating_after_a_break() -> None:
    pipe = _count(40, 4)
    expected = epochs(pipe, 3, workers=0)
    with ps.Loader(pipe, workers=2) as loader:
        for _ in loader:
            break
        assert_same(rest(loader), expected[1])
        loader.set_epoch(0)
        assert_same(rest(loader), expected[0])
        assert loader.state_dict()["epoch"] == 1
        iter(loader)
        assert_same(rest(loader), expected[1])
        loader.set_epoch(2)
        assert_same(rest(loader), expected[2])


@pytest.mark.parametrize("count", [0, 2])
def test_an_iterator_that_is_overtaken_says_so(count: int) -> None:
    with ps.Loader(_count(40, 4), workers=count) as loader:
        old = iter(loader)
        next(old)
        next(iter(loader))
        with pytest.raises(ps.StateError, match="once at a time"):
            next(old)
        finished = iter(loader)
        list(finished)
        assert next(finished, None) is None
        assert next(finished, None) is None


def test_states_that_do_not_belong_are_refused() -> None:
    loader = ps.Loader(_count(40, 4), workers=0)
    state = loader.state_dict()
    changed: list[Callable[[], ps.Loader]] = [
        lambda: ps.Loader(_count(41, 4), workers=0),
        lambda: ps.Loader(_count(40, 4), workers=0, seed=1),
        lambda: ps.Loader(_count(40, 4), workers=0, shuffle=False),
        lambda: ps.Loader(ps.arrays(x=np.arange(40)).map(_noisy).batch(4), workers=0),
    ]
    for other in changed:
        with pytest.raises(ps.StateError, match="other data"):
            other().load_state_dict(state)
    for foreign in (
        {},
        {"version": 1},
        [1, 2],
        {**state, "version": 2},
        {**state, "samples": 41},
        {**state, "epoch": -1},
    ):
        with pytest.raises(ps.StateError):
            loader.load_state_dict(foreign)  # type: ignore[arg-type]
    assert loader.state_dict() == state


# batches that the user keeps


@pytest.fixture(scope="module")
def big() -> ps.Pipe:
    """Batches of 64 KiB, which live in slots."""
    return ps.arrays(x=np.arange(64 * 2048, dtype=np.int64).reshape(64, 2048)).batch(4)


def test_keeping_every_batch_gives_right_data(big: ps.Pipe) -> None:
    (expected,) = epochs(big, workers=0)
    with ps.Loader(big, workers=2, prefetch=2) as loader:
        kept = list(loader)
        stats = loader.stats()
        assert stats["slots"] < len(kept)
        assert stats["batches_copied"] >= len(kept) - stats["slots"]
        assert_same(kept, expected)


def test_keeping_some_batches_gives_right_data(big: ps.Pipe) -> None:
    (expected,) = epochs(big, workers=0)
    with ps.Loader(big, workers=2, prefetch=2) as loader:
        for keep in (lambda i: i % 2, lambda i: i % 3 == 0, lambda i: i < 3, lambda i: i > 10):
            loader.set_epoch(0)
            kept = {i: batch for i, batch in enumerate(loader) if keep(i)}
            for i, batch in kept.items():
                assert_same([batch], [expected[i]])


def test_a_slot_is_the_users_while_anything_over_it_lives(big: ps.Pipe) -> None:
    views: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x[1:3],
        lambda x: x.view(-1)[::7],
        lambda x: x.t().detach(),
        lambda x: x.numpy()[2],
        lambda x: x.unbind()[3],
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: memoryview(x.numpy())[1:],
        lambda x: x.untyped_storage(),
    ]
    with ps.Loader(big, workers=2, prefetch=2) as loader:
        for view in views:
            batches = iter(loader)
            x = next(batches)["x"]
            held, copy = view(x), view(x.clone())
            del x
            for _ in batches:
                pass
            if isinstance(held, torch.Tensor):
                assert held.equal(copy)
            else:
                assert bytes(held) == bytes(copy)


def test_slots_return_when_batches_are_released(big: ps.Pipe) -> None:
    with ps.Loader(big, workers=2, prefetch=2) as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        assert loader.stats()["slots_held"] == 3
        held.pop()
        assert loader.stats()["slots_held"] == 2
        next(batches)
        assert loader.stats()["slots_held"] == 2
        held.clear()
        gc.collect()
        assert loader.stats()["slots_held"] == 0
        stats = loader.stats()
        assert stats["batches_copied"] == 0
        assert stats["batches_taken"] == 4


def test_a_batch_outlives_its_loader(big: ps.Pipe) -> None:
    (expected,) = epochs(big, workers=0)
    loader = ps.Loader(big, workers=2, prefetch=2)
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    loader.close()
    with ps.Loader(big, workers=2, prefetch=2) as other:
        rest(other)
    assert_same(kept, expected[:2])
    kept[0]["x"].zero_()
    assert_same(kept[1:], expected[1:2])


def test_batches_may_outgrow_their_slots() -> None:
    """Sizes that only show as batches come, and that grow: every batch is right, all at once or one after another."""
    sizes = [1000, 20_000, 3_000, 40_000, 80_000, 10, 160_000, 100_000]

    def grown(sample: Batch) -> Batch:
        return {"x": np.full(sizes[int(sample["x"]) // 4], sample["x"])}

    pipe = ps.arrays(x=np.arange(32)).map(grown).batch(4)
    (expected,) = epochs(pipe, workers=0, shuffle=False)
    for count in (1, 3):
        with ps.Loader(pipe, workers=count, shuffle=False) as loader:
            for _ in range(2):
                loader.set_epoch(0)
                assert_same(list(loader), expected)


def test_more_large_batches_may_come_at_once_than_descriptors_fit_a_message() -> None:
    """Until their size is known batches lie in memory of their own; behind a slow one many come together."""

    def large(sample: Batch) -> Batch:
        import time

        time.sleep(0.3 if sample["x"] == 0 else 0)
        return {"x": np.full(10_000, sample["x"])}

    pipe = ps.arrays(x=np.arange(30)).map(large).batch(1)
    (expected,) = epochs(pipe, workers=0, shuffle=False)
    assert_same(epochs(pipe, workers=2, shuffle=False, prefetch=30)[0], expected)


def _own_kib(pid: int) -> int:
    """Memory that is not a file's; how many share a library's pages changes as other programs come and go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def test_memory_after_ten_thousand_batches_is_what_it_was_after_a_hundred() -> None:
    import psutil

    pipe = ps.arrays(x=np.zeros((8000, 2048), np.float32)).batch(8)
    with ps.Loader(pipe, workers=2) as loader:
        marks, seen = [], 0
        for _ in range(10):
            for _ in loader:
                seen += 1
                if seen in (100, 10_000):
                    pids = workers(loader, 2)
                    chain = [psutil.Process(), *psutil.Process().children(), *map(psutil.Process, pids)]
                    marks.append([(_own_kib(p.pid), p.num_fds()) for p in chain])
        assert loader.stats()["batches"] == seen == 10_000
    for (memory, fds), (memory_later, fds_later) in zip(*marks, strict=True):
        assert memory_later - memory < 2048
        assert fds_later == fds
