"""The native colour and geometry kernels give the bytes that Pillow gives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from penstock.kernels import native, pixels
from penstock.kernels.pixels import Op, apply

SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (3, 3), (7, 5), (33, 40), (224, 224)]
FILL = (10.0, 200.0, 30.0)
Array = NDArray[np.uint8]


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    """Few levels and flat parts, as photographs have and noise has not."""
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.linspace(40, 190, height), np.linspace(0, 30, width))[..., None]
    return (ramp + rng.normal(0, 3, (height, width, channels))).clip(0, 255).astype(np.uint8)


def flat(height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    return np.full((height, width, channels), seed % 256, np.uint8)


def to_pillow(image: Array) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def to_array(image: Image.Image) -> Array:
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def turned(image: Image.Image, shift: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    moved = Image.fromarray(np.asarray(hue) + np.uint8(shift))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


def warped(resample: Image.Resampling) -> Callable[..., Image.Image]:
    def warp(image: Image.Image, *numbers: float) -> Image.Image:
        fill = tuple(int(level) for level in numbers[6:])
        colour = fill if image.mode == "RGB" else fill[0]
        return image.transform(image.size, Image.Transform.AFFINE, numbers[:6], resample, fillcolor=colour)

    return warp


def erased(image: Image.Image, top: float, left: float, bottom: float, right: float, *fill: float) -> Image.Image:
    array = to_array(image).copy()
    array[int(top) : int(bottom), int(left) : int(right)] = fill[: array.shape[2]]
    return to_pillow(array)


REFERENCE: dict[Op, Callable[..., Image.Image]] = {
    Op.BRIGHTNESS: lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    Op.CONTRAST: lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    Op.SATURATION: lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    Op.HUE: turned,
    Op.SHARPNESS: lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    Op.POSTERIZE: lambda image, bits: ImageOps.posterize(image, int(bits)),
    Op.SOLARIZE: lambda image, threshold: ImageOps.solarize(image, threshold),
    Op.AUTOCONTRAST: ImageOps.autocontrast,
    Op.EQUALIZE: ImageOps.equalize,
    Op.INVERT: ImageOps.invert,
    Op.AFFINE: warped(Image.Resampling.NEAREST),
    Op.AFFINE_BILINEAR: warped(Image.Resampling.BILINEAR),
    Op.AFFINE_BICUBIC: warped(Image.Resampling.BICUBIC),
    Op.ERASE: erased,
}
FACTORS = [(0.0,), (0.1,), (0.73,), (1.0,), (1.27,), (1.9,), (6.0,), (-0.5,)]
MATRICES = [
    (1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    (1.0, 0.3, 0.0, 0.0, 1.0, 0.0),
    (1.0, 0.0, 0.0, -0.3, 1.0, 0.0),
    (1.0, 0.0, 3.0, 0.0, 1.0, -2.0),
    (1.0, 0.0, 2.3, 0.0, 1.0, 0.49),
    (-1.0, 0.0, 7.0, 0.0, 1.0, 0.0),
    (0.5, 0.0, 1.0, 0.0, 2.0, -1.0),
    (0.866, -0.5, 2.0, 0.5, 0.866, -1.0),
    (0.0, 1.0, 0.0, -1.0, 0.0, 7.0),
    (0.0, 0.0, 1.0, 0.0, 0.0, 1.0),
    (1.0, 0.2, 40000.0, 0.0, 1.0, 0.0),
]
PARAMETERS: dict[Op, list[tuple[float, ...]]] = {
    Op.BRIGHTNESS: FACTORS,
    Op.CONTRAST: FACTORS,
    Op.SATURATION: FACTORS,
    Op.SHARPNESS: FACTORS,
    Op.HUE: [(0.0,), (1.0,), (100.0,), (255.0,)],
    Op.POSTERIZE: [(float(bits),) for bits in range(1, 9)],
    Op.SOLARIZE: [(0.0,), (100.5,), (128.0,), (255.0,), (256.0,)],
    Op.AUTOCONTRAST: [()],
    Op.EQUALIZE: [()],
    Op.INVERT: [()],
    Op.AFFINE: [(*matrix, *FILL) for matrix in MATRICES],
    Op.AFFINE_BILINEAR: [(*matrix, *FILL) for matrix in MATRICES[:-1]],
    Op.AFFINE_BICUBIC: [(*matrix, *FILL) for matrix in MATRICES[:-1]],
    Op.ERASE: [(0.0, 0.0, 2.0, 1.0, *FILL), (1.0, 2.0, 1.0, 3.0, *FILL)],
}


def check(image: Array, steps: list[tuple[Op, tuple[float, ...]]]) -> None:
    before = image.copy()
    expected = to_pillow(image)
    for op, parameters in steps:
        expected = REFERENCE[op](expected, *parameters)
    np.testing.assert_array_equal(apply(image, steps), to_array(expected), err_msg=f"{steps} on {image.shape}")
    np.testing.assert_array_equal(image, before, err_msg="the input was written to")


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_op_equals_pillow_on_every_size(op: Op, channels: int) -> None:
    for height, width in SIZES:
        for make in (noise, smooth, flat):
            for parameters in PARAMETERS[op]:
                check(make(height, width, channels, seed=7), [(op, parameters)])


def test_every_op_has_a_reference() -> None:
    assert set(REFERENCE) == set(PARAMETERS) == set(Op)


factor = st.floats(-1.0, 4.0, width=32)
near_one = st.floats(-1.5, 1.5)
offset = st.floats(-50.0, 50.0)
affine = st.tuples(near_one, near_one, offset, near_one, near_one, offset).map(lambda matrix: (*matrix, *FILL))
steps = st.one_of(
    st.tuples(st.sampled_from([Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.SHARPNESS]), st.tuples(factor)),
    st.tuples(st.just(Op.HUE), st.tuples(st.integers(0, 255).map(float))),
    st.tuples(st.just(Op.POSTERIZE), st.tuples(st.integers(1, 8).map(float))),
    st.tuples(st.just(Op.SOLARIZE), st.tuples(st.floats(0.0, 256.0))),
    st.tuples(st.sampled_from([Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT]), st.just(())),
    st.tuples(st.sampled_from([Op.AFFINE, Op.AFFINE_BILINEAR, Op.AFFINE_BICUBIC]), affine),
)


@settings(max_examples=400, deadline=None)
@given(
    chain=st.lists(steps, min_size=1, max_size=5),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    channels=st.sampled_from([1, 3]),
    make=st.sampled_from([noise, smooth, flat]),
    seed=st.integers(0, 1000),
)
def test_a_chain_equals_pillow_step_by_step(
    chain: list[tuple[Op, tuple[float, ...]]],
    size: tuple[int, int],
    channels: int,
    make: Callable[..., Array],
    seed: int,
) -> None:
    check(make(*size, channels, seed=seed), chain)


def test_hue_equals_pillow_on_every_colour() -> None:
    levels = np.arange(256, dtype=np.uint8)
    for red in range(0, 256, 5):
        green, blue = np.meshgrid(levels, levels, indexing="ij")
        image = np.stack([np.full_like(green, red), green, blue], axis=-1)
        check(image, [(Op.HUE, (float(red * 7 % 256),))])


def test_both_builds_give_the_same_bytes() -> None:
    """The library for the baseline instruction set and the one for AVX2."""
    base = ctypes.CDLL(native.FOLDER + "/_native.so")
    base.ps_augment.argtypes = native.lib.ps_augment.argtypes
    image = smooth(67, 45, seed=3)
    for op, choices in PARAMETERS.items():
        for parameters in choices:
            numbers = (ctypes.c_double * pixels.FLAT)(op, *parameters)
            out = np.empty_like(image)
            assert base.ps_augment(image.ctypes.data, out.ctypes.data, 67, 45, 3, numbers, 1) == 0
            np.testing.assert_array_equal(out, apply(image, [(op, parameters)]), err_msg=f"{op} {parameters}")


def test_a_strided_view_is_read_right() -> None:
    image = noise(20, 30)
    np.testing.assert_array_equal(apply(image[::2, ::-1], [(Op.INVERT, ())]), 255 - image[::2, ::-1])


def test_no_steps_give_the_image_itself() -> None:
    image = noise(4, 4)
    assert apply(image, ()) is image


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 2), np.uint8), np.zeros((4, 4, 3), np.float32), noise(0, 4)],
    ids=["no channels", "two channels", "float", "empty"],
)
def test_what_is_no_image_is_refused(image: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="expected a uint8 image"):
        apply(image, [(Op.INVERT, ())])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_senseless_numbers_are_refused(op: Op, bad: float) -> None:
    with pytest.raises(ValueError, match="cannot apply"):
        apply(noise(5, 6), [(op, (bad, 0.0, 0.0, 0.0, 1.0, 0.0, *FILL))])


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot apply"):
        apply(noise(5, 6), [(99, ())])  # type: ignore[list-item]


@pytest.mark.parametrize("box", [(-4.0, -4.0, 9.0, 9.0), (3.0, 3.0, 1.0, 1.0), (9.0, 9.0, 99.0, 99.0)])
def test_a_hole_is_cut_at_the_border(box: tuple[float, float, float, float]) -> None:
    image = noise(5, 6)
    top, left, bottom, right = (max(0, int(side)) for side in box)
    expected = image.copy()
    expected[top:bottom, left:right] = FILL
    np.testing.assert_array_equal(apply(image, [(Op.ERASE, (*box, *FILL))]), expected)


@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 5, 3), (224, 224, 3), (9, 9, 1)])
def test_normalize_is_a_multiplication_and_an_addition(shape: tuple[int, int, int]) -> None:
    image = noise(*shape)
    scale = np.array([0.017, 0.018, 0.019][: shape[2]], np.float32)
    bias = np.array([-2.1, -2.0, -1.8][: shape[2]], np.float32)
    np.testing.assert_array_equal(pixels.normalize(image, scale, bias), image.astype(np.float32) * scale + bias)


def test_normalize_refuses_another_number_of_channels() -> None:
    with pytest.raises(ValueError, match="3 channels"):
        pixels.normalize(noise(4, 4), np.ones(1, np.float32), np.zeros(1, np.float32))
