"""The GPU's JPEG engine is only given what it decodes as libjpeg does, and no file that is damaged to the eye."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import jpegs
from penstock.kernels import jpeg
from penstock.kernels.facts import REFUSALS, Facts, examine
from penstock.kernels.table import Kind

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TAKEN = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2), "4:4:0": (1, 2), "gray": (1, 1)}


def refused(data: bytes) -> str:
    refusal = examine(data).refusal
    assert refusal is not None
    return refusal


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """Marker, start and end of each segment up to the first scan's header."""
    found, at = [], 2
    while not found or found[-1][0] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((data[at + 1], at, end))
        at = end
    return found


def place(data: bytes, marker: int) -> int:
    """Where the body of the first such segment begins."""
    return next(start + 4 for found, start, _ in segments(data) if found == marker)


def changed(data: bytes, at: int, *values: int) -> bytes:
    return data[:at] + bytes(values) + data[at + len(values) :]


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    return data[:2] + bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body + data[2:]


def without(data: bytes, marker: int) -> bytes:
    for found, start, end in reversed(segments(data)):
        if found == marker:
            data = data[:start] + data[end:]
    return data


@quick
@given(
    st.sampled_from(sorted(jpegs.SAMPLINGS)),
    st.integers(1, 90),
    st.integers(1, 60),
    st.integers(0, 9999),
    st.sampled_from((0, 1, 3)),
    st.binary(max_size=20),
)
def test_the_engine_takes_baseline_files_of_its_samplings(
    name: str, width: int, height: int, seed: int, restart: int, tail: bytes
) -> None:
    data = jpegs.coefficients(width, height, jpegs.SAMPLINGS[name], seed, restart=restart)
    facts = examine(data + tail + b"\xff\xd9")
    if name not in TAKEN:
        assert "subsampled" in str(facts.refusal)
        return
    components = 1 if name == "gray" else 3
    assert facts == Facts(None, width, height, components, *TAKEN[name], 1, len(data))
    assert facts.kind == (Kind.GRAY if name == "gray" else Kind.YCC)


@pytest.mark.parametrize("stored", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"quality": 100}, {"optimize": True}, {"restart_marker_blocks": 5}])
def test_encoders_files_too(stored: str, options: dict[str, object]) -> None:
    data = jpegs.saved(jpegs.photo(123, 77, 3, stored), exif=jpegs.with_orientation(6), **options)
    sub = (1, 1) if stored == "L" else (2, 2)
    assert examine(data) == Facts(None, 123, 77, 1 if stored == "L" else 3, *sub, 6, len(data))


def test_every_kind_of_buffer_is_read() -> None:
    data = jpegs.saved(jpegs.photo(30, 20))
    for kind in (bytearray, memoryview, lambda b: memoryview(bytearray(b))):
        assert examine(kind(data)) == examine(data)


@pytest.mark.parametrize(
    ("mode", "format", "options", "reason"),
    [
        ("RGB", "JPEG", {"progressive": True}, "not baseline"),
        ("L", "JPEG", {"progressive": True}, "not baseline"),
        ("CMYK", "JPEG", {}, "no plain JPEG"),
        ("RGB", "JPEG", {"keep_rgb": True}, "not YCbCr"),
        ("RGB", "PNG", {}, "no plain JPEG"),
        ("RGB", "WEBP", {}, "no plain JPEG"),
    ],
)
def test_other_files_are_refused_by_name(mode: str, format: str, options: dict[str, object], reason: str) -> None:
    data = jpegs.saved(jpegs.photo(61, 40).convert(mode), format, **options)
    assert reason in refused(data)
    head = jpeg.header(data)
    assert examine(data)[1:3] == (head[:2] if head else (0, 0)), "the CPU's decoder is told the size all the same"


def test_several_scans_are_refused() -> None:
    assert "several scans" in refused(jpegs.coefficients(40, 30, jpegs.SAMPLINGS["4:2:0"], 1, split=True))


def test_extended_files_are_refused() -> None:
    data = jpegs.saved(jpegs.photo(40, 30))
    assert "not baseline" in refused(changed(data, place(data, 0xC0) - 3, 0xC1))


def test_colours_are_those_that_libjpeg_sees() -> None:
    plain = jpegs.saved(jpegs.photo(40, 30))
    bare = without(plain, 0xE0)
    assert examine(bare).refusal is None
    frame, scan = place(bare, 0xC0), place(bare, 0xDA)
    for i, letter in enumerate(b"RGB"):
        bare = changed(changed(bare, frame + 6 + 3 * i, letter), scan + 1 + 2 * i, letter)
    assert "not YCbCr" in refused(bare)
    for transform, taken in ((0, False), (1, True), (2, False)):
        marked = with_segment(plain, 0xEE, b"Adobe\0d\0\0\0\0" + bytes((transform,)))
        assert (examine(marked).refusal is None) == taken


@pytest.mark.parametrize("marker", [0xC4, 0xDB])
def test_missing_tables_are_noticed(marker: int) -> None:
    assert "tables" in refused(without(jpegs.saved(jpegs.photo(40, 30)), marker))


def test_wrong_tables_are_noticed() -> None:
    data = jpegs.saved(jpegs.photo(40, 30))
    codes, quantisers, scan = place(data, 0xC4), place(data, 0xDB), place(data, 0xDA)
    more_codes = next(start + 4 for marker, start, _ in segments(data) if (marker, data[start + 4]) == (0xC4, 0x10))
    for at, *values in (
        (codes, 0x02),  # a third table
        (codes + 1, 5, 1, 0),  # five codes of one bit
        (codes + 17, 16),  # a DC size that does not exist
        (more_codes + 16, 200),  # more codes than the segment holds
        (quantisers, 0x10),  # of 16 bits
        (scan + 2, 0x22),  # a table that no baseline file has
    ):
        assert "tables" in refused(changed(data, at, *values)), values


def test_a_scan_of_other_components_or_of_some_coefficients_is_refused() -> None:
    data = jpegs.saved(jpegs.photo(40, 30))
    scan = place(data, 0xDA)
    for at, value in ((scan + 1, 2), (scan + 3, 9), (scan + 7, 1), (scan + 8, 62), (scan + 9, 1)):
        assert "several scans" in refused(changed(data, at, value)), at - scan


def test_a_file_cut_anywhere_is_refused() -> None:
    for options in ({}, {"restart_marker_blocks": 3}):
        data = jpegs.saved(jpegs.photo(48, 40), **options)
        assert not any(examine(data[:length]).refusal is None for length in range(len(data)))


def test_a_file_that_lost_most_of_its_data_is_refused() -> None:
    data = jpegs.saved(jpegs.photo(400, 300))
    start = segments(data)[-1][2]
    assert "does not agree" in refused(data[: start + 300] + b"\xff\xd9")


def test_markers_within_the_data_must_be_restarts_in_sequence_and_number() -> None:
    data = jpegs.saved(jpegs.photo(64, 64), restart_marker_rows=1)
    assert examine(data).refusal is None
    start = segments(data)[-1][2]
    marks = [i for i in range(start, len(data) - 1) if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7]
    assert len(marks) == 3
    for damaged in (
        changed(data, marks[1] + 1, 0xD7),
        changed(data, marks[1] + 1, 0xC4),
        data[: marks[2]] + data[marks[2] + 2 :],
        data[: marks[1]] + data[marks[2] :],
        data[:-2] + b"\xff\xd3\xff\xd9",
        changed(data, place(data, 0xDD), 0, 0),
    ):
        assert "does not agree" in refused(damaged)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(({}, {"restart_marker_blocks": 3}, {"quality": 100}))
)
def test_what_is_taken_has_the_size_that_libjpeg_sees(place: int, value: int, options: dict[str, object]) -> None:
    data = bytearray(jpegs.saved(jpegs.photo(40, 24), **options))
    data[place % len(data)] = value
    facts = examine(data)
    if facts.refusal is None:
        head = jpeg.header(data)
        assert head is not None
        assert facts[1:4] == head[:3]
        assert facts.length <= len(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 700), st.integers(0, 700))
def test_garbage_of_any_kind_is_survived(garbage: bytes, start: int, end: int) -> None:
    data = jpegs.saved(jpegs.photo(24, 16))
    for mixed in (garbage, b"\xff\xd8" + garbage, data[:start] + garbage + data[end:], data[:start] + garbage):
        assert examine(mixed).refusal in REFUSALS


def test_much_garbage_with_markers_is_survived() -> None:
    rng = random.Random(0)
    markers = (0xC0, 0xC4, 0xDB, 0xDD, 0xDA, 0xD9, 0xD0, 0xE0, 0xEE, 0xFF, 0x00)
    for _ in range(3000):
        pieces = [b"\xff\xd8"]
        for _ in range(rng.randint(1, 8)):
            body = rng.randbytes(rng.choice((0, 1, 5, 15, 17, 30, 65)))
            length = rng.choice((len(body) + 2, rng.randint(0, 70)))
            pieces.append(bytes((0xFF, rng.choice(markers))) + length.to_bytes(2, "big") + body)
        examine(b"".join([*pieces, b"\xff\xd9"]))


def test_the_planes_are_those_of_the_sizes_told() -> None:
    """Subsampled sizes round up, as libjpeg's and nvJPEG's do."""
    data = jpegs.saved(jpegs.photo(33, 17))
    facts = examine(data)
    with Image.open(io.BytesIO(data)) as image:
        assert [layer[1:3] for layer in image.layer] == [(facts.sub_x, facts.sub_y), (1, 1), (1, 1)]
    assert np.array_equal(jpeg.decode(data, (0, 0, facts.width, facts.height)), jpegs.by_pillow(data))
