"""Samples that go into a batch's memory come out as tensors, whatever they are and however the batch was cut."""

from __future__ import annotations

import enum
import pickle
import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch import Collator, fixed_layout
from penstock.errors import GraphError, SampleError
from penstock.feed import assemble, assemble_rows
from penstock.graph import Batch, Field, Graph, Reader, Sample, Source, Spec
from penstock.layout import Layout
from penstock.work import Memory, Request, Result

Ragged = Literal["error", "pad", "list"]


@dataclass(frozen=True)
class Fields(Source):
    """A source that only says what its fields are."""

    fields: tuple[tuple[str, Field], ...]

    def __len__(self) -> int:
        return 100

    def open(self) -> Reader:
        raise NotImplementedError

    def spec(self) -> Spec:
        return dict(self.fields)

    def place(self, id: int) -> str:
        return f"row {id}"

    def fingerprint(self) -> str:
        return "fields"


class Slot(Memory):
    """A slot of a given size, full of what was there before."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.bytes = memoryview(bytearray(b"\xa5" * nbytes))
        self.own: memoryview | None = None

    def reserve(self, nbytes: int, whole: bool) -> memoryview | None:
        if nbytes <= len(self.bytes):
            return self.bytes[:nbytes]
        if whole:
            self.own = memoryview(bytearray(nbytes))
        return self.own


def graph_of(names: list[str], ragged: Ragged = "error", **known: Field) -> Graph:
    fields = tuple((name, known.get(name, Field("any"))) for name in names)
    return Graph(Fields(fields), (), Batch(8, ragged=ragged))


def request(rows: tuple[int, ...], total: int, whole: bool = True) -> Request:
    return Request(0, rows, total, whole, False, None)


def numbered(samples: list[Sample]) -> list[Sample]:
    return [{**sample, "id": i} for i, sample in enumerate(samples)]


def collate(samples: list[Sample], ragged: Ragged = "error", **known: Field) -> Any:
    """Through a slot and back, in one piece."""
    names = [name for name in samples[0] if name != "id"]
    slot = Slot()
    rows = list(range(len(samples)))
    collator = Collator(graph_of(names, ragged, **known))
    result = collator.store(samples, rows, request(tuple(rows), len(rows)), slot)
    return assemble([result], [slot.own or slot.bytes])


DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def array_of(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.random(shape) * 100).astype(dtype)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, tuple[str, Any]]:
    """Names to a kind of value: an array or tensor of a dtype and shape, a number, an object."""
    kinds = (
        st.tuples(st.just("array"), st.tuples(st.sampled_from(DTYPES), shapes))
        | st.tuples(st.just("tensor"), st.tuples(st.sampled_from([*DTYPES, "bfloat16"]), shapes))
        | st.tuples(st.sampled_from(["int", "float", "bool", "object"]), st.none())
    )
    return draw(st.dictionaries(st.sampled_from(["image", "label", "boxes", "a", "b"]), kinds, min_size=1))


def value_of(kind: str, argument: Any, seed: int) -> Any:
    rng = random.Random(seed)
    if kind == "array":
        return array_of(*argument, seed)
    if kind == "tensor":
        dtype, shape = argument
        if dtype == "bfloat16":
            return torch.from_numpy(array_of("float32", shape, seed)).bfloat16()
        return torch.from_numpy(array_of(dtype, shape, seed))
    return {"int": rng.randrange(-(2**63), 2**63), "float": rng.random(), "bool": rng.random() < 0.5}.get(
        kind, f"text {seed}"
    )


def expected_of(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, str):
        return values
    if isinstance(first, np.ndarray):
        stacked = torch.from_numpy(np.stack(values))
        return stacked.permute(0, 3, 1, 2) if name == "image" and first.ndim == 3 else stacked
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else None)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        equal = torch.equal(a.view(torch.uint16), b.view(torch.uint16)) if a.dtype == torch.bfloat16 else (a == b).all()
        return bool(a.dtype == b.dtype and a.shape == b.shape and equal)
    return bool(a == b)


@settings(max_examples=150, deadline=None)
@given(columns(), st.integers(1, 9), st.integers(0, 1000))
def test_what_goes_in_comes_out_from_any_cut_in_any_order_without_the_missing(
    kinds: dict[str, tuple[str, Any]], total: int, seed: int
) -> None:
    rng = random.Random(seed)
    samples = numbered([{n: value_of(*k, seed + 10 * row) for n, k in kinds.items()} for row in range(total)])
    present = [row for row in range(total) if rng.random() < 0.8] or [rng.randrange(total)]
    graph, slot, results = graph_of(list(kinds)), Slot(), []
    rows = list(range(total))
    rng.shuffle(rows)
    while rows:
        cut = sorted(rows.pop() for _ in range(rng.randint(1, len(rows))))
        here = [row for row in cut if row in present]
        part = request(tuple(cut), total, whole=len(cut) == total)
        results.append(pickle.loads(pickle.dumps(Collator(graph).store([samples[r] for r in here], here, part, slot))))
    layouts = {result.layout for result in results if result.layout is not None}
    assert len(layouts) == 1, "parts of one batch meet"
    batch = assemble(results, [slot.bytes] * len(results))
    assert list(batch) == [*kinds, "id"]
    assert batch["id"].tolist() == present
    for name in kinds:
        assert same(expected_of(name, [samples[row][name] for row in present]), batch[name]), name


def test_images_come_channels_last() -> None:
    image = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    batch = collate(numbered([{"image": image}, {"image": image + 1}]))
    assert batch["image"].shape == (2, 3, 4, 5)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(batch["image"][1].permute(1, 2, 0).numpy(), image + 1)


def test_what_the_pipeline_says_is_no_picture_keeps_its_axes() -> None:
    """Float arrays as images, channels first as their owner has them."""
    image = np.zeros((3, 4, 5), np.float32)
    known = Field("value", (3, 4, 5), "float32")
    assert collate(numbered([{"image": image}]), image=known)["image"].shape == (1, 3, 4, 5)
    graph = graph_of(["image"], image=known)
    layout = fixed_layout(graph, 1)
    assert layout is not None
    result = Collator(graph).store(numbered([{"image": image}]), [0], request((0,), 1), Slot())
    assert result.layout == layout.packed


def test_a_pipeline_that_knows_its_shapes_lays_out_as_its_workers_do() -> None:
    known = {"image": Field("image", (4, 5, 3), "uint8"), "label": Field("value", (), "int64")}
    graph = graph_of(["image", "label"], **known)
    layout = fixed_layout(graph, 3)
    assert layout is not None
    samples = numbered([{"image": np.zeros((4, 5, 3), np.uint8), "label": row} for row in range(3)])
    slot = Slot()
    result = Collator(graph).store(samples[1:2], [1], request((1,), 3, whole=False), slot)
    assert result.layout == layout.packed
    assert result.nbytes == layout.nbytes
    empty = fixed_layout(graph, 0)
    assert empty is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in assemble_rows(empty, None).items()}
    assert shapes == {"image": (0, 3, 4, 5), "label": (0,), "id": (0,)}


def test_no_layout_beforehand_where_one_field_is_unknown() -> None:
    assert fixed_layout(graph_of(["image"], image=Field("image", (None, 5, 3), "uint8")), 4) is None
    assert fixed_layout(graph_of(["a"], a=Field("value", (2,), "datetime64[s]")), 4) is None


def test_numbers_and_what_is_not_one() -> None:
    class Colour(enum.IntEnum):
        RED = 1

    sample = {
        "int": -(2**63),
        "big": 2**63,
        "float": 0.1,
        "bool": True,
        "float32": np.float32(0.5),
        "uint64": np.uint64(2**64 - 1),
        "big_endian": np.array([1, 2], ">i4"),
        "time": np.datetime64("2020-01-01"),
        "words": np.array(["a", "bc"]),
        "none": None,
        "sparse": torch.eye(2).to_sparse(),
        "text": "text",
    }
    batch = collate(numbered([sample, sample]))
    assert batch["int"].tolist() == [-(2**63)] * 2
    assert batch["big"] == [2**63] * 2
    assert batch["float"].dtype == torch.float64
    assert batch["bool"].dtype == torch.bool
    assert batch["float32"].dtype == torch.float32
    assert batch["uint64"].tolist() == [2**64 - 1] * 2
    assert batch["big_endian"].tolist() == [[1, 2]] * 2
    assert batch["time"] == [np.datetime64("2020-01-01")] * 2
    assert batch["words"][1].tolist() == ["a", "bc"]
    assert batch["none"] == [None, None]
    assert torch.equal(batch["sparse"][0].to_dense(), torch.eye(2))
    assert batch["text"] == ["text", "text"]


def test_tensors_of_every_make() -> None:
    base = torch.arange(6.0).view(2, 3)
    tensors = {
        "gradient": base.clone().requires_grad_(),
        "transposed": base.t(),
        "bfloat16": base.bfloat16().t(),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "conjugate": torch.view_as_complex(base.view(3, 2)).conj(),
    }
    batch = collate(numbered([tensors]))
    for name, tensor in tensors.items():
        assert torch.equal(batch[name][0], tensor.detach()), name
        assert not batch[name].requires_grad


def test_the_order_of_fields_need_not_be_the_same() -> None:
    batch = collate([{"a": 1, "b": 2.0, "id": 0}, {"b": 3.0, "a": 4, "id": 1}])
    assert batch["a"].tolist() == [1, 4]
    assert batch["b"].tolist() == [2.0, 3.0]


def ragged_samples() -> list[Sample]:
    return numbered(
        [
            {"image": np.full((2, 3, 3), 1, np.uint8), "label": 7},
            {"image": np.full((4, 1, 3), 2, np.uint8), "label": 8},
        ]
    )


def test_padding_keeps_each_shape() -> None:
    batch = collate(ragged_samples(), "pad")
    assert batch["image"].shape == (2, 3, 4, 3)
    assert batch["image_shape"].tolist() == [[2, 3, 3], [4, 1, 3]]
    assert batch["image"][0].sum() == 2 * 3 * 3
    assert batch["image"][1].sum() == 2 * 4 * 3
    assert batch["image"][1, :, :, 1:].sum() == 0
    assert batch["label"].tolist() == [7, 8]
    tensors = [torch.ones(2).bfloat16(), torch.ones(3).bfloat16()]
    assert collate(numbered([{"a": t} for t in tensors]), "pad")["a"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_lists_hold_each_sample_as_it_is() -> None:
    batch = collate(ragged_samples(), "list")
    assert [tuple(image.shape) for image in batch["image"]] == [(3, 2, 3), (3, 4, 1)]
    assert [int(image.max()) for image in batch["image"]] == [1, 2]
    assert batch["label"].tolist() == [7, 8]
    mixed = numbered([{"a": np.zeros(2, np.float32)}, {"a": np.ones((1, 2), np.int64)}])
    assert [(a.dtype, tuple(a.shape)) for a in collate(mixed, "list")["a"]] == [
        (torch.float32, (2,)),
        (torch.int64, (1, 2)),
    ]


def test_lists_without_the_missing() -> None:
    samples = ragged_samples()
    slot = Slot()
    result = Collator(graph_of(["image", "label"], "list")).store(samples, [0, 2], request((0, 1, 2), 3), slot)
    batch = assemble([result], [slot.bytes])
    assert [int(image.max()) for image in batch["image"]] == [1, 2]
    assert batch["label"].tolist() == [7, 8]


@pytest.mark.parametrize("ragged", ["error", "list"])
def test_numbers_are_never_cut_to_the_first_samples_type(ragged: Ragged) -> None:
    samples = [{"a": np.zeros(2), "label": 1}, {"a": np.zeros(2), "label": 2.5}]
    with pytest.raises(SampleError, match=r"sample 1: field 'label' is float64\[\] but int64\[\] in sample 0 .* type"):
        collate(numbered(samples), ragged)


@pytest.mark.parametrize("ragged", ["error", "pad", "list"])
@pytest.mark.parametrize("other", ["text", 5, 2**70])
def test_a_field_of_two_kinds_is_an_error(ragged: Ragged, other: Any) -> None:
    with pytest.raises(SampleError, match=r"sample 1: field 'a' .* in sample 0 .* same type"):
        collate(numbered([{"a": np.zeros(2)}, {"a": other}]), ragged)
    with pytest.raises(SampleError, match=r"sample 1: field 'a' .* in sample 0 .* same type"):
        collate(numbered([{"a": other}, {"a": np.zeros(2)}]), ragged)


@pytest.mark.parametrize("ragged", ["error", "pad", "list"])
def test_a_missing_field_is_an_error(ragged: Ragged) -> None:
    with pytest.raises(GraphError, match=r"samples 0 and 1 differ in their fields \(b\)"):
        collate(numbered([{"a": 1, "b": np.zeros(2)}, {"a": 1}]), ragged)
    with pytest.raises(GraphError, match=r"samples 0 and 1 differ in their fields \(b\)"):
        collate(numbered([{"a": 1}, {"a": 1, "b": np.zeros(2)}]), ragged)


def test_unequal_shapes_name_both_samples_the_field_and_the_remedy() -> None:
    samples = [{"image": np.zeros((2, 3, 3), np.uint8), "id": 31}, {"image": np.zeros((4, 1, 3), np.uint8), "id": 7}]
    with pytest.raises(SampleError) as caught:
        collate(samples)
    assert str(caught.value) == (
        "batch failed on sample 7: field 'image' is uint8[4, 1, 3] but uint8[2, 3, 3] in sample 31 of the same batch; "
        "resize or crop to one size, or use batch(..., ragged='pad') or ragged='list'"
    )
    assert caught.value.id == 7


def test_padding_needs_equal_dimensions() -> None:
    with pytest.raises(SampleError, match="not in their number of dimensions"):
        collate(numbered([{"a": np.zeros(2)}, {"a": np.zeros((2, 2))}]), "pad")


def test_objects_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(GraphError, match=r"'odd' \(function\) must be pickled"):
        collate(numbered([{"odd": lambda: None}]))


def test_parts_that_do_not_fit_are_refused_and_say_how_much_they_need() -> None:
    graph = graph_of(["a"])
    samples = numbered([{"a": np.zeros(1000)}, {"a": np.zeros(1000)}])
    refused = Collator(graph).store(samples[:1], [0], request((0,), 2, whole=False), Slot(64))
    assert refused.refused
    assert refused.nbytes >= 16_000
    slot = Slot(64)
    whole = Collator(graph).store(samples, [0, 1], request((0, 1), 2), slot)
    assert assemble([whole], [slot.own])["a"].shape == (2, 1000)
    uneven = numbered([{"a": np.zeros(1)}, {"a": np.zeros(2)}])
    assert Collator(graph).store(uneven, [0, 1], request((0, 1), 3, whole=False), Slot()).refused


def test_a_batch_without_a_sample() -> None:
    result = Collator(graph_of(["a"])).store([], [], request((0, 1), 2), Slot())
    assert result == Result(missing=(0, 1))
    assert assemble([result], [None]) is None


def test_layouts_are_kept_within_bounds() -> None:
    collator = Collator(graph_of(["a"]))
    for size in range(200):
        result = collator.store(numbered([{"a": np.zeros(size)}]), [0], request((0,), 1), Slot())
        assert result.layout is not None
        assert Layout.unpack(result.layout).columns[0].shape == (size,)
    assert len(collator._known) <= 64
