"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from penstock.amounts import amount


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 10**9), ("1.5 TiB", 3 * 2**39), ("100", 100), ("7k", 7000), (".5MiB", 2**19), (" 2 mb ", 2 * 10**6)],
)
def test_texts(text: str, expected: int) -> None:
    assert amount(text) == expected


def test_whole_numbers_are_bytes_and_fractions_fractions() -> None:
    assert amount(1) == 1
    assert type(amount(1)) is int
    assert amount(1.0) == 1.0
    assert type(amount(1.0)) is float


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, 1.1, -0.5, True, None, "", "GB", "12 parsecs", "1e9", "0GB", "-1GB", [1]]
)
def test_what_is_no_amount(value: object) -> None:
    assert amount(value) is None
