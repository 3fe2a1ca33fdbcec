"""A cached sample is the sample that the source gave, field by field; what the source refuses stays refused."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenas import KEY, MIB, opened
from penstock.cache import Arena
from penstock.cache.reader import CachedReader, encoded_key, why_not_cached
from penstock.cache.tally import Tally
from penstock.graph import Field, Reader, Sample, Source, Spec
from penstock.read import Arrays, Dataset, Files

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=5000)
)
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
samples = st.dictionaries(st.sampled_from(["image", "audio", "label", "name", "json", "x"]), plain | nested, min_size=1)


class Listed(Reader):
    """Samples from a list; an exception among them is raised."""

    def __init__(self, listed: list[Any]) -> None:
        self.listed, self.asked = listed, 0
        self.marks = [b"first"] * len(listed)

    def read(self, id: int) -> Sample:
        self.asked += 1
        if not 0 <= id < len(self.listed):
            raise KeyError(f"no sample {id}")
        if isinstance(self.listed[id], Exception):
            raise self.listed[id]
        return dict(self.listed[id])

    def stamp(self, id: int) -> bytes:
        return self.marks[id]


def cached(arena: Arena, reader: Listed) -> CachedReader:
    descriptor = Tally.create(1)
    row = Tally(descriptor, 1).row(0)
    os.close(descriptor)
    shelf = arena.shelf(KEY, len(reader.listed), row)
    return CachedReader(reader, shelf, row, len(reader.listed))


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@settings(max_examples=150, deadline=None)
@given(listed=st.lists(samples, min_size=1, max_size=5))
def test_every_read_gives_what_the_source_gave(listed: list[Sample]) -> None:
    with opened() as arena:
        source = Listed(listed)
        reader = cached(arena, source)
        for _ in range(4):
            for id, expected in enumerate(listed):
                found = reader.read(id)
                assert same(found, expected)
                found["image"] = "what operators do with a sample"
        assert source.asked == len(listed), "once each"


def test_arrays_and_numbers_of_numpy_keep_their_type() -> None:
    boxes = np.arange(8, dtype=np.float32).reshape(2, 4)
    listed = [{"image": b"jpeg", "boxes": boxes, "label": np.int64(3)}]
    with opened() as arena:
        reader = cached(arena, Listed(listed))
        for _ in range(3):
            found = reader.read(0)
            assert type(found["label"]) is np.int64
            assert found["boxes"].dtype == np.float32
            np.testing.assert_array_equal(found["boxes"], boxes)


def test_more_shapes_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.reader._MOST_SHAPES", 4)
    listed = [{"image": b"%d" % number, "label": number} for number in range(10)]
    with opened() as arena:
        reader = cached(arena, Listed(listed))
        for _ in range(3):
            assert [reader.read(id) for id in range(10)] == listed


def test_what_the_source_refuses_is_refused_each_time() -> None:
    with opened() as arena:
        reader = cached(arena, Listed([{"image": b"x"}, ValueError("cut off")]))
        for _ in range(2):
            with pytest.raises(ValueError, match="cut off"):
                reader.read(1)
            for id in (-1, 2):
                with pytest.raises(KeyError, match="no sample"):
                    reader.read(id)


def test_a_sample_that_was_stored_anew_is_read_anew_by_the_next_process() -> None:
    with opened() as arena:
        source = Listed([{"image": b"old", "label": 1}])
        first = cached(arena, source)
        first.read(0), first.read(0)
        source.listed[0]["image"], source.marks[0] = b"new", b"second"
        assert first.read(0)["image"] == b"old", "this process has compared it before"
        assert cached(arena, source).read(0)["image"] == b"new"
        assert first.read(0)["image"] == b"new"


def test_a_sample_that_is_given_back_or_closed_comes_from_the_source() -> None:
    arena = Arena.create(MIB)
    source = Listed([{"image": b"x" * 1000} for _ in range(10)])
    reader = cached(arena, source)
    for _ in range(3):
        assert [reader.read(id)["image"] for id in range(10)] == [b"x" * 1000] * 10
    arena.give_back(lambda: MIB)
    assert [reader.read(id)["image"] for id in range(10)] == [b"x" * 1000] * 10
    assert source.asked == 20
    arena.close()


class Encoded(Source):
    """As its arguments say."""

    def __init__(self, print: str, count: int = 3, field: str = "image") -> None:
        self.print, self.count, self.field = print, count, field

    def __len__(self) -> int:
        return self.count

    def spec(self) -> Spec:
        return {self.field: Field("encoded")}

    def open(self) -> Reader:
        raise AssertionError("nobody asks")

    def place(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        return self.print


def test_data_sets_have_keys_of_their_own(tmp_path: Any) -> None:
    (tmp_path / "a.wav").write_bytes(b"x")
    sources: list[Source] = [Encoded("a"), Encoded("b"), Encoded("a", 4), Encoded("a", field="audio")]
    sources += [Files([tmp_path / "a.wav"], field=field) for field in ("image", "audio")]  # type: ignore[arg-type]
    keys = [encoded_key(source) for source in sources]
    assert len(set(keys)) == len(keys)
    assert encoded_key(Encoded("a")) == keys[0]


def test_what_is_not_cached_says_why() -> None:
    assert why_not_cached(Encoded("a")) is None
    assert "no encoded images" in str(why_not_cached(Arrays(x=np.zeros(3))))
    assert "code of yours" in str(why_not_cached(Dataset([1, 2])))
