"""The pipeline's description: frozen, checked where it is written, told apart by what it does."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import GraphError
from penstock.graph import Field, Graph, Operator, Reader, Sample, Source, Spec, Units
from penstock.identity import identity
from penstock.pipe import Pipe


@dataclass(frozen=True)
class Stored(Source):
    """A source of whatever fields."""

    name: str = "image"

    def __len__(self) -> int:
        return 10

    def open(self) -> Reader:
        raise NotImplementedError

    def spec(self) -> Spec:
        return {self.name: Field("encoded"), "label": Field("value", (), "int64")}

    def place(self, id: int) -> str:
        return f"row {id}"

    def fingerprint(self) -> str:
        return f"stored {self.name}"


@dataclass(frozen=True)
class Named(Operator):
    """An operator of a user's own, with one argument of any kind."""

    argument: Any = None

    @property
    def name(self) -> str:
        return "named"

    def check(self, spec: Spec) -> Spec:
        return {**spec, "named": Field("any")}

    def apply(self, sample: Sample, units: Units) -> Sample:
        return sample


def images() -> Pipe:
    return ps.source(Stored())


def sounds() -> Pipe:
    return ps.source(Stored(name="audio"))


def test_a_pipe_is_never_changed() -> None:
    pipe = images()
    longer = pipe.decode().resize(8).batch(4)
    assert pipe.graph.operators == ()
    assert len(longer.graph.operators) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipe.graph = longer.graph  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        longer.graph.batch = None  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        longer.graph.operators[0].mode = "L"  # type: ignore[attr-defined]


def test_the_fields_are_known_after_every_step() -> None:
    graph = images().decode().resize((6, 8)).normalize((0.5,) * 3, (0.5,) * 3).graph
    assert [spec["image"].kind for spec in graph.specs] == ["encoded", "image", "image", "image"]
    assert graph.spec["image"] == Field("image", (6, 8, 3), "float32")
    assert graph.spec["label"] == Field("value", (), "int64")
    assert Graph(Stored(), (Named(),)).spec["named"] == Field("any")


MISUSES: dict[str, tuple[Callable[[], object], str]] = {
    "pixels of bytes": (lambda: images().resize(8), r"put .decode\(\) before it"),
    "decoding twice": (lambda: images().decode().decode(), "decode"),
    "nothing to decode": (lambda: ps.arrays(label=[1, 2]).decode(), "image"),
    "pixels after normalize": (
        lambda: images().decode().normalize((0.5,) * 3, (0.5,) * 3).flip(),
        r"before .normalize\(\)",
    ),
    "normalize twice": (lambda: images().decode().normalize((0,), (1,)).normalize((0,), (1,)), "normalize"),
    "sound of pictures": (lambda: images().resample(8000), "audio"),
    "sound of bytes": (lambda: sounds().resample(8000), r"decode_audio\(\)"),
    "mel of nothing": (lambda: images().mel(), "audio"),
    "operator after batch": (lambda: images().batch(4).decode(), "put batch last"),
    "map after batch": (lambda: images().batch(4).map(len), "put batch last"),
    "batch twice": (lambda: images().batch(4).batch(4), "twice"),
    "empty batch": (lambda: images().batch(0), "at least 1, not 0"),
    "half a batch": (lambda: images().batch(1.5), "whole number"),  # type: ignore[arg-type]
    "a true batch": (lambda: images().batch(True), "whole number"),
    "unknown raggedness": (lambda: images().batch(4, ragged="crop"), "'error', 'pad' or 'list'"),  # type: ignore[arg-type]
    "odd drop_last": (lambda: images().batch(4, drop_last="yes"), "True or False"),  # type: ignore[arg-type]
    "map of no function": (lambda: images().map(5), "expected a function, not int"),  # type: ignore[arg-type]
    "map of no field": (lambda: images().map(len, "caption"), "no field 'caption'; they have image, label"),
    "size zero": (lambda: images().decode().resize(0), "resize"),
    "crop of text": (lambda: images().decode().center_crop("8"), "crop"),  # type: ignore[arg-type]
    "unlikely flip": (lambda: images().decode().flip(2.0), "flip"),
    "scale reversed": (lambda: images().decode().random_resized_crop(8, scale=(1.0, 0.1)), "scale"),
    "unknown policy": (lambda: images().decode().auto_augment("mnist"), "imagenet"),  # type: ignore[arg-type]
    "no magnitude": (lambda: images().decode().rand_augment(m=99), "m"),
    "negative cutout": (lambda: images().decode().cutout(-1), "cutout"),
    "no rate": (lambda: sounds().decode_audio().resample(0), "resample"),
    "no dataset": (lambda: ps.dataset(5), "map-style dataset"),
    "arrays of unequal length": (lambda: ps.arrays(a=[1], b=[1, 2]), "lengths"),
    "a loader without batch": (lambda: ps.Loader(images().decode()), r"end it with .batch\(size\)"),
    "a loader of a list": (lambda: ps.Loader([1, 2]), "Loader takes a pipe"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_where_it_is_written_with_a_remedy(misuse: str) -> None:
    write, remedy = MISUSES[misuse]
    with pytest.raises(GraphError, match=remedy):
        write()


def test_the_chain_has_every_step_that_users_were_promised() -> None:
    promised = [
        "decode",
        "resize",
        "center_crop",
        "random_crop",
        "random_resized_crop",
        "flip",
        "color_jitter",
        "rand_augment",
        "auto_augment",
        "trivial_augment",
        "deep_auto_augment",
        "cutout",
        "normalize",
        "map",
        "batch",
        "decode_audio",
        "resample",
        "crop_or_pad",
        "add_noise",
        "spectrogram",
        "mel",
    ]
    for name in promised:
        method = inspect.getattr_static(Pipe, name)
        assert inspect.isfunction(method), name
        assert inspect.getdoc(method), name


def test_rewriting_is_a_list_of_passes() -> None:
    graph = images().decode().graph

    def drop(graph: Graph) -> Graph:
        return dataclasses.replace(graph, operators=())

    def add(graph: Graph) -> Graph:
        return graph.then(Named())

    assert [operator.name for operator in graph.rewritten([drop, add]).operators] == ["named"]
    assert [operator.name for operator in graph.rewritten([add, drop]).operators] == []
    assert graph.rewritten([]) is graph


def test_a_graph_is_clean_unless_a_part_of_it_is_not() -> None:
    assert images().decode().graph.clean
    assert not images().map(len).graph.clean
    assert not ps.dataset([(1, 2)]).graph.clean


def test_units_are_counted() -> None:
    graph = images().decode().random_resized_crop(8).flip().graph
    assert graph.units == sum(operator.units for operator in graph.operators) > 1


# ---- fingerprints


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, value: Any) -> Any:
        return value

    def add(self, value: Any) -> Any:
        return value


def adding(amount: int, kind: str = "closure") -> Callable[[Any], Any]:
    if kind == "default":
        return lambda value, by=amount: value + by
    if kind == "keyword":
        return lambda value, *, by=amount: value + by
    return lambda value: value + amount


def power(base: int, exponent: int) -> int:
    return int(base**exponent)


VARIANTS: list[list[Any]] = [
    [1, 2, 1.0, True, "1", b"1", None, (1,), [1], {"1": 1}, {1}, 1j, Level.LOW, Level.HIGH],
    [lambda x: x + 1, lambda x: x - 1, lambda x: x + 2, lambda x: x.real, lambda x: x.imag],
    [adding(1), adding(2), adding(1, "default"), adding(2, "default"), adding(1, "keyword"), adding(2, "keyword")],
    [functools.partial(power, exponent=2), functools.partial(power, exponent=3), functools.partial(power, 2), power],
    [Adder(1), Adder(2), Adder(1).add, Adder(2).add, Adder],
    [np.arange(3), np.arange(3.0), np.arange(4), np.arange(3)[None], np.array([0, 1, 3]), np.int64(3), np.sqrt, np.exp],
    [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": {"b": 1}}, ("a", ("b", 1)), frozenset("ab"), frozenset("ac")],
    [len, sorted, str.upper, str.lower, dict],
    [list(range(5000)), list(range(5001)), np.zeros(10**6), np.zeros(10**6 + 1)],
    [lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)],
    [lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}],
]


@pytest.mark.parametrize("values", VARIANTS)
def test_what_acts_differently_has_another_identity(values: list[Any]) -> None:
    assert len({identity(value) for value in values}) == len(values)


def test_what_is_written_alike_has_the_same_identity() -> None:
    assert identity(adding(3)) == identity(adding(3))
    assert identity(Adder(3)) == identity(Adder(3))
    assert identity({"a": 1, "b": 2}) == identity({"b": 2, "a": 1})
    itself: list[Any] = [1]
    itself.append(itself)
    assert identity(itself) == identity(itself)

    def recursive(n: int) -> int:
        return n and recursive(n - 1)

    assert identity(recursive) == identity(recursive)


SCRIPT = """
import sys
import penstock as ps

def shout(value):
    return value + ("!" if value in {"alpha", "beta", "gamma"} else "?")

suffix = lambda value: value
pipe = ps.arrays(word=[1, 2, 3], image=[[[[1, 2, 3]]]] * 3).map(shout, "word").map(lambda value: suffix(value), "word")
print(pipe.batch(int(sys.argv[1])).graph.fingerprint())
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    """Hashes of strings differ between processes, and with them the order of sets."""
    prints = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, size],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, size in (("1", "2"), ("2", "2"), ("3", "3"))
    }
    assert len(prints) == 1, "neither the process nor the batch size counts"


OTHERS: dict[str, Callable[[Pipe], Pipe]] = {
    "nothing": lambda pipe: pipe,
    "decode": lambda pipe: pipe.decode(),
    "gray": lambda pipe: pipe.decode("L"),
    "no exif": lambda pipe: pipe.decode(exif=False),
    "resize": lambda pipe: pipe.decode().resize(8),
    "resize to 9": lambda pipe: pipe.decode().resize(9),
    "resize bicubic": lambda pipe: pipe.decode().resize(8, "bicubic"),
    "resize at most": lambda pipe: pipe.decode().resize(8, max_size=20),
    "resize, flip": lambda pipe: pipe.decode().resize(8).flip(),
    "flip, resize": lambda pipe: pipe.decode().flip().resize(8),
    "flip rarely": lambda pipe: pipe.decode().flip(0.1).resize(8),
    "crop": lambda pipe: pipe.decode().random_resized_crop(8),
    "crop little": lambda pipe: pipe.decode().random_resized_crop(8, scale=(0.5, 1)),
    "map": lambda pipe: pipe.map(lambda sample: sample),
    "map field": lambda pipe: pipe.map(lambda sample: sample, "label"),
    "map other": lambda pipe: pipe.map(lambda sample: {**sample}),
    "named": lambda pipe: pipe.then(Named()),
    "named 5": lambda pipe: pipe.then(Named(5)),
}


def test_fingerprints_tell_pipelines_apart() -> None:
    prints = {name: make(images()).graph.fingerprint() for name, make in OTHERS.items()}
    assert len(set(prints.values())) == len(OTHERS)
    assert sounds().graph.fingerprint() != images().graph.fingerprint()


def test_fingerprints_leave_out_the_batch() -> None:
    pipe = images().decode()
    assert pipe.batch(4).graph.fingerprint() == pipe.batch(8, drop_last=True).graph.fingerprint()


def test_fingerprints_stay_when_a_users_object_changes_in_use() -> None:
    adder = Adder(1)
    graph = images().map(adder).graph
    before = graph.fingerprint()
    adder.amount = 2
    assert graph.fingerprint() == before
