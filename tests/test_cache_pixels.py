"""Pixels in the cache: later epochs start from where they lie, and nobody can tell from the batches."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jpegs
from arenas import MIB, again, ended, forked, opened, shelf_of
from penstock.cache.either import EitherReader
from penstock.cache.pixels import PixelCache
from penstock.cache.reader import CachedReader
from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize
from penstock.decode import Decode
from penstock.fuse import DecodeCrop, fuse_decode
from penstock.graph import Operator, Reader, Sample
from penstock.stem import Cut, Stem, stem
from test_fuse import chain, run
from test_stem import chains, drawn


def stem_of(*operators: Operator) -> Stem:
    found = stem(fuse_decode(chain(*operators)))
    assert isinstance(found, Stem)
    return found


def photo(id: int) -> Sample:
    data = jpegs.saved(jpegs.photo(40 + id % 30, 50 + id % 7, id))
    return {"image": data, "label": id, "boxes": np.array([[1, 2, 8, 9]], np.float32)}


def finished(cache: PixelCache, id: int, units: list[float], first: int) -> Sample | None:
    sample, used = cache.begin(id, units), first
    for operator in cache.rest if sample is not None else ():
        assert sample is not None
        sample = operator.apply(sample, units[used : used + operator.units])
        used += operator.units
    return sample


def equal(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) and np.asarray(one[name]).dtype == np.asarray(other[name]).dtype
        for name in one
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains, st.integers(0, 10**6), st.sampled_from(["RGB", "L"]))
def test_what_comes_of_cached_pixels_is_what_the_pipeline_makes(
    operators: tuple[Operator, ...], seed: int, mode: Any
) -> None:
    graph = fuse_decode(chain(Decode(mode), *operators))
    found = stem(graph)
    assert isinstance(found, Stem)
    with opened() as arena:
        cache = PixelCache(shelf_of(arena, 4), found)
        for epoch in range(3):
            units = drawn(operators, seed + epoch)
            if epoch == 0:
                assert cache.begin(1, units) is None
                assert cache.wants(photo(seed % 99))
                assert cache.keep(1, photo(seed % 99))[1]
            result = finished(cache, 1, units, found.rest[0].units)
            assert result is not None
            assert equal(result, run(graph, photo(seed % 99), units))


def test_only_what_can_be_decoded_and_kept_is_cached() -> None:
    with opened() as arena:
        cache = PixelCache(shelf := shelf_of(arena, 4), stem_of(Decode(), Flip()))
        assert cache.keep(0, {"image": b"nothing"}) == (None, False)
        grown, kept = cache.keep(1, {**photo(1), "other": (1, 2)})
        assert grown is not None
        assert grown["image"].shape == (51, 41, 3)
        assert not kept
        assert cache.keep(2, photo(2))[1]
        assert shelf.held[0] == 1


def test_without_room_the_pixels_serve_this_epoch_alone() -> None:
    with opened(MIB) as arena:
        cache = PixelCache(shelf := shelf_of(arena, 400), stem_of(Decode(), Flip()))
        for id in range(400):
            grown, _ = cache.keep(id, photo(id))
            assert grown is not None
            assert grown["image"].shape[2] == 3
        held = shelf.held[0]
        assert 50 < held < 400
        assert sum(cache.begin(id, [0.0]) is not None for id in range(400)) == held
        assert not cache.wants(photo(0))
        png = {"image": jpegs.saved(jpegs.photo(60, 60), "PNG")}
        assert not cache.wants(png)  # its size is not known, and the last one found no room


def test_memory_that_is_given_back_under_a_crop_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as arena:
        cache = PixelCache(shelf_of(arena, 4), stem_of(Decode(), RandomResizedCrop(20)))
        cache.keep(0, photo(0))
        apply = Cut.apply

        def late(self: Cut, sample: Sample, units: Any) -> Sample:
            arena.give_back(lambda: 4 * MIB)
            return apply(self, sample, units)

        units = [0.3] * 22
        assert cache.begin(0, units) is not None
        monkeypatch.setattr(Cut, "apply", late)
        assert cache.begin(0, units) is None


def test_pixels_of_what_was_stored_anew_are_given_up() -> None:
    stamps = {0: b"one", 1: b"one"}
    with opened() as arena:

        def fresh() -> PixelCache:
            return PixelCache(shelf_of(again(arena), 4), stem_of(Decode(), Flip()), stamps.__getitem__)

        for id in range(2):
            assert fresh().keep(id, photo(id), b"one")[1]
        cache = fresh()
        assert cache.begin(0, [0.0]) is not None
        stamps |= {0: b"two", 1: b"two"}
        assert cache.begin(0, [0.0]) is not None  # met before
        assert cache.begin(1, [0.0]) is None
        assert fresh().begin(0, [0.0]) is None
        assert fresh().begin(0, [0.0]) is None


def test_damaged_pixels_are_noticed() -> None:
    with opened() as arena:
        cache = PixelCache(shelf := shelf_of(arena, 4), stem_of(Decode(), Flip()))
        cache.keep(0, photo(0))
        (byte,) = os.pread(arena.descriptors[1], 1, 500)
        os.pwrite(arena.descriptors[1], bytes([byte ^ 1]), 500)
        assert cache.begin(0, [0.0]) is None
        assert shelf.held[0] == 0


def test_a_sample_that_is_looked_at_is_the_one_that_was_stored() -> None:
    with opened() as arena:
        shelf = shelf_of(arena, 10)
        assert shelf.look(3) is None
        for id in (-1, 10, 2**70):
            assert shelf.look(id) is None
        shelf.put(3, b"pixels", b"note")
        seen = shelf.look(3)
        assert seen is not None
        assert (bytes(seen.data), seen.note) == (b"pixels", b"note")
        assert seen.data.readonly
        assert shelf.still(3, seen.word)
        shelf.spoil(3)
        assert not shelf.still(3, seen.word)
        assert shelf.look(3) is None


@pytest.mark.processes
def test_crops_of_memory_that_is_being_given_back_are_right_or_none() -> None:
    """A grey image tells its id in every pixel."""
    with opened(64 * MIB) as arena:
        shelf = shelf_of(arena, 300)
        note = b'\0\x22\0\0\0[["image","plain",[200,300,3]]]   '
        for id in range(300):
            assert shelf.put(id, bytes([id % 255 + 1]) * 180_000, note)
        operators = (Decode(), RandomResizedCrop(64), Flip())

        def read() -> None:
            mine = again(arena)
            own = shelf_of(mine, 300)
            cache = PixelCache(own, stem_of(*operators))
            rng = random.Random(os.getpid())
            deadline = time.monotonic() + 2
            while own.held[0] and time.monotonic() < deadline:
                id = rng.randrange(300)
                found = cache.begin(id, [rng.random() for _ in range(23)])
                assert found is None or (found["image"] == id % 255 + 1).all()

        readers = [forked(read) for _ in range(3)]
        time.sleep(0.2)
        while shelf.held[0]:
            arena.give_back(lambda: MIB // 2)
        assert [ended(pid) for pid in readers] == [0] * 3


def test_deterministic_pipelines_are_cached_to_their_end() -> None:
    operators = (Decode(), Resize(30), CenterCrop(24))
    with opened() as arena:
        cache = PixelCache(shelf := shelf_of(arena, 4), stem_of(*operators))
        cache.keep(0, photo(0))
        assert shelf.held[1] < 24 * 24 * 3 + 200
        found = cache.begin(0, [])
        assert found is not None
        assert np.array_equal(found["image"], run(fuse_decode(chain(*operators)), photo(0), [])["image"])
        found["image"][:] = 0  # it is its own
        again_found = cache.begin(0, [])
        assert again_found is not None
        assert again_found["image"].any()


def test_a_crop_that_fails_says_what_it_says_without_the_cache() -> None:
    with opened() as arena:
        cache = PixelCache(shelf_of(arena, 4), stem_of(Decode(), RandomCrop(500)))
        cache.keep(0, photo(0))
        with pytest.raises(ValueError, match="random_crop: the image has 50 x 40 pixels"):
            cache.begin(0, [0.1, 0.2])


def test_who_needs_encoded_bytes_has_them_kept_unless_the_pixels_are() -> None:
    """As a GPU lane's stagers do."""

    class One(Reader):
        asked = 0

        def read(self, id: int) -> Sample:
            self.asked += 1
            return {"image": photo(id)["image"], "label": id}

    with opened() as arena:
        source, encoded, pixels = One(), shelf_of(arena, 4), shelf_of(arena, 4, b"the same, pixels")
        reader = CachedReader(source, encoded, encoded._tally, 4)
        either = EitherReader(
            reader, PixelCache(pixels, stem_of(Decode(), Flip())), None, DecodeCrop(Decode(), (Flip(),)), lambda: True
        )
        assert either.begin(0, [0.1])[1]
        assert (source.asked, pixels.has(0), encoded.has(0)) == (1, True, False)
        assert either.encoded(0)["image"] == either.encoded(0)["image"] == photo(0)["image"]
        assert (source.asked, encoded.has(0)) == (3, False)
        for _ in range(2):
            assert either.encoded(1)["image"] == photo(1)["image"]
        assert (source.asked, encoded.has(1)) == (4, True)
        sample, begun = either.begin(1, [0.1])
        assert (sample["image"], begun) == (photo(1)["image"], False)
        assert source.asked == 4
