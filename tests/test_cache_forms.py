"""How the cache's budget is divided between encoded and decoded samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.forms import Costs, Split, chosen, split

PHOTO = Costs(encoded_bytes=100e3, decoded_bytes=570e3, fetch_s=0.0, decode_s=0.9e-3)


def stored_at(rate: float) -> Costs:
    """A photograph on storage that gives a worker so many bytes a second."""
    return Costs(PHOTO.encoded_bytes, PHOTO.decoded_bytes, PHOTO.encoded_bytes / rate, PHOTO.decode_s)


def saved_s(costs: Costs, of: Split) -> float:
    return of.encoded * costs.fetch_s + of.decoded * (costs.fetch_s + costs.decode_s)


def taken(costs: Costs, of: Split) -> float:
    return of.encoded * costs.encoded_bytes + of.decoded * costs.decoded_bytes


costs_ = st.builds(Costs, st.floats(1, 1000), st.floats(1, 1000), st.floats(0, 10), st.floats(0, 10))


@given(costs_, st.integers(1, 12), st.floats(0, 12_000))
def test_no_other_split_within_the_budget_saves_more(costs: Costs, samples: int, budget: float) -> None:
    found = split(costs, samples, budget)
    assert taken(costs, found) <= budget * (1 + 1e-9)
    assert found.encoded + found.decoded <= samples
    others = [Split(e, d) for e in range(samples + 1) for d in range(samples + 1 - e)]
    best = max(saved_s(costs, other) for other in others if taken(costs, other) <= budget)
    # whole samples: the last one of either form may not fit
    assert saved_s(costs, found) >= best - (abs(costs.decode_s) + costs.fetch_s) * 2 - 1e-9


@given(costs_, st.integers(1, 10**6), st.floats(0, 1e9))
def test_many_samples_are_split_as_well_as_fractions_would_be(costs: Costs, samples: int, budget: float) -> None:
    found = split(costs, samples, budget)
    corners = [
        (0.0, min(samples, budget / costs.decoded_bytes)),
        (min(samples, budget / costs.encoded_bytes), 0.0),
    ]
    if costs.decoded_bytes > costs.encoded_bytes:
        both = (budget - samples * costs.encoded_bytes) / (costs.decoded_bytes - costs.encoded_bytes)
        if 0 <= both <= samples:
            corners.append((samples - both, both))
    best = max(e * costs.fetch_s + d * (costs.fetch_s + costs.decode_s) for e, d in corners)
    assert saved_s(costs, found) >= best - 2 * (costs.fetch_s + abs(costs.decode_s)) - 1e-6 * best


def test_fast_storage_has_pixels_cached_and_slow_storage_files() -> None:
    assert split(stored_at(2e9), 1000, 57e6) == Split(0, 100)
    assert split(stored_at(50e6), 1000, 57e6) == Split(570, 0)


def test_what_slow_storage_leaves_of_the_budget_goes_to_pixels() -> None:
    assert split(stored_at(50e6), 1000, 100e6 + 47e6) == Split(900, 100)
    assert split(stored_at(50e6), 1000, 1e9) == Split(0, 1000)


def test_pixels_that_are_smaller_than_files_are_cached_whatever_the_storage() -> None:
    for fetch in (0.0, 1e-3, 1.0):
        assert split(Costs(1e6, 150e3, fetch, 5e-3), 1000, 75e6) == Split(0, 500)


def test_where_decoding_costs_nothing_files_are_cached() -> None:
    assert split(Costs(100, 100, 0.1, 0.0), 10, 450) == Split(4, 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("stride", [1, 2, 10, 1000])
def test_the_share_holds_for_any_regular_part_of_the_ids(share: float, stride: int) -> None:
    ids = range(0, 5000 * stride, stride)
    decoded = sum(chosen(id, share) == "decoded" for id in ids)
    assert abs(decoded / 5000 - share) < 0.01


@given(st.integers(0, 2**40), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_decodes_what_a_smaller_one_did(id: int, one: float, two: float) -> None:
    if chosen(id, min(one, two)) == "decoded":
        assert chosen(id, max(one, two)) == "decoded"
