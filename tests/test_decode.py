"""Decoding gives Pillow's pixels, of the whole or of a part, and refuses what it cannot decode."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import jpegs
from penstock import decode as decode_module
from penstock.decode import Decode, oriented, stored_box
from penstock.errors import GraphError
from penstock.graph import Field
from penstock.kernels import jpeg

boxes = st.tuples(*[st.floats(0, 1)] * 4)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def box_in(fractions: tuple[float, ...], height: int, width: int) -> jpeg.Box:
    xs, ys = sorted(fractions[:2]), sorted(fractions[2:])
    left, top = int(xs[0] * (width - 1)), int(ys[0] * (height - 1))
    return left, top, max(left + 1, round(xs[1] * width)), max(top + 1, round(ys[1] * height))


def cut(image: np.ndarray, box: jpeg.Box) -> np.ndarray:
    left, top, right, bottom = box
    return image[top:bottom, left:right]


def test_pillows_jpeg_library_is_used_directly() -> None:
    assert jpeg.PROBLEM is None


@quick
@given(
    st.sampled_from(sorted(jpegs.SAMPLINGS)),
    st.integers(1, 90),
    st.integers(1, 60),
    st.integers(0, 9999),
    st.sampled_from((0, 1, 3)),
    st.booleans(),
    st.lists(boxes, min_size=4, max_size=4),
)
def test_a_region_has_the_pixels_of_a_full_decode(
    name: str, width: int, height: int, seed: int, restart: int, split: bool, fractions: list[tuple[float, ...]]
) -> None:
    data = jpegs.coefficients(width, height, jpegs.SAMPLINGS[name], seed, restart=restart, split=split)
    whole = jpegs.by_pillow(data)
    assert jpeg.header(data) == (width, height, len(jpegs.SAMPLINGS[name]), 1)
    assert np.array_equal(Decode().pixels(data), whole)
    for box in (box_in(f, height, width) for f in fractions):
        assert np.array_equal(jpeg.decode(data, box), cut(whole, box)), box


@quick
@given(
    st.sampled_from(({}, {"progressive": True}, {"optimize": True}, {"quality": 100}, {"restart_marker_blocks": 5})),
    st.sampled_from((0, 1, 2)),
    st.sampled_from(("RGB", "L")),
    st.integers(1, 140),
    st.integers(1, 100),
    boxes,
)
def test_encoders_files_too(
    options: dict[str, object], subsampling: int, stored: str, width: int, height: int, fractions: tuple[float, ...]
) -> None:
    data = jpegs.saved(jpegs.photo(width, height, width, stored), subsampling=subsampling, **options)
    box = box_in(fractions, height, width)
    for mode, channels in (("RGB", 3), ("L", 1)):
        whole = jpegs.by_pillow(data, mode)
        assert np.array_equal(Decode(mode).pixels(data), whole)
        assert np.array_equal(jpeg.decode(data, box, channels), cut(whole, box))


def test_a_region_can_be_written_between_other_rows() -> None:
    data = jpegs.saved(jpegs.photo(50, 40))
    canvas = np.full((60, 100, 3), 7, np.uint8)
    jpeg.decode(data, (0, 0, 50, 40), out=canvas[10:50, 20:70])
    assert np.array_equal(canvas[10:50, 20:70], jpegs.by_pillow(data))
    canvas[10:50, 20:70] = 7
    assert (canvas == 7).all()


def test_every_kind_of_buffer_is_read() -> None:
    data = jpegs.saved(jpegs.photo(30, 20))
    for kind in (bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b))):
        assert np.array_equal(Decode().pixels(kind(data)), jpegs.by_pillow(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_unless_told_otherwise(orientation: int) -> None:
    data = jpegs.saved(jpegs.photo(61, 47), exif=jpegs.with_orientation(orientation))
    upright = jpegs.by_pillow(data)
    assert np.array_equal(Decode().pixels(data), upright)
    assert np.array_equal(Decode(exif=False).pixels(data), jpegs.by_pillow(data, exif=False))
    stored = jpegs.by_pillow(data, exif=False)
    box = (5, 9, 30, 21)
    assert np.array_equal(oriented(cut(stored, stored_box(box, orientation, 47, 61)), orientation), cut(upright, box))


def test_orientation_in_odd_places_is_left_to_pillow() -> None:
    plain = jpegs.saved(jpegs.photo(31, 20))
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    data = plain[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + plain[2:]
    head = jpeg.header(data)
    assert head is not None
    assert head.orientation == 0
    assert Decode().pixels(data).shape == (31, 20, 3)
    assert np.array_equal(Decode().pixels(data), jpegs.by_pillow(data))


def test_a_damaged_exif_block_does_not_cost_the_image() -> None:
    plain = jpegs.saved(jpegs.photo(31, 20))
    body = b"Exif\0\0MM\0*\xff\xff\xff\xff"
    data = plain[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + plain[2:]
    assert np.array_equal(Decode().pixels(data), jpegs.by_pillow(plain))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("stored", "format"),
    [("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"),
     ("RGB", "WEBP"), ("RGBA", "WEBP"), ("RGB", "BMP"), ("P", "GIF"), ("RGB", "TIFF")],
)  # fmt: skip
def test_whatever_pillow_reads(stored: str, format: str, mode: str) -> None:
    data = jpegs.saved(jpegs.photo(40, 30).convert(stored), format)
    assert np.array_equal(Decode(mode).pixels(data), jpegs.by_pillow(data, mode))


def test_sixteen_bit_gray_is_scaled() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(
        Decode("L").pixels(jpegs.saved(Image.fromarray(values), "PNG"))[:, :, 0], (values >> 8).astype(np.uint8)
    )


def test_palettes_with_transparency_do_not_warn() -> None:
    image = jpegs.photo(20, 20).convert("P")
    data = jpegs.saved(image, "PNG", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Decode().pixels(data).shape == (20, 20, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}])
def test_a_file_cut_anywhere_is_refused_or_whole(options: dict[str, object]) -> None:
    data = jpegs.saved(jpegs.photo(48, 40), **options)
    whole = jpegs.by_pillow(data)
    for length in range(len(data)):
        try:
            expected = jpegs.by_pillow(data[:length])
        except Exception:
            with pytest.raises(ValueError):
                Decode().pixels(data[:length])
        else:
            assert np.array_equal(Decode().pixels(data[:length]), expected)
    assert np.array_equal(Decode().pixels(data + b"\0" * 7), whole)


def test_corrupt_data_is_refused_as_far_as_it_is_decoded() -> None:
    data = bytearray(jpegs.saved(jpegs.photo(64, 64), restart_marker_rows=1))
    third = [i for i in range(len(data) - 1) if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7][2]
    data[third + 1] = 0xD7
    with pytest.raises(ValueError, match=r"corrupt JPEG.*restart marker"):
        Decode().pixels(bytes(data))
    assert jpeg.decode(bytes(data), (0, 0, 64, 30)).shape == (30, 64, 3)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(({}, {"progressive": True})))
def test_any_changed_byte_gives_pixels_or_a_value_error(place: int, value: int, options: dict[str, object]) -> None:
    data = bytearray(jpegs.saved(jpegs.photo(40, 24), **options))
    data[place % len(data)] = value
    try:
        image = Decode().pixels(bytes(data))
    except ValueError:
        return
    assert image.dtype == np.uint8
    assert image.ndim == 3


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xd9"])
def test_what_is_no_image_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty|cannot decode"):
        Decode().apply({"image": data}, ())


def test_pixels_in_place_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an encoded image as bytes, found ndarray"):
        Decode().apply({"image": np.zeros((3, 3, 3), np.uint8)}, ())


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for format in ("JPEG", "PNG"):
        with pytest.raises(ValueError, match="decompression bomb"):
            Decode().pixels(jpegs.saved(jpegs.photo(30, 30), format))
        assert Decode().pixels(jpegs.saved(jpegs.photo(15, 10), format)).shape == (10, 15, 3)


def test_without_the_library_pillow_decodes_the_same_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpegs.saved(jpegs.photo(45, 33), exif=jpegs.with_orientation(6))
    expected = Decode().pixels(data)
    monkeypatch.setattr(decode_module.jpeg, "PROBLEM", "Wrong JPEG library version: library is 80, caller expects 62")
    with pytest.warns(RuntimeWarning, match=r"library is 80.*pip install"):
        assert np.array_equal(Decode().pixels(data), expected)


def test_a_library_that_is_no_libjpeg_is_noticed() -> None:
    import ctypes

    from penstock.kernels.native import lib

    reason = ctypes.create_string_buffer(200)
    assert lib.ps_jpeg_bind(b"libm.so.6", reason)
    assert b"jpeg_std_error" in reason.value
    assert lib.ps_jpeg_bind(b"/no/such/library.so", reason)
    assert np.array_equal(
        Decode().pixels(jpegs.saved(jpegs.photo(9, 9))), jpegs.by_pillow(jpegs.saved(jpegs.photo(9, 9)))
    )


def test_senseless_arguments_are_errors_of_the_graph() -> None:
    with pytest.raises(GraphError, match="'RGB' or 'L'"):
        Decode(mode="BGR")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="True or False"):
        Decode(exif=1)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="needs the field 'image'"):
        Decode().check({"audio": Field("encoded")})
    with pytest.raises(GraphError, match="image already"):
        Decode().check({"image": Field("image", (None, None, 3), "uint8")})
    assert Decode("L").check({"image": Field("encoded")})["image"] == Field("image", (None, None, 1), "uint8")


def test_oriented_is_pillows_transpose() -> None:
    for orientation in range(1, 9):
        image = jpegs.photo(7, 5)
        image.getexif()[0x0112] = orientation
        turned = np.asarray(ImageOps.exif_transpose(image))
        assert np.array_equal(oriented(np.asarray(image), orientation), turned)
