"""What people write as sizes and rates is read as written: GB and GiB are two things."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.units import bytes_per_s_text, bytes_text, parse_bytes, parse_bytes_per_s, parse_factor, parse_share


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        ("64kb", 64_000),
        ("64KiB", 65_536),
        ("4096B", 4096),
        ("0 B", 0),
        (".5MB", 500_000),
    ],
)
def test_a_size_is_read(text: str, bytes_: int) -> None:
    assert parse_bytes(text) == bytes_


def test_a_rate_a_share_and_a_factor_are_read() -> None:
    assert parse_bytes_per_s("500MB/s") == 5e8
    assert parse_share("35%") == 0.35
    assert parse_factor("2x") == 2.0
    assert parse_factor("0.5x") == 0.5


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "24G"),
        (parse_bytes, "24"),
        (parse_bytes, "-1GB"),
        (parse_bytes, "1e9"),
        (parse_bytes, ""),
        (parse_bytes, "35%"),
        (parse_bytes_per_s, "500MB"),
        (parse_bytes_per_s, "4Gbit/s"),
        (parse_bytes_per_s, "500MB/h"),
        (parse_share, "101%"),
        (parse_share, "0.35"),
        (parse_factor, "2"),
        (parse_factor, "0x"),
        (parse_factor, "x"),
    ],
)
def test_what_is_not_one_is_refused_with_an_example(parse: Callable[[str, str], float], text: str) -> None:
    with pytest.raises(OptionError, match=r"--it is .*such as .*not '"):
        parse(text, "--it")


@given(st.floats(0, 1e17))
def test_what_is_shown_reads_back_to_within_its_digits(count: float) -> None:
    assert parse_bytes(bytes_text(count).replace(",", "")) == pytest.approx(count, rel=0.006, abs=0.51)
    assert bytes_per_s_text(count) == bytes_text(count) + "/s"
