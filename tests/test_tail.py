"""Head and tail of a pipeline give the batches of the whole: same draws, same refusals, same values."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_device import DEVICE, MARKS

# isort: split

import penstock as ps
from penstock.audio import AddNoise, CropOrPad, Mel, Spectrogram
from penstock.augment import Normalize
from penstock.errors import MissingExtraError, SampleError
from penstock.graph import Field, Graph, Operator, Reader, Sample, Source, Spec, Units
from penstock.kernels import native
from penstock.order import Order
from penstock.pipe import Pipe
from penstock.tail import Gate, OpenTail, Tail, _Levels, _Tables, split

pytestmark = MARKS

Batch = dict[str, Any]
NO_DRAWS = np.empty((0, 0))


def clips(rows: int, channels: int = 1, length: int = 300) -> Any:
    return np.random.default_rng(3).uniform(-1, 1, (rows, channels, length)).astype(np.float32)


def photos(rows: int, channels: int = 3, size: tuple[int, int] = (9, 7)) -> Any:
    return np.random.default_rng(4).integers(0, 256, (rows, *size, channels), dtype=np.uint8)


def cut(pipe: Pipe) -> tuple[Pipe, Tail]:
    head, tail = split(pipe.graph)
    assert tail is not None
    return Pipe(head), tail


def on_device(batch: Batch) -> Batch:
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def pairs(pipe: Pipe, epoch: int = 0, **options: Any) -> Iterator[tuple[Batch, Batch]]:
    """Batches of the whole pipeline, and of head and tail."""
    head, tail = cut(pipe)
    size = pipe.graph.batch.size if pipe.graph.batch else 0
    opened = tail.open(DEVICE, size)
    order = Order(len(pipe.graph.source), size, rank=options.get("rank", 0), world_size=options.get("world_size", 1))
    with ps.Loader(pipe, workers=0, **options) as whole, ps.Loader(head, workers=0, **options) as front:
        whole.set_epoch(epoch)
        front.set_epoch(epoch)
        for expected, batch, step in zip(whole, front, order.steps(), strict=True):
            positions = range(step.first, step.first + step.rows)
            yield expected, opened.apply(on_device(batch), tail.draw(options.get("seed", 0), epoch, positions))


def same(found: Batch, expected: Batch, log: bool = False) -> None:
    """The fields in their order, and what tail.py promises of their values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        other = found[name].cpu()
        assert (other.dtype, other.shape, other.stride()) == (value.dtype, value.shape, value.stride())
        if name != "audio":
            assert torch.equal(other, value)
        elif log:
            torch.testing.assert_close(other, value, rtol=0, atol=4e-6)
        else:
            torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-12 * float(value.abs().max()))


# The law.

SOUND = st.one_of(
    st.none(),
    st.builds(
        Spectrogram,
        n_fft=st.integers(2, 41),
        hop_length=st.integers(3, 50) | st.none(),
        power=st.sampled_from([1.0, 2.0, 0.7]),
        normalized=st.sampled_from([True, False, "frame_length"]),
        center=st.booleans(),
        pad_mode=st.sampled_from(["reflect", "constant", "replicate", "circular"]),
    ),
    st.builds(Mel, st.just(8000), n_fft=st.integers(4, 60), n_mels=st.integers(1, 6), log=st.booleans()),
)


@st.composite
def pipes(draw: st.DrawFn) -> Pipe:
    """Clips of one length, cut or not, with noise or not, as they are or transformed, after other draws or not."""
    pipe = ps.arrays(audio=clips(draw(st.integers(1, 7)), draw(st.integers(1, 2)), draw(st.integers(61, 90))))
    operators: list[Operator] = []
    if draw(st.booleans()):
        operators.append(CropOrPad(60))
    operators += [AddNoise((low, low + 20.0)) for low in draw(st.lists(st.floats(-10, 20), max_size=2))]
    last = draw(SOUND)
    if last is None and not any(isinstance(operator, AddNoise) for operator in operators):
        operators.append(AddNoise((0, 0)))
    for operator in operators + ([] if last is None else [last]):
        pipe = pipe.then(operator)
    return pipe.batch(draw(st.integers(1, 4)))


@settings(deadline=None, max_examples=15)
@given(pipes(), st.integers(-(2**63), 2**63), st.integers(0, 2**32 - 1), st.booleans())
def test_head_and_tail_give_the_batches_of_the_whole(pipe: Pipe, seed: int, epoch: int, shuffle: bool) -> None:
    last = pipe.graph.operators[-1]
    for expected, found in pairs(pipe, epoch, seed=seed, shuffle=shuffle):
        same(found, expected, isinstance(last, Mel) and last.log)


def test_every_rank_and_epoch_has_its_own_draws() -> None:
    pipe = ps.arrays(audio=np.ones((13, 1, 99), np.float32)).add_noise((0, 20)).batch(3)
    noises: list[bytes] = []
    for epoch in (0, 1):
        for rank in (0, 1):
            for expected, found in pairs(pipe, epoch, seed=5, rank=rank, world_size=2):
                same(found, expected)
                noises += [clip.numpy().tobytes() for clip in found["audio"].cpu()]
    assert len(set(noises)) == len(noises) == 2 * 13


@pytest.mark.parametrize(("channels", "mean"), [(3, (0.485, 0.456, 0.406)), (1, (0.5,))])
@pytest.mark.parametrize("rows", [1, 5])
def test_images_are_normalized_bit_for_bit(channels: int, mean: tuple[float, ...], rows: int) -> None:
    std = (0.229, 0.224, 0.225)[:channels]
    pipe = ps.arrays(image=photos(rows, channels), label=np.arange(rows)).flip().normalize(mean, std).batch(2)
    for expected, found in pairs(pipe, seed=2):
        same(found, expected)


def test_every_level_is_normalized_bit_for_bit() -> None:
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), 3, axis=3)
    pipe = ps.arrays(image=ramp).normalize((0.1, 1.5, -0.25), (0.3, 1e-3, 7.0)).batch(1)
    ((expected, found),) = pairs(pipe)
    same(found, expected)


@pytest.mark.parametrize("size", [(1, 1), (9, 7), (40, 64)])
def test_tables_normalize_as_products_and_sums_do(size: tuple[int, int]) -> None:
    """Whole batches, parts of them, none, and images whose memory is not dense."""
    operator, device = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), torch.device(DEVICE)
    tables, levels = _Tables(operator, 6, device), _Levels(operator, device)
    images = torch.from_numpy(photos(6, 3, size)).to(device).movedim(-1, 1)
    for some in (images, images[:2], images[:0], images[[4, 1, 5]], images[1::2], images.contiguous()):
        one, other = tables(some, NO_DRAWS), levels(some.contiguous(memory_format=torch.channels_last), NO_DRAWS)
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
        assert one.movedim(1, -1).is_contiguous(), "channels are last in memory"


def test_images_and_sound_of_one_sample_have_one_tail() -> None:
    pipe = ps.arrays(image=photos(5), audio=clips(5)).flip().add_noise((5, 9)).normalize((0.5,) * 3, (0.5,) * 3)
    pipe = pipe.add_noise((0, 3)).spectrogram(n_fft=32).batch(2)
    _, tail = cut(pipe)
    assert [gate.name for gate in tail.gates] == ["add_noise", "normalize", "add_noise", "spectrogram"]
    assert (tail.first_unit, tail.units) == (1, 4)
    for expected, found in pairs(pipe, seed=9):
        same(found, expected)


@given(
    st.integers(0, 7),
    st.integers(-(2**63), 2**64),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**62), max_size=5),
)
def test_the_draws_are_the_last_of_the_whole_pipeline(first: int, seed: int, epoch: int, positions: list[int]) -> None:
    noise = Gate(AddNoise((0, 1)), Field("audio", (1, 5), "float32"))
    drawn = Tail((noise, noise), first).draw(seed, epoch, positions)
    assert drawn.shape == (len(positions), 4)
    assert drawn.tolist() == [row[first:] for row in native.units(seed, epoch, 0, positions, first + 4)]


# Where the cut is.


class Varying(Source):
    """Clips and images of sizes that are not known beforehand, beside a clip whose size is."""

    def __len__(self) -> int:
        return 3

    def open(self) -> Reader:
        raise NotImplementedError

    def spec(self) -> Spec:
        return {
            "audio": Field("audio", (1, None), "float32"),
            "image": Field("image", (None, None, 3), "uint8"),
        }

    def place(self, id: int) -> str:
        return "nowhere"

    def fingerprint(self) -> str:
        return "varying"


class Louder(AddNoise):
    """Derived from an operator that a device can apply, and different."""


NOISE, MEL, CROP = AddNoise((0, 10)), Mel(n_fft=64, n_mels=4), CropOrPad(200)
NORMALIZE = Normalize((0.5,) * 3, (0.5,) * 3)


def names(graph: Graph) -> tuple[list[str], list[str]]:
    head, tail = split(graph)
    gates = [] if tail is None else [gate.name for gate in tail.gates]
    assert [operator.name for operator in head.operators] == [operator.name for operator in graph.operators]
    assert head.units == sum(o.units for o in graph.operators[: len(graph.operators) - len(gates)])
    kept = len(head.operators) - len(gates)
    assert all(isinstance(operator, Gate) == (i >= kept) for i, operator in enumerate(head.operators))
    return [operator.name for operator in head.operators[:kept]], gates


def test_the_longest_run_of_last_operators_is_cut_off() -> None:
    source = ps.arrays(audio=clips(3), image=photos(3), label=np.arange(3)).graph.source
    chains: list[tuple[tuple[Operator, ...], list[str]]] = [
        ((), []),
        ((CROP,), []),
        ((NOISE, CROP), []),
        ((NOISE, CROP, MEL), ["mel"]),
        ((CROP, NOISE, MEL, NORMALIZE), ["add_noise", "mel", "normalize"]),
        ((NOISE, Louder((0, 1)), MEL), ["mel"]),
        ((NOISE, Louder((0, 1))), []),
    ]
    for operators, expected in chains:
        assert names(Graph(source, operators))[1] == expected


def test_what_a_function_of_the_users_may_change_stays_in_the_head() -> None:
    pipe = ps.arrays(audio=clips(3), label=np.arange(3))
    assert names(pipe.add_noise((0, 1)).map(dict).graph) == (["add_noise", "map(dict)"], [])
    assert names(pipe.map(dict).add_noise((0, 1)).graph) == (["map(dict)", "add_noise"], [])
    assert names(pipe.map(abs, "audio").add_noise((0, 1)).graph) == (["map(abs)", "add_noise"], [])
    assert names(pipe.map(abs, "label").add_noise((0, 1)).graph) == (["map(abs)"], ["add_noise"])


def test_samples_of_different_sizes_stay_in_the_head() -> None:
    assert names(Graph(Varying(), (NOISE, NORMALIZE, MEL)))[1] == []
    assert names(Graph(Varying(), (NOISE, CROP, NORMALIZE, MEL)))[1] == ["mel"]


def test_without_a_tail_the_graph_is_the_same() -> None:
    graph = ps.arrays(audio=clips(3)).crop_or_pad(9).graph
    assert split(graph) == (graph, None)
    assert split(graph)[0] is graph


def test_the_head_keeps_source_and_batch_and_says_what_it_gives() -> None:
    graph = ps.arrays(image=photos(3)).normalize((0.5,) * 3, (0.5,) * 3).batch(2).graph
    head, _ = split(graph)
    assert (head.source, head.batch) == (graph.source, graph.batch)
    assert (head.spec["image"].dtype, graph.spec["image"].dtype) == ("uint8", "float32")


def test_a_head_travels_to_workers_that_do_without_torch() -> None:
    head, tail = split(Graph(Varying(), (CROP, NOISE, MEL)))
    assert pickle.loads(pickle.dumps(tail)) == tail
    gates = head.operators[1:]
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(gates), check=True)


# Refusals.


def test_a_sample_of_another_rate_is_refused_under_the_operators_name() -> None:
    rates = np.array([8000, 8000, 44100, 8000, 8000])
    pipe = ps.arrays(audio=clips(5), rate=rates).add_noise((0, 9)).mel(8000, n_fft=64, n_mels=4).batch(5)
    head, _ = cut(pipe)
    for each in (pipe, head):
        with ps.Loader(each, workers=0, shuffle=False) as loader, pytest.raises(SampleError) as caught:
            next(iter(loader))
        assert caught.value.operator == "mel"
        assert "expected 8000 samples per second, found 44100" in caught.value.reason


def test_rows_that_were_skipped_leave_the_others_their_draws() -> None:
    rates = np.array([8000, 44100, 8000, 44100, 8000])
    pipe = ps.arrays(audio=clips(5), rate=rates).add_noise((0, 9)).mel(8000, n_fft=64, n_mels=4).batch(5)
    head, tail = cut(pipe)
    options: Any = {"workers": 0, "shuffle": False, "seed": 4, "on_error": "skip"}
    with ps.Loader(pipe, **options) as whole, ps.Loader(head, **options) as front:
        (expected,), (batch,) = list(whole), list(front)
    assert expected["id"].tolist() == [0, 2, 4]
    same(tail.open(DEVICE, 5).apply(on_device(batch), tail.draw(4, 0, [0, 2, 4])), expected)


def test_a_batch_whose_rows_were_all_skipped_keeps_its_shape() -> None:
    pipe = ps.arrays(audio=clips(2), image=photos(2)).add_noise((0, 9)).mel(n_fft=64, n_mels=4)
    head, tail = cut(pipe.normalize((0.5,) * 3, (0.5,) * 3))
    empty = {"audio": torch.empty(0, 1, 300), "image": torch.empty(0, 9, 7, 3, dtype=torch.uint8).movedim(-1, 1)}
    out = tail.open(DEVICE, 2).apply(on_device(empty), tail.draw(0, 0, []))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in out.items()} == {
        "audio": (torch.float32, (0, 1, 4, 10)),
        "image": (torch.float32, (0, 3, 9, 7)),
    }
    assert head.graph.units == 0


def test_a_gate_refuses_what_is_not_as_promised() -> None:
    gate = Gate(NOISE, Field("audio", (1, 5), "float32"))
    wrong: list[Any] = [np.zeros((1, 6), np.float32), np.zeros((1, 5)), np.zeros(5, np.float32), torch.zeros(1, 5)]
    for value in wrong:
        with pytest.raises(ValueError, match=r"add_noise expects audio as the pipeline says, float32\[1, 5\], not"):
            gate.apply({"audio": value}, ())
    sample: Sample = {"audio": np.zeros((1, 5), np.float32)}
    assert gate.apply(sample, ()) is sample


@pytest.fixture(scope="module")
def opened() -> OpenTail:
    return cut(ps.arrays(audio=clips(3), image=photos(3)).add_noise((0, 9)).normalize((0.5,) * 3, (0.5,) * 3))[1].open(
        DEVICE, 3
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", torch.zeros(3, 1, 299)),
        ("audio", torch.zeros(3, 2, 300)),
        ("audio", torch.zeros(3, 1, 300, dtype=torch.float64)),
        ("audio", torch.zeros(3, 1, 300, device="meta")),
        ("image", torch.zeros(3, 9, 7, 3, dtype=torch.uint8)),
        ("image", torch.zeros(3, 3, 9, 7)),
        ("image", torch.zeros(2, 3, 9, 7, dtype=torch.uint8)),
    ],
)
def test_a_batch_that_the_tail_was_not_opened_for_is_refused(opened: OpenTail, field: str, value: torch.Tensor) -> None:
    batch = {"audio": torch.zeros(3, 1, 300), "image": torch.zeros(3, 3, 9, 7, dtype=torch.uint8)}
    opened.apply(on_device(batch), np.zeros((3, 2)))
    value = value if value.device.type == "meta" else value.to(DEVICE)
    with pytest.raises(ValueError, match=f"opened for {field} as|{field} of 2 rows needs draws"):
        opened.apply({**on_device(batch), field: value}, np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"needs draws of shape \(3, 2\), not \(3, 3\)"):
        opened.apply(on_device(batch), np.zeros((3, 3)))


def test_the_batch_that_came_stays_as_it_was(opened: OpenTail) -> None:
    batch = on_device({"audio": torch.from_numpy(clips(3)), "image": torch.zeros(3, 3, 9, 7, dtype=torch.uint8)})
    before = {name: value.clone() for name, value in batch.items()}
    out = opened.apply({**batch, "label": "a"}, np.full((3, 2), 0.5))
    assert all(torch.equal(batch[name], value) for name, value in before.items())
    assert out["label"] == "a"


@pytest.mark.usefixtures("opened")  # so that the modules are loaded
def test_without_triton_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sound_device", "triton.noise"):
        monkeypatch.delitem(sys.modules, f"penstock.kernels.{name}")
    monkeypatch.delattr("penstock.kernels.triton.noise")
    monkeypatch.setitem(sys.modules, "triton", None)
    _, tail = cut(ps.arrays(audio=clips(1)).add_noise((0, 1)))
    with pytest.raises(MissingExtraError, match=r"add_noise on .* needs triton"):
        tail.open(DEVICE, 1)


def test_only_known_operators_take_part() -> None:
    class Own(Operator):
        @property
        def name(self) -> str:
            return "own"

        def check(self, spec: Spec) -> Spec:
            return spec

        def apply(self, sample: Sample, units: Units) -> Sample:
            return sample

    source = ps.arrays(audio=clips(3)).graph.source
    assert names(Graph(source, (NOISE, Own(), MEL))) == (["add_noise", "own"], ["mel"])
