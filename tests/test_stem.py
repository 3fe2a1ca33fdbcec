"""What is kept of a pipeline's beginning, and the rest of it: together the pipeline, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jpegs
from penstock.augment import ColorJitter, Normalize
from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize
from penstock.decode import Decode
from penstock.folder import DecodeAsPillow, fuse_as_pillow
from penstock.fuse import fuse_decode
from penstock.graph import Operator, Sample
from penstock.kernels.resample import FILTERS
from penstock.stem import Stem, stem
from test_fuse import chain, run

sizes = st.integers(1, 60) | st.tuples(st.integers(1, 60), st.integers(1, 60))
filters = st.sampled_from(FILTERS)
certain = st.builds(Resize, sizes, filters) | st.builds(CenterCrop, sizes)
chancy = (
    st.builds(RandomResizedCrop, sizes, interpolation=filters)
    | st.builds(Flip, axis=st.sampled_from(["horizontal", "vertical"]))
    | st.builds(RandomCrop, st.integers(1, 12), padding=st.none() | st.integers(0, 4), pad_if_needed=st.just(True))
    | st.just(ColorJitter(0.4, 0.4))
)
chains = st.lists(certain | chancy, max_size=4).map(tuple)


def stemmed(operators: tuple[Operator, ...]) -> Stem:
    found = stem(fuse_decode(chain(*operators)))
    assert isinstance(found, Stem)
    return found


def finished(found: Stem, grown: Sample, units: list[float]) -> Sample:
    sample, used = dict(grown), 0
    for operator in found.rest:
        sample = operator.apply(sample, units[used : used + operator.units])
        used += operator.units
    assert used == len(units)
    return sample


def drawn(operators: tuple[Operator, ...], seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for operator in operators for _ in range(operator.units)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(jpegs.SAMPLINGS)), st.integers(12, 90), st.integers(12, 90), chains, st.integers(0, 10**6)
)
def test_stem_and_rest_are_the_pipeline(
    name: str, width: int, height: int, operators: tuple[Operator, ...], seed: int
) -> None:
    graph = fuse_decode(chain(Decode(), *operators))
    boxes = np.array([[1, 2, 8, 9], [0, 0, width, height]], np.float32)
    sample = {"image": jpegs.coefficients(width, height, jpegs.SAMPLINGS[name], seed), "boxes": boxes, "label": 3}
    found = stemmed((Decode(), *operators))
    grown = found.grown(sample)
    assert grown is not None
    assert found.size(sample) == grown["image"].nbytes
    assert isinstance(sample["image"], bytes)
    for epoch in range(2):  # what is kept is not changed by what is done to it
        kept = grown["image"].copy()
        units = drawn(operators, seed + epoch)
        expected, result = run(graph, sample, units), finished(found, grown, units)
        assert result["image"].dtype == expected["image"].dtype
        assert np.array_equal(result["image"], expected["image"])
        assert np.array_equal(result["boxes"], expected["boxes"])
        assert result["label"] == 3
        assert np.array_equal(grown["image"], kept)
        assert not np.may_share_memory(result["image"], grown["image"])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8),
    chains,
    st.booleans(),
    st.integers(0, 999),
    st.sampled_from([("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {})]),
)
def test_turned_images_and_those_that_pillow_decodes(
    orientation: int, operators: tuple[Operator, ...], exif: bool, seed: int, form: tuple[str, dict[str, Any]]
) -> None:
    data = jpegs.saved(jpegs.photo(53, 38, seed), form[0], exif=jpegs.with_orientation(orientation), **form[1])
    found, units = stemmed((Decode(exif=exif), *operators)), drawn(operators, seed)
    grown = found.grown({"image": data})
    assert grown is not None
    assert found.size({"image": data}) in (grown["image"].nbytes, None)
    expected = run(fuse_decode(chain(Decode(exif=exif), *operators)), {"image": data}, units)
    assert np.array_equal(finished(found, grown, units)["image"], expected["image"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.floats(0.3, 1), st.integers(0, 255), chains)
def test_damaged_images_have_the_pipeline_s_pixels_or_no_stem(
    seed: int, where: float, by: int, operators: tuple[Operator, ...]
) -> None:
    data = bytearray(jpegs.saved(jpegs.photo(60, 48, seed), restart_marker_rows=1))
    data[int(where * (len(data) - 1))] ^= by
    for decode, fuse in ((Decode(), fuse_decode), (DecodeAsPillow(), fuse_as_pillow)):
        graph = fuse(chain(decode, *operators))
        found, units = stem(graph), drawn(operators, seed)
        assert isinstance(found, Stem)
        grown = found.grown({"image": bytes(data)})
        if grown is not None:
            expected = run(graph, {"image": bytes(data)}, units)
            assert np.array_equal(finished(found, grown, units)["image"], expected["image"])


@pytest.mark.parametrize(
    ("operators", "grow", "rest"),
    [
        ((Decode(),), "decode", ["copy"]),
        ((Decode(), RandomResizedCrop(8), Flip()), "decode", ["random_resized_crop+flip"]),
        (
            (Decode(), Resize(9), CenterCrop(8), Normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))),
            "decode+resize+center_crop",
            ["copy", "normalize"],
        ),
        ((Decode(), Resize(9), RandomCrop(8), Flip()), "decode+resize", ["random_crop+flip"]),
        ((Decode(), Resize(9), CenterCrop(8), Resize(4), Flip()), "decode+resize+center_crop+resize", ["flip"]),
        ((Decode(), Flip(), RandomCrop(4)), "decode", ["flip", "random_crop"]),
        ((Decode(), RandomCrop(4, 2), Flip()), "decode", ["copy", "random_crop", "flip"]),
        ((Decode(), ColorJitter(0.4), Resize(4)), "decode", ["copy", "color_jitter", "resize"]),
    ],
)
def test_what_is_done_once(operators: tuple[Operator, ...], grow: str, rest: list[str]) -> None:
    found = stemmed(operators)
    assert found.name == grow
    assert [operator.name for operator in found.rest] == rest


def test_pipelines_that_do_not_decode_first_have_none() -> None:
    assert stem(chain()) == "the pipeline does not begin with decode"


def test_what_differs_in_pixels_differs_in_identity() -> None:
    chains_ = [(Decode(),), (Decode("L"),), (Decode(exif=False),), (Decode(), Resize(9)), (Decode(), Resize(9, "box"))]
    assert len({stemmed(operators).identity for operators in chains_}) == len(chains_)
    assert stemmed((Decode(), Flip())).identity == stemmed((Decode(),)).identity


def test_an_image_that_cannot_be_decoded_has_no_stem() -> None:
    assert stemmed((Decode(), Flip())).grown({"image": b"nothing"}) is None
    assert stemmed((Decode(), Flip())).grown({"image": 7}) is None
