"""Random numbers and orders: the published generator, a twin in plain Python, and statistics that a bad one fails."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import native

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**32 - 1)
M32 = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 as Salmon et al. define it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & M32, (a >> 32) ^ c3 ^ k1, a & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c0, c1, c2, c3


def unit(seed: int, epoch: int, stream: int, position: int, j: int) -> float:
    counter = position & M32, position >> 32, j >> 1 | stream << 16, epoch
    block = philox(counter, (seed & M32, seed >> 32))
    high, low = block[2:] if j & 1 else block[:2]
    return ((high << 32 | low) >> 11) / 2**53


def place(seed: int, epoch: int, n: int, position: int) -> int:
    half = 1
    while 1 << 2 * half < n:
        half += 1
    x = position
    while True:
        left, right = x >> half, x & (1 << half) - 1
        for number in range(6):
            block = philox((right & M32, right >> 32, number | 1 << 31, epoch), (seed & M32, seed >> 32))
            left, right = right, left ^ (block[0] << 32 | block[1]) & (1 << half) - 1
        x = left << half | right
        if x < n:
            return x


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((M32,) * 4, (M32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """kat_vectors of Random123; the last is digits of pi."""
    block = (ctypes.c_uint32 * 4)(*counter)
    native.lib.ps_philox(block, *key)
    assert tuple(block) == expected
    assert philox(counter, key) == expected


@settings(max_examples=50, deadline=None)
@given(seeds, epochs, st.integers(0, 2**15 - 1), st.lists(st.integers(0, 2**62), max_size=4), st.integers(0, 9))
def test_units_are_their_twin(seed: int, epoch: int, stream: int, positions: list[int], width: int) -> None:
    expected = [[unit(seed, epoch, stream, position, j) for j in range(width)] for position in positions]
    assert native.units(seed, epoch, stream, positions, width) == expected


@settings(max_examples=50, deadline=None)
@given(seeds, epochs, st.data())
def test_an_order_is_its_twin(seed: int, epoch: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 100) | st.integers(1, 2**40) | st.integers(2**61, 2**62))
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    assert native.order(seed, epoch, n, positions) == [place(seed, epoch, n, position) for position in positions]


@settings(max_examples=100, deadline=None)
@given(seeds, epochs, st.integers(1, 3000))
def test_an_order_holds_each_id_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(native.order(seed, epoch, n, list(range(n)))) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(seeds, epochs, st.integers(1, 10**6), st.integers(0, 2**20), st.integers(0, 2**20))
def test_a_place_does_not_depend_on_who_asks(seed: int, epoch: int, n: int, a: int, b: int) -> None:
    a, b = a % n, b % n
    assert native.order(seed, epoch, n, [a, b]) == native.order(seed, epoch, n, [a]) + native.order(seed, epoch, n, [b])


@pytest.mark.parametrize(("n", "position"), [(10, 10), (10, -1), (0, 0), (-3, 0), (5, 2**62), (2**62 + 1, 0)])
def test_a_position_outside_the_epoch_is_refused(n: int, position: int) -> None:
    with pytest.raises(ValueError, match="positions of an epoch"):
        native.order(0, 0, n, [position])


def test_no_positions() -> None:
    assert native.order(0, 0, 0, []) == []
    assert native.units(0, 0, 0, [], 5) == []
    assert native.units(0, 0, 0, [1, 2], 0) == [[], []]


def chi_square(observed: Counter[int], shares: list[float]) -> float:
    """Distance from what these shares would give, in standard deviations."""
    total = observed.total()
    statistic = sum((observed[cell] - total * share) ** 2 / (total * share) for cell, share in enumerate(shares))
    return abs(statistic - (len(shares) - 1)) / math.sqrt(2 * (len(shares) - 1))


def even(cells: int) -> list[float]:
    return [1 / cells] * cells


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 16, 17, 100])
def test_every_id_is_as_likely_at_every_place(n: int) -> None:
    orders = [native.order(7, epoch, n, list(range(n))) for epoch in range(4000)]
    for position in {0, n // 2, n - 1}:
        assert chi_square(Counter(order[position] for order in orders), even(n)) < 5


@pytest.mark.parametrize("n", [3, 4, 5, 16, 50])
def test_neighbours_do_not_stay_together(n: int) -> None:
    """How far the ids of adjacent positions are apart, around the circle."""
    first = n // 3
    pairs = (native.order(3, epoch, n, [first, first + 1]) for epoch in range(8000))
    distances = Counter((b - a) % n - 1 for a, b in pairs)
    assert chi_square(distances, even(n - 1)) < 5


def orders_of_four(rounds: int) -> dict[tuple[int, ...], float]:
    """How often each order of four comes from the network if its rounds are truly random."""
    shares = {(0, 1, 2, 3): 1.0}
    for _ in range(rounds):
        following: Counter[tuple[int, ...]] = Counter()
        for order, share in shares.items():
            for mix in itertools.product((0, 1), repeat=2):
                following[tuple((x & 1) << 1 | x >> 1 ^ mix[x & 1] for x in order)] += share / 4
        shares = dict(following)
    return shares


def test_orders_of_four_occur_as_the_network_gives_them() -> None:
    """The smallest network has two bits, and is the least even: no order is rarer than 0.9375 of its fair share."""
    shares = orders_of_four(rounds=6)
    assert len(shares) == 24
    assert 24 * min(shares.values()) == 0.9375
    numbers = {order: number for number, order in enumerate(shares)}
    drawn = Counter(numbers[tuple(native.order(1, epoch, 4, [0, 1, 2, 3]))] for epoch in range(24_000))
    assert chi_square(drawn, list(shares.values())) < 5


def test_epochs_and_seeds_differ() -> None:
    n = 1000
    orders = [native.order(seed, epoch, n, list(range(n))) for seed in (0, 1, 2**63) for epoch in range(5)]
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12  # 1 is expected


def test_units_are_uniform() -> None:
    """Kolmogorov and Smirnov's distance, along positions and along draws of one position."""
    rows = native.units(5, 3, 0, list(range(20_000)), 3)
    columns = [list(column) for column in zip(*rows, strict=True)]
    (wide,) = native.units(5, 3, 0, [77], 20_000)
    for values in (*columns, wide):
        values.sort()
        distance = max(abs(value - (i + 0.5) / len(values)) for i, value in enumerate(values))
        assert distance < 1.95 / math.sqrt(len(values))
        assert values[0] >= 0
        assert values[-1] < 1


def test_units_of_other_places_are_unrelated() -> None:
    size = 20_000
    positions = list(range(size))
    base = [row[0] - 0.5 for row in native.units(5, 3, 0, positions, 2)]
    others = {
        "draw": [row[1] for row in native.units(5, 3, 0, positions, 2)],
        "epoch": [row[0] for row in native.units(5, 4, 0, positions, 2)],
        "stream": [row[0] for row in native.units(5, 3, 1, positions, 2)],
        "seed": [row[0] for row in native.units(6, 3, 0, positions, 2)],
        "position": [row[0] for row in native.units(5, 3, 0, [*positions[1:], size], 2)],
    }
    for name, values in others.items():
        correlation = 12 * sum(a * (b - 0.5) for a, b in zip(base, values, strict=True)) / size
        assert abs(correlation) < 5 / math.sqrt(size), name


def test_both_builds_agree() -> None:
    folder = Path(native.__file__).parent
    libraries = sorted(folder.glob("_native*.so"))
    assert libraries
    base = ctypes.CDLL(str(folder / "_native.so"))
    results = set()
    for path in libraries if base.ps_has_avx2() else [folder / "_native.so"]:
        library = ctypes.CDLL(str(path))
        library.ps_order.argtypes = native.lib.ps_order.argtypes
        library.ps_units.argtypes = native.lib.ps_units.argtypes
        positions = (ctypes.c_int64 * 999)(*range(999))
        ids, units = (ctypes.c_int64 * 999)(), (ctypes.c_double * (999 * 7))()
        assert library.ps_order(9, 2, 1234, positions, 999, ids) == 0
        library.ps_units(9, 2, 1, positions, 999, 7, units)
        results.add((bytes(ids), bytes(units)))
    assert len(results) == 1
