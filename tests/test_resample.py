"""Resizing gives Pillow's pixels, bit for bit, in both builds of the native code."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.kernels.resample import FILTERS, resize

sides = st.integers(1, 90)
fractions = st.tuples(*[st.floats(0, 1)] * 4)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng((height, width)).integers(0, 256, (height, width, channels), dtype=np.uint8)


def by_pillow(
    image: np.ndarray, height: int, width: int, filter: str, box: tuple[float, float, float, float] | None = None
) -> np.ndarray:
    source = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    result = np.asarray(source.resize((width, height), Image.Resampling[filter.upper()], box=box))
    return result.reshape(height, width, image.shape[2])


@settings(max_examples=300, deadline=None)
@given(sides, sides, sides, sides, st.sampled_from(FILTERS), st.sampled_from((1, 3)), st.none() | fractions)
@example(90, 20, 3, 20, "lanczos", 3, None)  # the vertical pass alone
@example(20, 90, 20, 3, "lanczos", 3, None)  # the horizontal pass alone
@example(90, 90, 2, 80, "bicubic", 3, None)  # in Pillow 13 the vertical pass first
@example(1, 1, 9, 9, "bicubic", 3, None)
def test_resizing_is_pillows(
    height: int, width: int, to_height: int, to_width: int, filter: str, channels: int, box: tuple[float, ...] | None
) -> None:
    image = noise(height, width, channels)
    bounds = None
    if box is not None:
        (left, right), (top, bottom) = sorted(box[:2]), sorted(box[2:])
        bounds = (left * width, top * height, right * width, bottom * height)
        if right - left < 0.01 or bottom - top < 0.01:
            return
    expected = by_pillow(image, to_height, to_width, filter, bounds)
    assert np.array_equal(resize(image, to_height, to_width, filter, box=bounds), expected)


@settings(max_examples=100, deadline=None)
@given(sides, sides, sides, sides, st.sampled_from(FILTERS), fractions, st.booleans())
def test_a_window_is_a_cut_of_the_whole(
    height: int, width: int, to_height: int, to_width: int, filter: str, cut: tuple[float, ...], flip: bool
) -> None:
    (left, right), (top, bottom) = sorted(cut[:2]), sorted(cut[2:])
    x0, y0 = int(left * (to_width - 1)), int(top * (to_height - 1))
    x1, y1 = max(x0 + 1, round(right * to_width)), max(y0 + 1, round(bottom * to_height))
    image = noise(height, width, 3)
    whole = resize(image, to_height, to_width, filter)[y0:y1, x0:x1]
    window = resize(image, to_height, to_width, filter, window=(x0, y0, x1, y1), flip=flip)
    assert np.array_equal(window, whole[:, ::-1] if flip else whole)


def test_a_large_reduction() -> None:
    image = noise(5, 20000, 3)
    assert np.array_equal(resize(image, 3, 2, "lanczos"), by_pillow(image, 3, 2, "lanczos"))


def test_extreme_pixels_are_clipped_as_pillow_clips() -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    image[::2, 10:30] = 255
    for filter in ("bicubic", "lanczos"):
        assert np.array_equal(resize(image, 57, 61, filter), by_pillow(image, 57, 61, filter))


@pytest.mark.parametrize("view", ["cut", "mirrored", "transposed", "spread"])
def test_any_layout_of_the_source(view: str) -> None:
    image = noise(60, 70, 3)
    source = {
        "cut": image[5:50, 7:41],
        "mirrored": image[::-1, ::-1],
        "transposed": image.transpose(1, 0, 2),
        "spread": image[:, ::2],
    }[view]
    assert np.array_equal(resize(source, 31, 29), by_pillow(np.ascontiguousarray(source), 31, 29, "bilinear"))


def test_the_result_can_be_written_between_other_rows() -> None:
    canvas = np.full((50, 60, 3), 7, np.uint8)
    image = noise(33, 44, 3)
    resize(image, 30, 20, out=canvas[10:40, 20:40])
    assert np.array_equal(canvas[10:40, 20:40], by_pillow(image, 30, 20, "bilinear"))
    canvas[10:40, 20:40] = 7
    assert (canvas == 7).all()


def test_what_cannot_be_resized_is_refused() -> None:
    image = noise(10, 10, 3)
    for wrong in (image.astype(np.float32), image[:, :, 0], np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(ValueError, match="uint8 HWC images of 1 or 3 channels"):
            resize(wrong, 5, 5)
    with pytest.raises(ValueError, match="cannot resize"):
        resize(np.zeros((0, 10, 3), np.uint8), 5, 5)
    with pytest.raises(ValueError, match="cannot resize"):
        resize(image, 5, 5, box=(0, 0, 11, 5))
    with pytest.raises(ValueError, match="the output must be"):
        resize(image, 5, 5, out=np.zeros((5, 5, 3), np.uint8)[:, ::-1])
    with pytest.raises(ValueError, match="the output must be"):
        resize(image, 5, 5, out=np.zeros((5, 6, 3), np.uint8))


_BASELINE = """
import sys
import ctypes
from penstock.kernels import native
native.lib = ctypes.CDLL(native.FOLDER + "/_native.so")
sys.path.insert(0, {tests!r})
import test_resample, test_decode
test_resample.test_resizing_is_pillows()
test_decode.test_a_region_has_the_pixels_of_a_full_decode()
"""


def test_the_build_for_older_processors_gives_the_same(request: pytest.FixtureRequest) -> None:
    script = _BASELINE.format(tests=str(request.path.parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
