"""The checksum is XXH64."""

from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels import native
from penstock.kernels.checksum import checksum

P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5, ALL = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 2**64 - 1


def turned(value: int, by: int) -> int:
    value &= ALL
    return (value << by | value >> (64 - by)) & ALL


def stirred(lane: int, word: int) -> int:
    return turned(lane + word * P2, 31) * P1 & ALL


def by_the_book(data: bytes, seed: int) -> int:
    """XXH64 as its specification puts it."""
    rest = data
    total = seed + P5
    if len(data) >= 32:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        while len(rest) >= 32:
            words = [int.from_bytes(rest[at : at + 8], "little") for at in range(0, 32, 8)]
            lanes = [stirred(lane, word) for lane, word in zip(lanes, words, strict=True)]
            rest = rest[32:]
        total = sum(turned(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = ((total ^ stirred(0, lane)) * P1 + P4) & ALL
    total += len(data)
    while len(rest) >= 8:
        total = turned((total & ALL) ^ stirred(0, int.from_bytes(rest[:8], "little")), 27) * P1 + P4
        rest = rest[8:]
    if len(rest) >= 4:
        total = turned((total & ALL) ^ (int.from_bytes(rest[:4], "little") * P1 & ALL), 23) * P2 + P3
        rest = rest[4:]
    for byte in rest:
        total = turned((total & ALL) ^ (byte * P5 & ALL), 11) * P1
    total &= ALL
    total = (total ^ total >> 33) * P2 & ALL
    total = (total ^ total >> 29) * P3 & ALL
    return total ^ total >> 32


def test_published_values() -> None:
    assert checksum(b"") == 0xEF46DB3751D8E999
    assert checksum(b"a") == 0xD24EC4F1A98C6E5B
    assert checksum(b"abc") == 0x44BC2CF5AD770999


@given(st.binary(max_size=300), st.integers(0, ALL))
def test_any_data_and_seed(data: bytes, seed: int) -> None:
    assert checksum(data, seed) == by_the_book(data, seed)


@given(st.binary(max_size=100))
def test_any_kind_of_buffer(data: bytes) -> None:
    assert checksum(bytearray(data)) == checksum(memoryview(data)) == checksum(data)


def test_both_builds_agree() -> None:
    base = ctypes.CDLL(f"{native.FOLDER}/_native.so")
    base.ps_checksum.restype = ctypes.c_uint64
    base.ps_checksum.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64]
    for size in range(100):
        data = bytes(range(size))
        assert base.ps_checksum(data, size, size) == checksum(data, size)
