"""What a dataset draws from `random`, numpy and torch does not depend on how it is prepared."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data as tud
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.seeding import preserved, seed_all

many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def drawn() -> tuple[Any, ...]:
    """One of each kind, among them those that generators make in pairs and keep one of."""
    return (
        random.random(),
        random.gauss(0.0, 1.0),
        random.randrange(10**9),
        float(np.random.rand()),
        float(np.random.randn()),
        float(np.random.standard_normal()),
        int(np.random.randint(10**9)),
        float(torch.rand(())),
        torch.randn(3).tolist(),
        torch.randperm(5).tolist(),
    )


def disturb() -> None:
    """Leave every generator with half of a pair."""
    random.gauss(0.0, 1.0)
    np.random.randn()
    torch.randn(1, dtype=torch.float64)


# The generators


@given(st.integers(0, 2**64 - 1))
def test_a_key_says_all(key: int) -> None:
    with preserved():
        seed_all(key)
        first = drawn()
        disturb()
        seed_all(key)
        assert drawn() == first


@given(st.integers(0, 2**64 - 2))
def test_neighbouring_keys_are_unrelated(key: int) -> None:
    with preserved():
        seed_all(key)
        first = drawn()
        seed_all(key + 1)
        assert not any(one == other for one, other in zip(drawn()[:8], first[:8], strict=True) if type(one) is float)


def test_halves_of_pairs_are_dropped_between_samples() -> None:
    with preserved():
        seed_all(1)
        clean = (random.gauss(0.0, 1.0), float(np.random.randn()), float(torch.randn((), dtype=torch.float64)))
        for leave in (disturb, lambda: np.random.randn(3), lambda: np.random.standard_normal(), lambda: None):
            leave()
            seed_all(1)
            again = (random.gauss(0.0, 1.0), float(np.random.randn()), float(torch.randn((), dtype=torch.float64)))
            assert again == clean


def test_a_users_own_seed_in_between_does_no_harm() -> None:
    with preserved():
        seed_all(4)
        first = drawn()
        for reset in (lambda: np.random.seed(0), lambda: random.seed(0), lambda: torch.manual_seed(0)):
            reset()
            disturb()
            seed_all(4)
            assert drawn() == first


def test_another_bit_generator_behind_numpy_is_seeded_too() -> None:
    original = np.random.get_bit_generator()
    try:
        with preserved():
            seed_all(1)
        np.random.set_bit_generator(np.random.MT19937(5))
        seed_all(9)
        first = np.random.rand(3).tolist()
        seed_all(9)
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(original)


def test_numbers_are_uniform_over_keys() -> None:
    """First numbers of consecutive keys, which is what an epoch of samples draws."""
    with preserved():
        columns: list[list[float]] = [[], [], []]
        for key in range(4000):
            seed_all(key)
            for column, value in zip(columns, (random.random(), np.random.rand(), float(torch.rand(()))), strict=True):
                column.append(value)
    for column in columns:
        values = np.array(column)
        assert abs(values.mean() - 0.5) < 0.02
        assert abs(values.var() - 1 / 12) < 0.005
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
        assert np.histogram(values, 10, (0, 1))[0].min() > 300


def test_what_is_drawn_inside_is_not_seen_outside() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    disturb()
    with preserved():
        pass
    expected = drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    disturb()
    with contextlib.suppress(ZeroDivisionError), preserved():
        seed_all(3)
        disturb()
        raise ZeroDivisionError
    assert drawn() == expected


# Loaders


class Drawing(tud.Dataset[Any]):
    """Every third sample draws, and some more often than others."""

    def __init__(self, n: int = 40, pause_s: float = 0.0) -> None:
        self.n = n
        self.pause_s = pause_s

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if self.pause_s:
            time.sleep(self.pause_s)
        for _ in range(index % 3):
            disturb()
        return index, *drawn()


def contents(loader: Any) -> list[Any]:
    return [[item.tolist() if isinstance(item, torch.Tensor) else item for item in flat(batch)] for batch in loader]


def flat(batch: Any) -> list[Any]:
    return [part for item in batch for part in flat(item)] if isinstance(batch, list) else [batch]


def loader(**arguments: Any) -> Any:
    torch.manual_seed(arguments.pop("seed", 11))
    return ps.DataLoader(arguments.pop("dataset", Drawing()), **{"batch_size": 6, "shuffle": True, **arguments})


@many_workers
@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    "how", [{}, {"prefetch_factor": 1}, {"in_order": True, "persistent_workers": True}, {"batch_size": None}], ids=str
)
def test_draws_do_not_depend_on_the_workers(workers: int, how: dict[str, Any]) -> None:
    inline = {key: value for key, value in how.items() if key == "batch_size"}
    assert contents(loader(num_workers=workers, **how)) == contents(loader(num_workers=0, **inline))


@pytest.mark.processes
def test_draws_of_cut_batches_do_not_depend_on_the_workers() -> None:
    slow = {"dataset": Drawing(64, pause_s=0.003), "batch_size": 16}
    assert contents(loader(num_workers=2, **slow)) == contents(loader(num_workers=0, **slow))


@pytest.mark.processes
@pytest.mark.parametrize("how", [{}, {"collate": True}], ids=["items", "collation"])
def test_datasets_that_fetch_batches_draw_alike_too(how: dict[str, Any]) -> None:
    class Batched(Drawing):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(index, *drawn()) for index in indices]

    def collate(batch: list[Any]) -> Any:
        return tud.default_collate(batch), drawn()

    arguments: dict[str, Any] = {"dataset": Drawing() if how else Batched()}
    if how:
        arguments["collate_fn"] = collate
    first = [repr(batch) for batch in loader(num_workers=0, **arguments)]
    assert [repr(batch) for batch in loader(num_workers=2, **arguments)] == first


@pytest.mark.processes
@pytest.mark.parametrize(
    "how", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_epochs_and_seeds_differ(how: dict[str, Any]) -> None:
    plain = {"shuffle": False, **how}
    one = loader(**plain)
    epochs = [contents(one) for _ in range(3)]
    other = contents(loader(seed=12, **plain))
    values = [[tuple(batch[1]) for batch in epoch] for epoch in (*epochs, other)]
    assert len({value for epoch in values for value in epoch}) == sum(map(len, values))
    again = loader(**plain)
    assert [contents(again) for _ in range(3)] == epochs


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_decides_alone(workers: int) -> None:
    made = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(77)
        made.append(contents(loader(seed=seed, generator=generator, num_workers=workers)))
    assert made[0] == made[1]
    generator = torch.Generator().manual_seed(78)
    assert contents(loader(generator=generator, num_workers=workers)) != made[0]


@pytest.mark.processes
def test_an_epoch_after_one_that_was_broken_off_does_not_depend_on_how_far_it_was_prepared() -> None:
    """Batches asked for ahead and never taken must leave no trace."""
    made = []
    for workers, factor, pause_s in ((1, 1, 0.0), (2, 4, 0.02), (2, None, 0.05)):
        one = loader(num_workers=workers, prefetch_factor=factor, persistent_workers=True, shuffle=False)
        for number, _ in enumerate(one):
            time.sleep(pause_s)
            if number == 2:
                break
        made.append(contents(one))
    assert made[0] == made[1] == made[2]


def test_the_training_process_draws_as_if_there_were_no_loader() -> None:
    random.seed(5)
    np.random.seed(5)
    made = loader(num_workers=0)
    iterator = iter(made)
    torch.manual_seed(5)
    next(iterator)  # the sampler draws its seed
    state = torch.get_rng_state()
    disturb()
    expected = drawn()
    random.seed(5)
    np.random.seed(5)
    torch.set_rng_state(state)
    disturb()
    next(iterator)
    assert drawn() == expected


@pytest.mark.processes
def test_draws_are_the_same_when_workers_are_killed() -> None:
    dataset = Drawing(120, pause_s=0.002)
    expected = contents(loader(dataset=dataset, num_workers=2, prefetch_factor=4))
    with Killing():
        assert contents(loader(dataset=dataset, num_workers=2, prefetch_factor=4)) == expected


class Killing:
    """Kills a worker (a process below the forked template) every now and then, at times that vary."""

    def __init__(self, most: int = 100, pause_s: float = 0.06) -> None:
        self._most = most
        self._pause_s = pause_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.killed = 0

    def __enter__(self) -> Killing:
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        assert self.killed

    def _run(self) -> None:
        me = psutil.Process()
        chance = random.Random(3)
        while self.killed < self._most and not self._done.wait(chance.uniform(0.5, 1.5) * self._pause_s):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                templates = [child for child in me.children() if child.pid not in self._before]
                workers = [worker for template in templates for worker in template.children()]
                chance.choice(workers).kill()
                self.killed += 1


# Torch's own rule


def equal_to_torchs(dataset: Any, epochs: int = 1, **arguments: Any) -> bool:
    made = []
    for kind in (ps.DataLoader, tud.DataLoader):
        generator = torch.Generator().manual_seed(8)
        more = {"seeding": "torch"} if kind is ps.DataLoader else {}
        one = kind(dataset, generator=generator, num_workers=2, **arguments, **more)
        made.append([contents(one) for _ in range(epochs)])
    return bool(made[0] == made[1])


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_rule_gives_torchs_numbers(persistent: bool) -> None:
    assert equal_to_torchs(Drawing(50), 3, batch_size=4, shuffle=True, persistent_workers=persistent)


@pytest.mark.processes
def test_torchs_rule_gives_torchs_numbers_without_workers() -> None:
    made = []
    for kind, more in ((ps.DataLoader, {"seeding": "torch"}), (tud.DataLoader, {})):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        made.append(contents(kind(Drawing(), batch_size=4, shuffle=True, **more)))
    assert made[0] == made[1]


class Stream(tud.IterableDataset[Any]):
    def __init__(self, n: int = 12, pause_s: float = 0.0) -> None:
        self.n = n
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.n))
        random.shuffle(order)
        for index in order:
            time.sleep(self.pause_s)
            yield index, *drawn()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_draw_as_torchs(persistent: bool) -> None:
    assert equal_to_torchs(Stream(), 3, batch_size=5, persistent_workers=persistent)


@pytest.mark.processes
def test_streams_draw_as_torchs_in_the_first_epoch_whatever_the_seeding() -> None:
    made = []
    for kind in (ps.DataLoader, tud.DataLoader):
        one = kind(Stream(), batch_size=5, generator=torch.Generator().manual_seed(8), num_workers=2)
        made.append([contents(one) for _ in range(2)])
    assert made[0] == made[1]


@pytest.mark.processes
def test_streams_are_the_same_when_workers_are_killed() -> None:
    """In later epochs of persistent workers too: what replaces a worker must find the generators as that one did."""

    def epochs() -> list[Any]:
        torch.manual_seed(4)
        one = ps.DataLoader(Stream(60, 0.004), batch_size=5, num_workers=2, persistent_workers=True)
        return [contents(one) for _ in range(2)]

    expected = epochs()
    assert expected[0] != expected[1]
    for epoch in expected:
        assert sorted(index for batch in epoch for index in batch[0]) == sorted([*range(60), *range(60)])
    with Killing(most=8, pause_s=0.1):  # a stream is read again from its start, so leave it time to get there
        assert epochs() == expected
