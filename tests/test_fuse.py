"""The joined operator is the operators one by one, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jpegs
from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize
from penstock.decode import Decode
from penstock.fuse import DecodeCrop, fuse_decode
from penstock.graph import Field, Graph, Operator, Reader, Sample, Source, Spec
from penstock.kernels import jpeg
from penstock.kernels.resample import FILTERS


@dataclass(frozen=True)
class OneFile(Source):
    """A source of one encoded image."""

    def __len__(self) -> int:
        return 1

    def open(self) -> Reader:
        raise NotImplementedError

    def spec(self) -> Spec:
        return {"image": Field("encoded"), "boxes": Field("boxes")}

    def place(self, id: int) -> str:
        return "memory"

    def fingerprint(self) -> str:
        return "one"


def chain(*operators: Operator) -> Graph:
    return Graph(OneFile(), operators)


def run(graph: Graph, sample: Sample, units: list[float]) -> Sample:
    sample, used = dict(sample), 0
    for operator in graph.operators:
        sample = operator.apply(sample, units[used : used + operator.units])
        used += operator.units
    assert used == len(units)
    return sample


sizes = st.integers(1, 60) | st.tuples(st.integers(1, 60), st.integers(1, 60))
filters = st.sampled_from(FILTERS)
resizes = st.builds(Resize, sizes, filters)
random_resized = st.builds(RandomResizedCrop, sizes, interpolation=filters)
small = st.integers(1, 12)
cuts = st.builds(CenterCrop, sizes) | st.builds(RandomCrop, small)
heads = (
    st.tuples(random_resized) | st.tuples(cuts) | st.tuples(resizes) | st.tuples(resizes, st.builds(CenterCrop, sizes))
)
flips = st.just(()) | st.tuples(st.builds(Flip))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(jpegs.SAMPLINGS)),
    st.integers(12, 90),
    st.integers(12, 90),
    heads,
    flips,
    st.sampled_from(("RGB", "L")),
    st.integers(0, 10**6),
)
def test_joining_changes_no_bit(
    name: str,
    width: int,
    height: int,
    head: tuple[Operator, ...],
    flip: tuple[Operator, ...],
    mode: str,
    seed: int,
) -> None:
    graph = chain(Decode(mode), *head, *flip)
    fused = fuse_decode(graph)
    assert [type(operator) for operator in fused.operators] == [DecodeCrop]
    assert fused.units == graph.units
    assert fused.spec == graph.spec
    rng = random.Random(seed)
    units = [rng.random() for _ in range(graph.units)]
    boxes = np.array([[1, 2, 8, 9], [0, 0, width, height]], np.float32)
    sample = {"image": jpegs.coefficients(width, height, jpegs.SAMPLINGS[name], seed), "boxes": boxes, "label": 3}
    expected, found = run(graph, sample, units), run(fused, sample, units)
    assert np.array_equal(found["image"], expected["image"])
    assert found["image"].shape == expected["image"].shape
    assert np.array_equal(found["boxes"], expected["boxes"])
    assert found["label"] == 3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), heads, flips, st.booleans(), st.integers(0, 999), st.sampled_from(({}, {"progressive": True}))
)
def test_joining_changes_no_bit_of_turned_images(
    orientation: int,
    head: tuple[Operator, ...],
    flip: tuple[Operator, ...],
    exif: bool,
    seed: int,
    options: dict[str, bool],
) -> None:
    graph = chain(Decode(exif=exif), *head, *flip)
    rng = random.Random(seed)
    units = [rng.random() for _ in range(graph.units)]
    data = jpegs.saved(jpegs.photo(53, 38, seed), exif=jpegs.with_orientation(orientation), **options)
    sample = {"image": data, "boxes": np.array([[1, 2, 8, 9]], np.float32)}
    expected, found = run(graph, sample, units), run(fuse_decode(graph), sample, units)
    assert np.array_equal(found["image"], expected["image"])
    assert np.array_equal(found["boxes"], expected["boxes"])


def test_boxes_that_come_as_lists_follow_joined_crops() -> None:
    graph = chain(Decode(), RandomResizedCrop(20), Flip(1))
    data = jpegs.saved(jpegs.photo(50, 40))
    units = [0.3] * graph.units
    expected = run(graph, {"image": data, "boxes": np.array([[1, 2, 8, 9]], np.float32)}, units)
    assert np.array_equal(
        run(fuse_decode(graph), {"image": data, "boxes": [[1, 2, 8, 9]]}, units)["boxes"], expected["boxes"]
    )
    assert run(fuse_decode(graph), {"image": data, "boxes": []}, units)["boxes"].shape == (0, 4)


@pytest.mark.parametrize(("stored", "format"), [("RGB", "PNG"), ("CMYK", "JPEG"), ("L", "WEBP")])
def test_images_that_pillow_decodes_go_through_it_too(stored: str, format: str) -> None:
    graph = chain(Decode(), RandomResizedCrop(20), Flip())
    data = jpegs.saved(jpegs.photo(50, 40).convert(stored), format)
    units = [0.3] * graph.units
    expected = run(graph, {"image": data}, units)["image"]
    assert np.array_equal(run(fuse_decode(graph), {"image": data}, units)["image"], expected)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [20, 60])
def test_the_image_can_be_written_where_it_belongs(format: str, size: int) -> None:
    fused = DecodeCrop(Decode(), (CenterCrop(size), Flip(1)))
    data = jpegs.saved(jpegs.photo(50, 40), format)
    slot = np.zeros((3, size, size, 3), np.uint8)
    sample = fused.apply({"image": data}, [0.0], out=slot[1])
    assert sample["image"] is not None
    assert np.array_equal(slot[1], fused.apply({"image": data}, [0.0])["image"])
    assert not slot[0].any()
    assert not slot[2].any()


def test_only_what_is_needed_is_decoded() -> None:
    data = bytearray(jpegs.saved(jpegs.photo(64, 64), restart_marker_rows=1))
    markers = [i for i in range(len(data) - 1) if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7]
    data[markers[-1] + 1] ^= 1
    with pytest.raises(ValueError, match="corrupt"):
        Decode().pixels(bytes(data))
    assert DecodeCrop(Decode(), (RandomCrop(20),)).apply({"image": bytes(data)}, (0.0, 0.0))["image"].shape[0] == 20
    assert jpeg.PROBLEM is None


@pytest.mark.parametrize(
    ("operators", "names"),
    [
        ((Decode(), RandomResizedCrop(8), Flip()), ["decode+random_resized_crop+flip"]),
        ((Decode(), Resize(9), CenterCrop(8)), ["decode+resize+center_crop"]),
        ((Decode(), CenterCrop(8), Resize(9), RandomCrop(4), Flip()), ["decode+center_crop+resize+random_crop+flip"]),
        ((Decode(), Flip(), RandomCrop(4)), ["decode+flip", "random_crop"]),
        ((Decode(), Flip(axis="vertical")), ["decode", "flip"]),
        ((Decode(), RandomCrop(4, 2), Flip()), ["decode", "random_crop", "flip"]),
        ((Decode(), Resize(9), RandomResizedCrop(4)), ["decode+resize", "random_resized_crop"]),
        ((Decode(),), ["decode"]),
    ],
)
def test_what_is_joined(operators: tuple[Operator, ...], names: list[str]) -> None:
    graph = chain(*operators)
    fused = fuse_decode(graph)
    assert [operator.name for operator in fused.operators] == names
    assert fuse_decode(fused) == fused
    assert graph == chain(*operators)


def test_errors_name_what_failed() -> None:
    fused = DecodeCrop(Decode(), (RandomCrop(50),))
    with pytest.raises(ValueError, match=r"random_crop: the image has 10 x 12 pixels"):
        fused.apply({"image": jpegs.saved(jpegs.photo(12, 10))}, (0.1, 0.2))
    with pytest.raises(ValueError, match="0 bytes"):
        fused.apply({"image": b""}, (0.1, 0.2))


def test_a_failed_sample_keeps_its_fields() -> None:
    sample: Sample = {"image": b"nothing", "boxes": np.zeros((1, 4), np.float32)}
    with pytest.raises(ValueError):
        DecodeCrop(Decode(), (Flip(),)).apply(sample, (0.1,))
    assert sample["image"] == b"nothing"
