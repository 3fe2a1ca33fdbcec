"""`ps.DataLoader` beside `torch.utils.data.DataLoader`, given the same: equal batches, in the same order."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import penstock as ps

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(60),
    # torch's advice where a test has more workers than the machine has cores
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


# What is compared


def same(ours: Any, theirs: Any) -> None:
    """Type by type, value by value."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        same_tensors(ours, theirs)
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape, ours.flags.writeable) == (theirs.dtype, theirs.shape, theirs.flags.writeable)
        assert ours.flags.f_contiguous == theirs.flags.f_contiguous
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, Mapping):
        assert list(ours) == list(theirs)
        for key in ours:
            same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif is_dataclass(ours):
        same(vars(ours), vars(theirs))
    elif isinstance(ours, float) and math.isnan(ours):
        assert math.isnan(theirs)
    else:
        assert ours == theirs


def same_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
    assert (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
    if ours.layout is torch.strided:
        assert ours.is_contiguous() or ours.stride() == theirs.stride()
        assert ours.is_contiguous() >= theirs.is_contiguous()
        assert torch.equal(raw(ours), raw(theirs))
    else:
        assert torch.equal(ours.to_dense(), theirs.to_dense())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN is equal to NaN, and -0.0 is not equal to 0.0."""
    return tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8)


def both(dataset: Any, *args: Any, epochs: int = 1, generator: bool = True, **kwargs: Any) -> list[Any]:
    """Iterate ours and torch's side by side; returns the batches, after comparing them."""
    taken = []
    for kind in (ps.DataLoader, tud.DataLoader):
        extra = {"generator": torch.Generator().manual_seed(7)} if generator else {}
        torch.manual_seed(3)
        made = {key: value() if isinstance(value, Fresh) else value for key, value in kwargs.items()}
        if kind is tud.DataLoader:
            made.pop("seeding", None)
        loader = kind(dataset, *args, **extra, **made)
        taken.append([list(loader) for _ in range(epochs)])
    same(*taken)
    return taken[0] if epochs > 1 else taken[0][0]


class Fresh:
    """An argument that is made anew for each loader, because it has a state."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


class Squares(tud.Dataset[Any]):
    def __init__(self, n: int = 23) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index, torch.full((3,), float(index)), f"sample {index}"


class Made(tud.Dataset[Any]):
    """Samples from a function of the index."""

    def __init__(self, make: Callable[[Any], Any], n: int = 10) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


def first(batch: list[Any]) -> Any:
    return batch


# Order


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("given", [True, False], ids=["generator", "global seed"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_torchs(workers: int, given: bool, shuffle: bool) -> None:
    batches = both(Squares(), 4, shuffle, num_workers=workers, generator=given, epochs=2)
    assert (batches[0][0][0].tolist() != batches[1][0][0].tolist()) == shuffle


def test_generator_ends_where_torchs_does() -> None:
    states = []
    for kind in (ps.DataLoader, tud.DataLoader):
        generator = torch.Generator().manual_seed(5)
        loader = kind(Squares(), 4, shuffle=True, num_workers=2, generator=generator)
        for _ in loader:
            pass
        list(loader)
        states.append(generator.get_state())
    assert torch.equal(*states)


WEIGHTS = [0.1 + i % 5 for i in range(23)]


class Eager:
    """A batch sampler that draws when it is asked for an iterator, as many are written."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(self.n).split(4)])


SAMPLERS: dict[str, dict[str, Any]] = {
    "list": {"sampler": [5, 3, 3, 9], "batch_size": 3},
    "tensor": {"sampler": torch.tensor([4, 4, 1, 0, 17]), "batch_size": 2},
    "replacement": {"sampler": Fresh(lambda: tud.RandomSampler(Squares(), replacement=True, num_samples=70))},
    "weighted": {"sampler": Fresh(lambda: tud.WeightedRandomSampler(WEIGHTS, 40)), "batch_size": 6},
    "subset": {"sampler": Fresh(lambda: tud.SubsetRandomSampler(range(5, 20))), "batch_size": 4, "drop_last": True},
    "distributed": {
        "sampler": Fresh(lambda: tud.DistributedSampler(Squares(), num_replicas=3, rank=1, seed=4)),
        "batch_size": 3,
    },
    "batches": {"batch_sampler": [[1, 2], [3], [4, 5, 6, 0], (7, 8)]},
    "ranges": {"batch_sampler": [range(3), range(3, 20, 2)]},
    "eager": {"batch_sampler": Fresh(lambda: Eager(23))},
    "torch batches": {"batch_sampler": Fresh(lambda: tud.BatchSampler(tud.RandomSampler(Squares()), 5, True))},
    "single": {"batch_size": None, "sampler": Fresh(lambda: tud.RandomSampler(Squares()))},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", SAMPLERS)
def test_samplers_are_followed(how: str, workers: int) -> None:
    assert both(Squares(), num_workers=workers, generator=False, epochs=2, **SAMPLERS[how])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_distributed_sampler_shuffles_by_epoch(persistent: bool) -> None:
    seen = []
    for kind in (ps.DataLoader, tud.DataLoader):
        sampler = tud.DistributedSampler(Squares(), num_replicas=2, rank=0)
        loader = kind(Squares(), 4, sampler=sampler, num_workers=2, persistent_workers=persistent)
        seen.append([])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            seen[-1].append(list(loader))
    same(*seen)


def test_keys_are_whatever_the_sampler_gives() -> None:
    table = {"a": 1, ("b", 2): 2, b"c": 3, None: 4, 5.5: 5}
    both(table, batch_size=2, sampler=list(table), num_workers=2)
    both(table, batch_sampler=[["a", ("b", 2)], [None], [b"c", 5.5, "a"]], num_workers=2)
    both({(1, "x"): 7}, batch_size=None, sampler=[(1, "x")], num_workers=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "how", [{"batch_size": None}, {"batch_size": 5, "drop_last": True}, {"batch_size": 5}, {"batch_size": 100}]
)
def test_batch_sizes(how: dict[str, Any], workers: int) -> None:
    assert both(Squares(), num_workers=workers, **how)


def test_an_empty_dataset_has_no_batches() -> None:
    assert both(Squares(0), 4, num_workers=2) == []


def test_an_empty_batch_goes_to_the_collation() -> None:
    assert both(Squares(), batch_sampler=[[1], [], [2]], collate_fn=len, num_workers=2) == [1, 0, 1]


# Content

Point = namedtuple("Point", "x y")


@dataclass
class Box:
    corners: torch.Tensor
    label: str


class Bag(UserDict[str, Any]):
    pass


class Labelled(torch.Tensor):
    """A tensor with something more, as torchvision's."""

    label: str


def labelled(i: int) -> Labelled:
    tensor = torch.full((4, 5), i).as_subclass(Labelled)
    tensor.label = f"number {i}"
    return tensor


def image(i: int, size: int = 8) -> torch.Tensor:
    return torch.arange(3 * size * size, dtype=torch.float32).view(3, size, size) * (i + 1)


NUMPY = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)
TORCH = ("bfloat16", "complex64", "complex128", "bool", "uint8", "int16", "float16", "float64")

SAMPLES: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: "é" * i,
    "bytes": lambda i: bytes([i]),
    "dict": lambda i: {"image": image(i), "label": i, "deep": {"path": str(i), "box": [i, 2.0 * i]}},
    "ordered": lambda i: OrderedDict(b=i, a=torch.tensor(i)),
    "own mapping": lambda i: Bag(a=i, b=image(i)),
    "tuple": lambda i: (image(i), i),
    "list": lambda i: [image(i), i, [str(i)]],
    "namedtuple": lambda i: Point(x=image(i), y=Point(i, float(i))),
    "numpy": lambda i: {name: np.full((2, 3), i % 2, name) for name in NUMPY},
    "numpy scalars": lambda i: {name: np.dtype(name).type(i % 2) for name in NUMPY if name != "uint64"},
    "torch": lambda i: {name: torch.full((2, 3), i % 2).to(getattr(torch, name)) for name in TORCH},
    "nan": lambda i: torch.tensor([math.nan, -0.0, math.inf]),
    "scalar tensors": lambda i: torch.tensor(i),
    "zero size": lambda i: (torch.empty(0), torch.empty(3, 0, 2), np.empty((0, 4))),
    "strided": lambda i: (image(i)[:, ::2, 1:5], image(i).transpose(0, 2), image(i).flip(0)),
    "channels last": lambda i: image(i)[None].to(memory_format=torch.channels_last),
    "expanded": lambda i: torch.tensor([float(i)]).expand(6, 5),
    "large": lambda i: (image(i, 64), image(i, 40).to(torch.uint8), i),
    "large views": lambda i: (image(i, 64).transpose(0, 2), torch.tensor(i).expand(100, 100)),
    "many strings": lambda i: ["word" * 500] * 20,
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_default_collation_gives_what_torch_gives(kind: str) -> None:
    assert len(both(Made(SAMPLES[kind]), 4, num_workers=2)) == 3


OBJECTS: dict[str, Callable[[int], Any]] = {
    **SAMPLES,
    "none": lambda i: None,
    "big int": lambda i: 2**100 + i,
    "dataclass": lambda i: Box(image(i), str(i)),
    "requires grad": lambda i: torch.full((3,), float(i), requires_grad=True),
    "parameter": lambda i: torch.nn.Parameter(torch.full((3,), float(i))),
    "subclass": labelled,
    "sparse": lambda i: torch.eye(4).mul(i).to_sparse(),
    "packed": lambda i: pack_sequence([torch.ones(3) * i, torch.ones(2)]),
    "set": lambda i: {i, "x"},
    "readonly array": lambda i: np.frombuffer(bytes(range(16)), np.uint8),
    "fortran": lambda i: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided array": lambda i: np.arange(24).reshape(4, 6)[::2, 1:3],
    "objects": lambda i: np.array([None, "x", i], object),
    "records": lambda i: np.array([(i, 2.0)], [("a", "i4"), ("b", "f8")]),
    "dates": lambda i: np.array(["2024-02-03"], "datetime64[D]"),
    "zero array": lambda i: np.empty((3, 0)),
    "dtype": lambda i: (torch.float32, torch.Size([i, 2]), np.dtype("i4")),
    "large bytes": lambda i: bytes(100_000),
    "large array": lambda i: np.full((200, 300), i),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_a_collation_makes_arrives_as_it_is(kind: str) -> None:
    for batch in both(Made(OBJECTS[kind]), 4, num_workers=2, collate_fn=first):
        if kind == "subclass":
            assert [tensor.label for tensor in batch] == [f"number {int(tensor[0, 0])}" for tensor in batch]
        if kind == "packed":
            assert all(type(item) is PackedSequence for item in batch)


@pytest.mark.parametrize("kind", sorted(OBJECTS.keys() - {"readonly array", "records", "dates"}))
def test_single_items_are_converted_as_torch_does(kind: str) -> None:
    both(Made(OBJECTS[kind], 3), batch_size=None, num_workers=1)


def test_conjugated_tensors_stay_so() -> None:
    """torch's workers lose the conjugation, and fail to stack such tensors."""
    dataset = Made(lambda i: torch.tensor([1j * i, 1 + 2j]).conj())
    for how in ({}, {"collate_fn": torch.stack}, {"batch_size": None}):
        ours, inline = (kind(dataset, num_workers=n, **how) for kind, n in ((ps.DataLoader, 1), (tud.DataLoader, 0)))
        for one, other in zip(ours, inline, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [3, 20_000])
def test_the_training_process_collates_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("collated in the training process")

    loader = ps.DataLoader(Made(lambda i: (i, torch.full((size,), i)), 40), 4, num_workers=2)
    batches = iter(loader)
    for name in ("stack", "tensor", "cat"):
        monkeypatch.setattr(torch, name, refused)
    assert sum(len(rows) for _, rows in batches) == 40
    monkeypatch.undo()
    pids = set(ps.DataLoader(Made(lambda i: i), 2, num_workers=2, collate_fn=lambda batch: os.getpid()))
    assert os.getpid() not in pids


def test_collations_may_be_closures_and_use_torchs() -> None:
    seen = 10

    def collate(batch: list[Any]) -> Any:
        kept = [item for item in batch if item[0] % 3]
        return {"n": len(kept) + seen, "batch": tud.default_collate(kept), "large": torch.ones(len(batch), 20_000)}

    both(Squares(), 6, num_workers=2, collate_fn=collate)


def test_a_collation_may_keep_what_it_made() -> None:
    """Mixing with the batch before is how that is used; slots must not be seen to change under it."""

    def collating() -> Callable[[list[Any]], Any]:
        kept: list[torch.Tensor] = []

        def collate(batch: list[Any]) -> Any:
            kept.append(tud.default_collate(batch))
            return kept[-1], kept[max(0, len(kept) - 20)]

        return collate

    dataset = Made(lambda i: torch.full((20_000,), float(i)), 80)
    both(dataset, 2, num_workers=1, collate_fn=Fresh(collating))


def test_the_same_tensor_twice_stays_one_tensor() -> None:
    def collate(batch: list[Any]) -> Any:
        tensor = torch.tensor(batch)
        return {"a": tensor, "b": tensor, "c": [tensor]}

    for batch in both(list(range(10)), 5, num_workers=1, collate_fn=collate):
        assert batch["a"] is batch["b"] is batch["c"][0]


def test_a_users_own_collation_of_tensors_is_used() -> None:
    collates = tud._utils.collate.default_collate_fn_map
    original = collates[torch.Tensor]
    collates[torch.Tensor] = lambda batch, *, collate_fn_map=None: torch.stack(batch).sum()
    try:
        both(Made(image), 4, num_workers=1)
    finally:
        collates[torch.Tensor] = original


def leaves() -> st.SearchStrategy[Any]:
    dtypes = st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tensors = st.builds(lambda shape, dtype: ("tensor", tuple(shape), dtype), shapes, dtypes)
    arrays = st.builds(lambda shape, dtype: ("array", tuple(shape), dtype), shapes, st.sampled_from(NUMPY))
    large = st.builds(lambda dtype: ("tensor", (7000,), dtype), dtypes)
    return st.one_of(tensors, arrays, large, st.sampled_from([("int",), ("float",), ("bool",), ("str",), ("bytes",)]))


def trees() -> st.SearchStrategy[Any]:
    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        parts = st.lists(inner, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from(["list", "tuple", "set of keys"]), parts),
            st.builds(lambda x, y: ("point", [x, y]), inner, inner),
        )

    return st.recursive(leaves(), containers, max_leaves=6)


def grown(tree: Any, i: int) -> Any:
    """A sample of a structure: a function of the index."""
    kind, *more = tree
    match kind:
        case "tensor":
            return (torch.arange(math.prod(more[0])) * (i + 1) % 5).to(more[1]).view(more[0])
        case "array":
            return (np.arange(math.prod(more[0])) * (i + 1) % 3).astype(more[1]).reshape(more[0])
        case "list":
            return [grown(part, i) for part in more[0]]
        case "tuple":
            return tuple(grown(part, i) for part in more[0])
        case "point":
            return Point(*(grown(part, i) for part in more[0]))
        case "set of keys":
            return {f"key {n}": grown(part, i) for n, part in enumerate(more[0])}
    return {"int": i, "float": i / 7, "bool": i % 3 == 0, "str": "s" * i, "bytes": b"b" * i}[kind]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(trees(), min_size=5, max_size=5), st.booleans())
def test_any_structure_gives_what_torch_gives(structures: list[Any], collated: bool) -> None:
    """Five structures a time: starting workers takes longer than the batches do."""
    dataset = Made(lambda key: grown(structures[key // 10], key % 10), 50)
    for batch in both(dataset, 5, num_workers=1, collate_fn=None if collated else first):
        assert len(batch) >= 0 if hasattr(batch, "__len__") else batch is not None


# Datasets


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


def test_datasets_that_fetch_batches() -> None:
    both(Batched(), 5, shuffle=True, num_workers=2)
    both(tud.Subset(Batched(), [4, 2, 9, 9]), 3, num_workers=1)


def test_torchs_own_datasets() -> None:
    tensors = tud.TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    both(tensors, 4, shuffle=True, num_workers=2)
    both(tud.Subset(Squares(), [5, 4, 20]), 2, num_workers=2)
    both(tud.ConcatDataset([Squares(3), tud.Subset(Squares(9), [8, 1])]), 2, shuffle=True, num_workers=2)
    both(tud.StackDataset(a=Squares(5), b=tud.TensorDataset(torch.ones(5))), 2, num_workers=1)


def test_random_splits() -> None:
    parts = tud.random_split(Squares(), [0.5, 0.5], torch.Generator().manual_seed(0))
    for part in parts:
        both(part, 3, shuffle=True, num_workers=2)


class Shards(tud.IterableDataset[Any]):
    """Worker w has `sizes[w]` samples; without workers, one has them all."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = tud.get_worker_info()
        workers = range(len(self.sizes)) if info is None else [info.id]
        for worker in workers:
            for i in range(self.sizes[worker]):
                yield {"worker": worker, "i": i, "x": torch.full((2,), float(i))}


class Sized(Shards):
    def __len__(self) -> int:
        return sum(self.sizes)


@pytest.mark.parametrize("sizes", [(9, 9), (10, 3), (0, 5), (0, 0), (1, 30), (7,), (8, 8, 8)], ids=str)
@pytest.mark.parametrize("how", [{}, {"drop_last": True}, {"batch_size": None}], ids=str)
def test_streams(sizes: tuple[int, ...], how: dict[str, Any]) -> None:
    both(Shards(*sizes), num_workers=len(sizes), **{"batch_size": 3, **how})


def test_streams_without_workers() -> None:
    both(Shards(4, 3), 3, num_workers=0)


def test_streams_of_very_uneven_workers() -> None:
    """torch's order then depends on which end is heard of first; each worker's own order does not."""
    sizes = (3, 40, 0, 11)
    batches = list(ps.DataLoader(Shards(*sizes), batch_size=None, num_workers=4))
    for worker, size in enumerate(sizes):
        assert [batch["i"] for batch in batches if batch["worker"] == worker] == list(range(size))


@pytest.mark.parametrize("persistent", [False, True])
def test_streams_begin_anew_with_each_epoch(persistent: bool) -> None:
    both(Shards(10, 4), 3, num_workers=2, persistent_workers=persistent, epochs=3)


class Restarts(tud.IterableDataset[Any]):
    """An iterator that would begin again when asked after its end."""

    def __iter__(self) -> Iterator[int]:
        class Again:
            def __init__(self) -> None:
                self.at = 0

            def __iter__(self) -> Again:
                return self

            def __next__(self) -> int:
                self.at += 1
                if self.at % 4 == 0:
                    raise StopIteration
                return self.at

        return Again()


def test_a_stream_that_ended_is_not_asked_again() -> None:
    both(Restarts(), batch_size=None, num_workers=2)
    both(Restarts(), batch_size=2, num_workers=2)


def test_lengths() -> None:
    for arguments in ({"batch_size": 5}, {"batch_size": 5, "drop_last": True}, {"batch_size": None}):
        for dataset in (Squares(), Sized(10, 3)):
            assert len(ps.DataLoader(dataset, **arguments)) == len(tud.DataLoader(dataset, **arguments))
    with pytest.raises(TypeError, match="has no len"):
        len(ps.DataLoader(Shards(3)))


def test_a_stream_longer_than_it_says_is_warned_of() -> None:
    class Liar(Shards):
        def __len__(self) -> int:
            return 3

    messages = []
    for kind in (ps.DataLoader, tud.DataLoader):
        loader = kind(Liar(4, 2), num_workers=2)
        assert len(loader) == 3
        with pytest.warns(UserWarning, match="Length of IterableDataset") as caught:
            list(loader)
        messages.append([str(warning.message).split(" object at ")[-1][20:] for warning in caught])
    assert messages[0] == messages[1]


def test_datapipes() -> None:
    """They share themselves out among workers, and are shuffled from one seed."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    def pipe() -> Any:
        return IterableWrapper(range(20), deepcopy=False).shuffle().sharding_filter()

    for persistent in (False, True):
        taken = []
        for kind in (ps.DataLoader, tud.DataLoader):
            torch.manual_seed(1)
            loader = kind(pipe(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=persistent)
            taken.append([list(loader) for _ in range(2)])
        same(*taken)
        assert sorted(torch.cat(taken[0][0]).tolist()) == list(range(20))
        assert torch.cat(taken[0][0]).tolist() != torch.cat(taken[0][1]).tolist()


# Workers


def information(_: Any) -> Any:
    info = tud.get_worker_info()
    assert info is not None
    return info.id, info.num_workers, info.seed, type(info.dataset).__name__, torch.initial_seed()


def test_workers_know_who_they_are() -> None:
    dataset = Made(information, 8)
    batches = both(dataset, 1, num_workers=2, seeding="torch")
    assert {int(batch[0]) for batch in batches} == {0, 1}
    assert tud.get_worker_info() is None
    list(ps.DataLoader(Made(lambda i: tud.get_worker_info() is None), batch_size=2))


def test_the_information_holds_the_dataset_that_is_used() -> None:
    class Range(tud.IterableDataset[int]):
        first, last = 0, 20

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.first, self.last))

    def share(worker: int) -> None:
        info = tud.get_worker_info()
        assert info is not None
        assert info.id == worker
        info.dataset.first, info.dataset.last = 10 * worker, 10 * worker + 10  # type: ignore[attr-defined]

    batches = both(Range(), 4, num_workers=2, worker_init_fn=share)
    assert sorted(torch.cat(batches).tolist()) == list(range(20))


def test_the_start_function_is_called_once_in_each_worker(tmp_path: Any) -> None:
    def start(worker: int) -> None:
        with open(tmp_path / str(worker), "a") as file:
            file.write(f"{os.getpid()} {torch.initial_seed()}\n")

    loader = ps.DataLoader(Made(pids, 40), 4, num_workers=2, worker_init_fn=start, persistent_workers=True)
    while len({int(pid) for batch in loader for pid in batch}) < 2:
        """The first worker can be through with an epoch before the second has started."""
    for _ in range(2):
        list(loader)
    lines = [(tmp_path / str(worker)).read_text().splitlines() for worker in range(2)]
    assert [len(each) for each in lines] == [1, 1]
    (one, seed), (other, next_seed) = (each[0].split() for each in lines)
    assert one != other
    assert int(next_seed) == int(seed) + 1


def pids(_: Any) -> int:
    time.sleep(0.002)
    return os.getpid()


def test_persistent_workers_stay() -> None:
    loader = ps.DataLoader(Made(pids, 40), 2, num_workers=2, persistent_workers=True)
    epochs = [{int(pid) for batch in loader for pid in batch} for _ in range(4)]
    assert len(set.union(*epochs)) == 2
    assert os.getpid() not in set.union(*epochs)
    fresh = ps.DataLoader(Made(pids, 40), 2, num_workers=2)
    epochs = [{int(pid) for batch in fresh for pid in batch} for _ in range(2)]
    assert not epochs[0] & epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Squares(60), Shards(60, 60)], ids=["map", "stream"])
def test_breaking_off_and_beginning_again(dataset: Any, persistent: bool) -> None:
    taken = []
    for kind in (ps.DataLoader, tud.DataLoader):
        loader = kind(dataset, 2, num_workers=2, persistent_workers=persistent)
        taken.append([])
        for take in (3, 1, 200):
            for number, batch in enumerate(loader):
                taken[-1].append(batch)
                if number == take:
                    break
    same(*taken)


def test_two_iterators_at_once() -> None:
    taken = []
    for kind in (ps.DataLoader, tud.DataLoader):
        loader = kind(Squares(), 4, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(2))
        one, other = iter(loader), iter(loader)
        taken.append(list(zip(one, other, strict=True)))
    same(*taken)


def test_a_loader_inside_a_loader() -> None:
    def total(i: int) -> int:
        return int(sum(batch.sum() for batch in ps.DataLoader(list(range(i + 1)), 2, num_workers=1)))

    assert torch.cat(list(ps.DataLoader(Made(total, 4), 2, num_workers=2))).tolist() == [0, 1, 3, 6]


class Counted(tud.Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("how", [{}, {"seeding": "torch"}, {"in_order": False}], ids=str)
def test_no_more_is_drawn_ahead_than_asked_for(factor: int, how: dict[str, Any]) -> None:
    drawn = []
    for kind in (ps.DataLoader, tud.DataLoader):
        sampler = Counted(60)
        more = {key: value for key, value in how.items() if kind is ps.DataLoader or key != "seeding"}
        batches = iter(kind(Squares(60), 2, sampler=sampler, num_workers=2, prefetch_factor=factor, **more))
        drawn.append([sampler.drawn])
        for _ in range(20):
            next(batches)
            drawn[-1].append(sampler.drawn)
    assert drawn[0] == drawn[1]


def sluggish(i: int) -> int:
    time.sleep(0.4 if i == 0 else 0.001)
    return i


@pytest.mark.parametrize("seeding", ["sample", "torch"])
def test_out_of_order_a_slow_batch_does_not_hold_up_others(seeding: Any) -> None:
    loader = ps.DataLoader(Made(sluggish, 60), 2, num_workers=2, in_order=False, prefetch_factor=4, seeding=seeding)
    batches = [batch.tolist() for batch in loader]
    assert sorted(chain.from_iterable(batches)) == list(range(60))
    assert batches.index([0, 1]) > 10


def slow_shard() -> Iterator[Any]:
    info = tud.get_worker_info()
    assert info is not None
    for i in range(20):
        time.sleep(0.05 if info.id == 0 else 0.0)
        yield info.id, i


class Slow(tud.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return slow_shard()


def test_out_of_order_a_slow_stream_does_not_hold_up_others() -> None:
    order = [int(batch[0]) for batch in ps.DataLoader(Slow(), 1, num_workers=2, in_order=False)]
    assert sorted(order) == [0] * 20 + [1] * 20
    assert order[-3:] == [0, 0, 0]  # in turn, worker 1 would come last


# Arguments

BAD: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"shuffle": True, "sampler": [1]},
    {"batch_sampler": [[1]], "batch_size": 3},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": 1.5},
    {"drop_last": "yes"},
    {"multiprocessing_context": "spawn"},
    {"num_workers": 1, "multiprocessing_context": "thread"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"nonsense": 1},
]


@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_senseless_arguments_are_refused_in_torchs_words(arguments: dict[str, Any]) -> None:
    said = []
    for kind in (ps.DataLoader, tud.DataLoader):
        with pytest.raises(Exception) as caught:
            kind(Squares(), **arguments)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}], ids=str)
def test_streams_refuse_samplers(arguments: dict[str, Any]) -> None:
    said = []
    for kind in (ps.DataLoader, tud.DataLoader):
        with pytest.raises(ValueError, match="DataLoader with IterableDataset: expected") as caught:
            kind(Shards(3), **arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_errors_of_the_first_iteration_are_torchs() -> None:
    with pytest.raises(
        AssertionError, match=r"^prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
    ):
        iter(ps.DataLoader(Squares(), num_workers=1, prefetch_factor=0))  # torch's own fails once more in its __del__
    for kind in (ps.DataLoader, tud.DataLoader):
        with pytest.raises(AssertionError, match="requires timeout == 0"):
            iter(kind(Squares(), timeout=1))


def test_own_arguments_are_checked() -> None:
    with pytest.raises(ps.OptionError, match="seeding must be 'sample' or 'torch', not 'none'"):
        ps.DataLoader(Squares(), seeding="none")  # type: ignore[arg-type]
    with pytest.raises(ps.OptionError, match="persistent_workers"):
        ps.DataLoader(Squares()).stats()


def test_it_is_a_torch_loader() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader[Any](Squares(), 4, num_workers=2)
    assert isinstance(loader, tud.DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, 2, 2)
    for attribute in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{attribute} attribute should not be set after DataLoader is init"):
            setattr(loader, attribute, None)
    loader.num_workers = 1
    assert len(list(loader)) == 6


def test_pinning_without_an_accelerator_is_warned_of() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for kind in (ps.DataLoader, tud.DataLoader):
        for workers in (0, 1):
            with pytest.warns(UserWarning, match="no accelerator is found"):
                assert len(list(kind(Squares(), 4, pin_memory=True, num_workers=workers))) == 6


# Memory of batches


def floats(i: int) -> torch.Tensor:
    return torch.full((5000,), float(i))


@pytest.mark.parametrize("size", [4, 5000], ids=["messages", "slots"])
def test_batches_may_be_kept(size: int) -> None:
    dataset = Made(lambda i: torch.full((size,), float(i)), 120)
    kept = list(ps.DataLoader(dataset, 2, num_workers=2))
    gc.collect()
    for number, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2.0 * number, 2.0 * number + 1]
        assert bool((batch == batch[:, :1]).all())


@pytest.mark.parametrize("size", [4, 5000], ids=["messages", "slots"])
def test_batches_may_be_written_to(size: int) -> None:
    dataset = Made(lambda i: (torch.full((size,), float(i)), np.full(size, i)), 120)
    for number, (tensor, array) in enumerate(ps.DataLoader(dataset, 2, num_workers=2)):
        assert tensor[:, -1].tolist() == array[:, -1].tolist() == [2 * number, 2 * number + 1]
        tensor.fill_(-1.0)
        array.fill_(-1)


def test_a_part_of_a_batch_keeps_its_memory() -> None:
    rows = [batch[1:, ::7] for batch in ps.DataLoader(Made(floats, 100), 2, num_workers=2)]
    assert [float(row[0, 0]) for row in rows] == [2.0 * i + 1 for i in range(50)]


def test_arrays_of_custom_collations_may_be_written_to() -> None:
    loader = ps.DataLoader(Made(lambda i: np.full(20_000, i), 40), 2, num_workers=2, collate_fn=np.stack)
    for number, batch in enumerate(loader):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        batch[...] = -1


# Cut batches


def slow_floats(i: int) -> Any:
    time.sleep(0.004)
    return {"x": torch.full((3000,), float(i)), "i": i, "pair": (np.float32(i), [i % 2 == 0])}


def tiny_batches(loader: Any, least: int) -> list[Any]:
    """The batches; fails unless more tasks than batches were run, that is, unless some were cut."""
    batches = []
    iterator = iter(loader)
    for batch in iterator:
        batches.append(batch)
        rows = iterator.stats()["tiny_batch"]
    assert rows < least
    return batches


def test_slow_batches_are_cut_among_workers_and_stay_the_same() -> None:
    dataset = Made(slow_floats, 160)
    ours = tiny_batches(ps.DataLoader(dataset, 16, num_workers=2), 16)
    same(ours, list(tud.DataLoader(dataset, 16, num_workers=2)))


CUTS: dict[str, Callable[[int], Any]] = {
    "strings": lambda i: (torch.ones(3000), str(i)),
    "own mapping": lambda i: Bag(x=torch.ones(3000) * i),
    "extra fields": lambda i: {"x": torch.ones(3000) * i} | ({"late": i} if i % 16 > 9 else {}),
    "kinds": lambda i: (torch.ones(3000), i if i % 16 < 9 else i / 2),
    "bfloat16": lambda i: torch.ones(3000, dtype=torch.bfloat16) * i,
    "scalars": lambda i: (torch.ones(3000), torch.tensor(i), np.int16(i), Point(i, float(i))),
    "late strings": lambda i: (torch.ones(3000), i if i < 96 else str(i)),
    "growing": lambda i: torch.ones(1000 * (1 + i // 32)) * i,
}


@pytest.mark.parametrize("kind", CUTS)
def test_batches_that_cannot_be_cut_are_right_too(kind: str) -> None:
    def slow(i: int) -> Any:
        time.sleep(0.002)
        return CUTS[kind](i)

    both(Made(slow, 160), 16, num_workers=2)


def test_ragged_samples_are_refused_in_torchs_words() -> None:
    def ragged(i: int) -> Any:
        time.sleep(0.002)
        return torch.ones(3000 if i < 150 else 3000 + i % 2)

    loader = ps.DataLoader(Made(ragged, 160), 16, num_workers=2)
    with pytest.raises(RuntimeError) as ours:
        list(loader)
    with pytest.raises(RuntimeError) as theirs:
        list(tud.DataLoader(Made(ragged, 160), 16))
    assert str(theirs.value) in str(ours.value)


def test_batches_of_changing_size() -> None:
    def changing(batch: list[int]) -> Any:
        return torch.full((batch[0] * 997 % 50_000,), batch[0]), "x" * (batch[0] * 1999 % 90_000)

    both(list(range(60)), 1, num_workers=2, collate_fn=changing)


def test_random_contents_of_a_long_run() -> None:
    order = list(range(400))
    random.Random(0).shuffle(order)
    both(Squares(400), 7, sampler=order, num_workers=2)
