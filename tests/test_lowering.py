"""What `lower` stands on, without torchvision: tables of levels, Pillow's leniency, and datasets it leaves alone."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from penstock.crop import CenterCrop, RandomCrop, Resize
from penstock.decode import Decode
from penstock.folder import AutoAugmentV2, DecodeAsPillow, Levels, TrivialAugmentV2, fuse_as_pillow
from penstock.graph import Graph, Operator
from penstock.kernels.levels import look_up
from penstock.kernels.pixels import Op
from penstock.lowering import lower, lowered
from penstock.read import Files

RNG = np.random.default_rng(0)
TABLE = RNG.random((3, 256), np.float32)


def photo(height: int = 61, width: int = 83) -> NDArray[np.uint8]:
    ramp = np.add.outer(np.arange(height) * 2, np.arange(width))[..., None] + np.array([0, 30, 60])
    return (ramp + RNG.normal(0, 9, (height, width, 3))).clip(0, 255).astype(np.uint8)


def file(array: NDArray[Any], format: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, format, **options)
    return out.getvalue()


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB"))


def damaged(data: bytes) -> bytes:
    """A JPEG whose last quarter is zeros up to its end marker: libjpeg fills in what is missing."""
    start = len(data) * 3 // 4
    return data[:start] + bytes(len(data) - start - 2) + data[-2:]


def run(data: bytes, operators: tuple[Operator, ...], units: list[float]) -> NDArray[np.uint8]:
    sample, used = {"image": data}, 0
    for operator in operators:
        sample = operator.apply(sample, units[used : used + operator.units])
        used += operator.units
    image: Any = sample["image"]
    return image  # type: ignore[no-any-return]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_a_table_is_looked_up_for_every_level_whatever_the_strides(height: int, width: int, y: int, x: int) -> None:
    image = RNG.integers(0, 256, (height + y, width + x, 3), np.uint8)
    for view in (image[y:, x:], image[y:, x:][::-1, ::-1]):
        expected = np.stack([TABLE[c][view[..., c]] for c in range(3)])
        assert np.array_equal(look_up(view, TABLE, planar=True), expected)
        assert np.array_equal(look_up(view, TABLE, planar=False), expected.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("image", "table"),
    [
        (np.zeros((4, 4, 1), np.uint8), TABLE),
        (np.zeros((4, 4, 3), np.float32), TABLE),
        (np.zeros((4, 4, 3), np.uint8), TABLE[:, :255]),
        (np.zeros((4, 4, 3), np.uint8), TABLE.astype(np.float64)),
    ],
)
def test_a_look_up_of_other_shapes_is_refused(image: Any, table: Any) -> None:
    with pytest.raises(ValueError, match="expected a"):
        look_up(image, table, planar=True)


def test_levels_become_float32_in_a_pipeline() -> None:
    graph = Graph(Files(["a.jpg"]), (Decode(), Resize((4, 5)), Levels(TABLE.tobytes())))
    assert (graph.spec["image"].shape, graph.spec["image"].dtype) == ((4, 5, 3), "float32")
    assert Graph(Files(["a.jpg"]), (Decode(), Levels(bytes(3072)))).fingerprint() != graph.fingerprint()


def test_a_damaged_jpeg_has_pillows_pixels() -> None:
    data = damaged(file(photo()))
    with pytest.raises(ValueError, match="corrupt"):
        Decode().pixels(data)
    assert np.array_equal(DecodeAsPillow().pixels(data), by_pillow(data))


def test_a_damaged_jpeg_is_cropped_as_a_whole_one() -> None:
    data = damaged(file(photo()))
    crops = (RandomCrop(40), CenterCrop(30))
    units = [0.9, 0.3]
    fused = fuse_as_pillow(Graph(Files(["a.jpg"]), (DecodeAsPillow(), *crops))).operators
    assert len(fused) == 1
    image = run(data, fused, units)
    whole = crops[0].pixels(by_pillow(data), crops[0].decide(units, 61, 83))
    assert np.array_equal(image, crops[1].pixels(whole, crops[1].decide((), 40, 40)))


def test_a_joined_decode_writes_where_it_is_told() -> None:
    data = damaged(file(photo()))
    fused = fuse_as_pillow(Graph(Files(["a.jpg"]), (DecodeAsPillow(), CenterCrop(50)))).operators[0]
    out = np.zeros((50, 50, 3), np.uint8)
    sample: Any = fused.apply({"image": data}, (), out)  # type: ignore[call-arg]
    assert sample["image"] is out
    assert np.array_equal(out, by_pillow(data)[6:56, 16:66])


@pytest.mark.parametrize("data", [b"", b"no image", file(photo())[:-900]], ids=["empty", "text", "truncated"])
def test_what_pillow_refuses_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        DecodeAsPillow().pixels(data)
    with pytest.raises(ValueError):
        run(data, fuse_as_pillow(Graph(Files(["a.jpg"]), (DecodeAsPillow(), CenterCrop(5)))).operators, [])


def test_sixteen_bits_are_clipped_as_pillow_clips_them() -> None:
    data = file(np.arange(0, 600, 10, dtype=np.uint16).reshape(6, 10), "PNG")
    assert np.array_equal(DecodeAsPillow().pixels(data), by_pillow(data))


def test_solarize_of_v2_scales_thresholds_from_one() -> None:
    def thresholds(operator: Any, count: int) -> set[float]:
        draws = np.random.default_rng(1).random((count, operator.units))
        steps = [step for units in draws for step in operator.decide(units, 8, 8)]
        return {parameters[0] for op, parameters in steps if op is Op.SOLARIZE}

    assert thresholds(TrivialAugmentV2(4), 900) == {255.0 * t for t in torch.linspace(1, 0, 4).tolist()}
    tenths = [255.0 * t for t in torch.linspace(1, 0, 10).tolist()]
    assert thresholds(AutoAugmentV2("svhn"), 900) == {tenths[bin] for bin in (2, 3, 6, 8)}


class Squares:
    """A user's dataset."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index * index, index


class ImageFolder(Squares):
    """Not torchvision's, whatever its name."""


@pytest.mark.parametrize("dataset", [Squares(), ImageFolder(), [1, 2, 3]], ids=lambda dataset: type(dataset).__name__)
def test_another_dataset_is_left_as_it_is(dataset: Any) -> None:
    lowering = lowered(dataset)
    assert lowering.dataset is dataset
    name = type(dataset).__qualname__
    assert lowering.explanation == (f"not lowered: it is a {name}, not torchvision's ImageFolder",)
    pipe = lower(dataset)
    assert pipe.graph.source.open().read(2) is not None
    assert pipe.notes == lowering.explanation


def test_the_operators_travel_to_workers() -> None:
    graph = fuse_as_pillow(Graph(Files(["a.jpg"]), (DecodeAsPillow(), CenterCrop(5), Levels(TABLE.tobytes()))))
    assert graph.clean
    assert pickle.loads(pickle.dumps(graph)).operators == graph.operators
