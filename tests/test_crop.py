"""The geometric operators: torchvision's rules for places and sizes, Pillow's pixels, boxes that follow."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize
from penstock.errors import GraphError
from penstock.graph import Field
from penstock.image import ImageOperator

sides = st.integers(1, 80)
unit = st.floats(0, 1, exclude_max=True)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng((height, width)).integers(0, 256, (height, width, 3), dtype=np.uint8)


def apply(operator: ImageOperator, image: np.ndarray, *units: float) -> np.ndarray:
    result = operator.apply({"image": image}, units)["image"]
    assert isinstance(result, np.ndarray)
    return result


def draws(operator: ImageOperator, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for _ in range(operator.units)]


# ---- places and sizes: each reference restates torchvision.transforms.functional


@pytest.mark.parametrize(
    ("size", "most", "height", "width", "expected"),
    [
        (256, None, 480, 640, (256, 341)),
        (256, None, 640, 480, (341, 256)),
        (256, None, 333, 500, (256, 384)),
        (100, 120, 480, 640, (90, 120)),
        (100, 150, 480, 640, (100, 133)),
        ((30, 50), None, 480, 640, (30, 50)),
        (7, None, 7, 9, (7, 9)),
    ],
)
def test_resize_follows_the_shorter_side(
    size: int | tuple[int, int], most: int | None, height: int, width: int, expected: tuple[int, int]
) -> None:
    operator = Resize(size, max_size=most)
    assert operator.decide((), height, width) == expected
    assert operator.size(height, width) == expected


@settings(max_examples=50, deadline=None)
@given(sides, sides, sides, sides, st.sampled_from(("nearest", "bilinear", "bicubic")))
def test_resize_gives_pillows_pixels(height: int, width: int, to_height: int, to_width: int, filter: str) -> None:
    image = noise(height, width)
    expected = Image.fromarray(image).resize((to_width, to_height), Image.Resampling[filter.upper()])
    assert np.array_equal(apply(Resize((to_height, to_width), filter), image), np.asarray(expected))


@settings(max_examples=80, deadline=None)
@given(sides, sides, sides, sides)
def test_center_crop_pads_what_is_smaller(height: int, width: int, to_height: int, to_width: int) -> None:
    image = noise(height, width)
    padded = np.pad(
        image,
        (
            (max(0, to_height - height) // 2, (max(0, to_height - height) + 1) // 2),
            (max(0, to_width - width) // 2, (max(0, to_width - width) + 1) // 2),
            (0, 0),
        ),
    )
    top = round((padded.shape[0] - to_height) / 2.0)
    left = round((padded.shape[1] - to_width) / 2.0)
    expected = padded[top : top + to_height, left : left + to_width]
    assert np.array_equal(apply(CenterCrop((to_height, to_width)), image), expected)


@settings(max_examples=80, deadline=None)
@given(sides, sides, sides, st.integers(0, 5), st.booleans(), st.sampled_from(("constant", "edge")), unit, unit)
def test_random_crop_is_a_cut_of_the_padded_image(
    height: int, width: int, to: int, padding: int, needed: bool, mode: str, x: float, y: float
) -> None:
    operator = RandomCrop(to, padding, needed, (1, 2, 3), mode)  # type: ignore[arg-type]
    image = noise(height, width)
    border = (padding, padding)
    if min(height, width) + 2 * padding < to and not needed:
        with pytest.raises(ValueError, match="pad_if_needed=True"):
            apply(operator, image, y, x)
        return
    across, down = max(0, to - width - 2 * padding), max(0, to - height - 2 * padding)
    source = Image.fromarray(image)
    if mode == "constant":
        padded = np.asarray(ImageOps.expand(source, (padding + across, padding + down), (1, 2, 3)))
    else:
        padded = np.pad(image, (border, border, (0, 0)), mode="edge")
        padded = np.pad(padded, ((down, down), (across, across), (0, 0)), mode="edge")
    top, left = int(y * (padded.shape[0] - to + 1)), int(x * (padded.shape[1] - to + 1))
    assert np.array_equal(apply(operator, image, y, x), padded[top : top + to, left : left + to])


def test_random_crop_reaches_every_place_alike() -> None:
    operator = RandomCrop(3)
    places = [operator.decide(draws(operator, seed), 6, 5) for seed in range(3000)]
    counts = np.zeros((4, 3))
    for place in places:
        counts[place.top, place.left] += 1
    assert counts.min() > 180  # 250 expected
    assert counts.max() < 330


def test_padding_by_side_is_left_top_right_bottom() -> None:
    assert RandomCrop(2, (1, 2)).decide((0, 0), 4, 4).sides == (1, 2, 1, 2)
    assert RandomCrop(2, (1, 2, 3, 4)).decide((0, 0), 4, 4).sides == (1, 2, 3, 4)
    ramp = np.arange(4, dtype=np.uint8).reshape(1, 4, 1)
    row = apply(RandomCrop((1, 8), (2, 0), padding_mode="reflect"), ramp, 0, 0)
    assert row[0, :, 0].tolist() == [2, 1, 0, 1, 2, 3, 2, 1]
    row = apply(RandomCrop((1, 8), (2, 0), padding_mode="symmetric"), ramp, 0, 0)
    assert row[0, :, 0].tolist() == [1, 0, 0, 1, 2, 3, 3, 2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 10**6))
def test_random_resized_crop_stays_inside(height: int, width: int, seed: int) -> None:
    operator = RandomResizedCrop(8)
    top, left, h, w = operator.decide(draws(operator, seed), height, width)
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h > 0
    assert w > 0


def test_random_resized_crop_draws_areas_and_ratios_evenly() -> None:
    operator = RandomResizedCrop(8, scale=(0.2, 0.4))
    boxes = [operator.decide(draws(operator, seed), 1000, 1000) for seed in range(4000)]
    areas = np.array([h * w / 1e6 for _, _, h, w in boxes])
    ratios = np.array([math.log(w / h) / math.log(4 / 3) for _, _, h, w in boxes])
    assert np.allclose(np.quantile(areas, [0, 0.25, 0.5, 0.75, 1]), [0.2, 0.25, 0.3, 0.35, 0.4], atol=0.01)
    assert np.allclose(np.quantile(ratios, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], atol=0.06)
    place = np.array([top / (1000 - h) for top, _, h, _ in boxes])
    assert np.allclose(np.quantile(place, [0, 0.5, 1]), [0, 0.5, 1], atol=0.03)


def test_random_resized_crop_falls_back_to_the_middle() -> None:
    always = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(0.5, 0.5))
    assert always.decide([0.5] * 22, 100, 100) == (0, 25, 100, 50)
    assert RandomResizedCrop(8, scale=(1, 1), ratio=(2, 2)).decide([0.5] * 22, 100, 100) == (25, 0, 50, 100)
    assert RandomResizedCrop(8).decide([0.99] * 22, 1, 500) == (0, 249, 1, 1)


def test_a_later_attempt_is_taken_when_the_first_does_not_fit() -> None:
    operator = RandomResizedCrop(8, scale=(0.25, 1.0))
    units = [0.99, 0.99, 0.0, 0.5] + [0.5] * 16 + [0.0, 0.999]
    assert operator.decide(units, 100, 100) == (0, 50, 50, 50)


def test_random_resized_crop_cuts_before_it_resizes() -> None:
    image = noise(60, 80)
    operator = RandomResizedCrop((20, 30), interpolation="bicubic")
    units = draws(operator, 4)
    top, left, h, w = operator.decide(units, 60, 80)
    cut = Image.fromarray(image[top : top + h, left : left + w])
    expected = np.asarray(cut.resize((30, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(apply(operator, image, *units), expected)


def test_flip_by_probability_and_axis() -> None:
    image = noise(5, 7)
    assert np.array_equal(apply(Flip(), image, 0.49), image[:, ::-1])
    assert np.array_equal(apply(Flip(), image, 0.5), image)
    assert np.array_equal(apply(Flip(0.2, "vertical"), image, 0.1), image[::-1])
    assert np.array_equal(apply(Flip(0), image, 0.0), image)
    assert np.array_equal(apply(Flip(1), image, 0.999), image[:, ::-1])


@pytest.mark.parametrize(
    "operator",
    [Resize(9), CenterCrop(9), CenterCrop(40), RandomCrop(9), RandomCrop(30, 10), RandomResizedCrop(9),
     Flip(1), Flip(1, "vertical")],
)  # fmt: skip
def test_the_input_is_never_written_to(operator: ImageOperator) -> None:
    image = noise(20, 30)
    image.setflags(write=False)
    before = image.copy()
    result = apply(operator, image, *draws(operator, 1))
    assert np.array_equal(image, before)
    assert operator.size(20, 30) == result.shape[:2]


# ---- boxes


@pytest.mark.parametrize(
    ("operator", "units", "expected"),
    [
        (Resize((40, 30)), (), [2, 4, 5, 12]),
        (CenterCrop((10, 10)), (), [0, 0, 0, 1]),
        (CenterCrop((24, 70)), (), [9, 4, 15, 8]),
        (RandomCrop(10), (0.0, 0.0), [4, 2, 10, 6]),
        (RandomCrop((10, 30), 2), (0.0, 0.0), [6, 4, 12, 8]),
        (RandomResizedCrop((40, 120), (1.0, 1.0), (3.0, 3.0)), [0.5] * 22, [8, 4, 20, 12]),
        (Flip(1), (0.0,), [50, 2, 56, 6]),
        (Flip(1, "vertical"), (0.0,), [4, 14, 10, 18]),
        (Flip(0), (0.0,), [4, 2, 10, 6]),
    ],
)
def test_boxes_follow(operator: ImageOperator, units: tuple[float, ...], expected: list[float]) -> None:
    sample = {"image": noise(20, 60), "boxes": np.array([[4, 2, 10, 6]], np.float32)}
    if isinstance(operator, RandomResizedCrop):
        assert operator.decide(units, 20, 60) == (0, 0, 20, 60)
    if isinstance(operator, Resize):
        expected = [2, 4, 5, 12]
    boxes = operator.apply(sample, units)["boxes"]
    assert boxes.dtype == np.float32
    assert boxes.tolist() == [expected]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((CenterCrop(9), RandomCrop(9, 3), RandomResizedCrop(9), Flip(1), Resize(9))), st.integers(0, 999)
)
def test_boxes_stay_inside_and_as_many(operator: ImageOperator, seed: int) -> None:
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, (40, 30), (5, 2, 2)), axis=1).reshape(5, 4).astype(np.float32)
    sample = operator.apply({"image": noise(30, 40), "boxes": corners.copy()}, draws(operator, seed))
    height, width = sample["image"].shape[:2]
    x0, y0, x1, y1 = sample["boxes"].T
    assert len(x0) == 5
    assert (x0 >= 0).all()
    assert (x0 <= x1).all()
    assert (x1 <= width + 1e-3).all()
    assert (y0 >= 0).all()
    assert (y0 <= y1).all()
    assert (y1 <= height + 1e-3).all()


def test_no_boxes_at_all() -> None:
    sample = {"image": noise(20, 20), "boxes": np.zeros((0, 4), np.float32)}
    for operator in (RandomResizedCrop(9), Flip(1), Resize(9), CenterCrop(3), RandomCrop(3)):
        assert operator.apply(dict(sample), draws(operator, 0))["boxes"].shape == (0, 4)


@pytest.mark.parametrize("operator", [RandomResizedCrop(9), Flip(1), Flip(0), Resize(9), CenterCrop(3), RandomCrop(3)])
def test_boxes_may_come_as_lists_and_whole_numbers(operator: ImageOperator) -> None:
    asked = operator.apply({"image": noise(20, 20), "boxes": np.array([[1, 2, 9, 9]], np.float32)}, draws(operator, 0))
    for boxes in ([[1, 2, 9, 9]], ((1, 2, 9, 9),), np.array([[1, 2, 9, 9]], np.int64), np.array([[1, 2, 9, 9.0]])):
        found = operator.apply({"image": noise(20, 20), "boxes": boxes}, draws(operator, 0))["boxes"]
        assert found.dtype == np.float32
        assert np.array_equal(found, asked["boxes"])
    assert operator.apply({"image": noise(20, 20), "boxes": []}, draws(operator, 0))["boxes"].shape == (0, 4)
    for boxes in ([1, 2, 9, 9], [[1, 2, 9]], [[[1, 2, 9, 9]]]):
        with pytest.raises(ValueError, match=r"boxes must be \[n, 4\]"):
            operator.apply({"image": noise(20, 20), "boxes": boxes}, draws(operator, 0))
    image = Field("image", (20, 20, 3), "uint8")
    after = operator.check({"image": image, "boxes": Field("value", (5, 4), "int64")})
    assert after["boxes"] == Field("boxes", (5, 4), "float32")
    with pytest.raises(GraphError, match=r"boxes must be \[n, 4\].* these are \[4\]"):
        operator.check({"image": image, "boxes": Field("value", (4,), "float32")})


# ---- arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Resize(0), "resize: size"),
        (lambda: Resize(2.5), "resize: size"),
        (lambda: Resize((1, 2, 3)), "resize: size"),
        (lambda: Resize(True), "resize: size"),
        (lambda: Resize(5, "cubic"), "nearest, box, bilinear, hamming, bicubic, lanczos"),
        (lambda: Resize(5, max_size=5), "max_size"),
        (lambda: Resize((5, 5), max_size=9), "max_size"),
        (lambda: CenterCrop((0, 1)), "center_crop: size"),
        (lambda: RandomCrop("9"), "random_crop: size"),
        (lambda: RandomCrop(9, (1, 2, 3)), "padding"),
        (lambda: RandomCrop(9, -1), "padding"),
        (lambda: RandomCrop(9, fill=256), "fill"),
        (lambda: RandomCrop(9, fill=(1, 2)), "fill"),
        (lambda: RandomCrop(9, padding_mode="wrap"), "padding_mode"),
        (lambda: RandomResizedCrop(9, scale=(0.5, 0.2)), "scale"),
        (lambda: RandomResizedCrop(9, ratio=(0, 1)), "ratio"),
        (lambda: RandomResizedCrop(9, ratio=1.0), "ratio"),
        (lambda: Flip(1.5), "probability"),
        (lambda: Flip("no"), "probability"),
        (lambda: Flip(0.5, "both"), "axis"),
    ],
)
def test_senseless_arguments_are_errors_of_the_graph(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()  # type: ignore[operator]


def test_the_graph_knows_the_sizes() -> None:
    spec = {"image": Field("image", (None, None, 3), "uint8")}
    assert RandomResizedCrop(8).check(spec)["image"].shape == (8, 8, 3)
    assert CenterCrop((4, 5)).check(spec)["image"].shape == (4, 5, 3)
    assert Resize(8).check(spec)["image"].shape == (None, None, 3)
    assert Flip().check(spec)["image"].shape == (None, None, 3)
    names = [o.name for o in (Resize(1), CenterCrop(1), RandomCrop(1), RandomResizedCrop(1), Flip())]
    assert names == ["resize", "center_crop", "random_crop", "random_resized_crop", "flip"]
