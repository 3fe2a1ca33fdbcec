"""Samples that cannot be prepared, and users' code that fails: what is said, and what becomes of the rest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from loading import Batch, assert_same, copied, epochs, ids, rest

pytestmark = pytest.mark.processes


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff\xd8" + os.urandom(500))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_by_text(path: Path) -> None:
    path.write_text("not an image at all")


@pytest.fixture
def tree(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def _pipe(tree: Path) -> ps.Pipe:
    return ps.files(tree).decode().random_resized_crop(16).batch(6)


def _file(tree: Path, id: int) -> Path:
    return sorted(tree.glob("*/*.jpg"))[id]


@pytest.mark.parametrize("spoil", [_truncate, _garble, _empty, _replace_by_text, Path.unlink])
@pytest.mark.parametrize("count", [0, 2])
def test_a_bad_file_is_named_at_its_place_and_the_epoch_goes_on(
    tree: Path, spoil: Callable[[Path], Any], count: int
) -> None:
    pipe = _pipe(tree)
    (expected,) = epochs(pipe, workers=0)
    bad = int(expected[2]["id"][3])
    path = _file(tree, bad)
    spoil(path)
    with ps.Loader(pipe, workers=count) as loader:
        batches = iter(loader)
        found = [copied(next(batches)) for _ in range(2)]
        with pytest.raises(ps.SampleError) as caught:
            next(batches)
        state = loader.state_dict()
        found += [copied(batch) for batch in batches]
        assert_same(found, expected[:2] + expected[3:])
        assert [error["id"] for error in loader.stats()["errors"]] == [bad]
        loader.load_state_dict(state)
        assert_same(rest(loader), expected[3:])
    error = caught.value
    assert (error.id, error.place) == (bad, str(path))
    assert error.operator == ("read" if spoil in (_empty, Path.unlink) else "decode+random_resized_crop")
    assert str(path) in str(error)
    assert f"sample {bad}" in str(error)


@pytest.mark.parametrize("many", [1, 7])
def test_skip_and_replace_have_one_outcome_for_any_number_of_workers(tree: Path, many: int) -> None:
    pipe = _pipe(tree)
    (clean,) = epochs(pipe, workers=0)
    order = ids(clean)
    for position in {1: [8], 7: [0, 5, 12, 13, 14, 15, 29]}[many]:
        _garble(_file(tree, order[position]))
    spoiled = {order[position] for position in {1: [8], 7: [0, 5, 12, 13, 14, 15, 29]}[many]}
    for on_error in ("skip", "replace"):
        outcomes = []
        for count in (0, 1, 3):
            with ps.Loader(pipe, workers=count, on_error=on_error) as loader:  # type: ignore[arg-type]
                found = rest(loader)
                stats = loader.stats()
            outcomes.append((found, stats["errors"], stats["bad_samples"]))
        for found, errors, bad in outcomes:
            assert_same(found, outcomes[0][0])
            assert (errors, bad) == outcomes[0][1:]
            assert {error["id"] for error in errors} == spoiled
            assert all(str(tree) in error["place"] and error["operator"] and error["reason"] for error in errors)
        found = outcomes[0][0]
        assert not spoiled & set(ids(found))
        if on_error == "skip":
            assert ids(found) == [id for id in order if id not in spoiled]
        else:
            assert [len(batch["id"]) for batch in found] == [6] * 5
            for batch, wanted in zip(found, clean, strict=True):
                for row in range(6):
                    if int(wanted["id"][row]) not in spoiled:
                        assert batch["image"][row].equal(wanted["image"][row])


def test_other_rows_of_a_batch_do_not_depend_on_the_bad_one(tree: Path) -> None:
    pipe = _pipe(tree)
    (clean,) = epochs(pipe, workers=0)
    bad = int(clean[1]["id"][2])
    _garble(_file(tree, bad))
    (found,) = epochs(pipe, workers=2, on_error="skip")
    keep = [0, 1, 3, 4, 5]
    for name in clean[1]:
        assert found[1][name].equal(clean[1][name][keep])
    assert_same(found[:1] + found[2:], clean[:1] + clean[2:])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_batch_of_bad_samples_only(tree: Path, count: int) -> None:
    pipe = _pipe(tree)
    (clean,) = epochs(pipe, workers=0)
    for id in clean[2]["id"].tolist():
        _garble(_file(tree, id))
    (found,) = epochs(pipe, workers=count, on_error="skip")
    assert [len(batch["id"]) for batch in found] == [6, 6, 0, 6, 6]
    assert found[2]["image"].shape == (0, 3, 16, 16)
    assert found[2]["image"].dtype == clean[0]["image"].dtype
    (found,) = epochs(pipe, workers=count, on_error="replace")
    assert [len(batch["id"]) for batch in found] == [6] * 5


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_sample_is_bad(tree: Path, count: int) -> None:
    pipe = _pipe(tree)
    for id in range(30):
        _garble(_file(tree, id))
    with ps.Loader(pipe, workers=count, on_error="skip") as loader:
        assert [len(batch["id"]) for batch in loader] == [0] * 5
        assert [error["id"] for error in loader.stats()["errors"]] == list(range(30))
    with ps.Loader(pipe, workers=count, on_error="replace") as loader, pytest.raises(ps.SampleError):
        next(iter(loader))


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("ragged", ["error", "pad", "list"])
def test_a_batch_of_bad_samples_only_whose_sizes_only_samples_could_tell(tree: Path, ragged: Any, count: int) -> None:
    _garble(_file(tree, 7))
    pipe = ps.files(tree).decode().batch(1, ragged=ragged)
    with ps.Loader(pipe, workers=count, on_error="skip", shuffle=False) as loader:
        found = list(loader)
    assert [len(batch["id"]) for batch in found] == [1] * 7 + [0] + [1] * 22
    whole, empty = found[0], found[7]
    assert empty.keys() == whole.keys()
    for name in whole:
        assert len(empty[name]) == 0
        assert type(empty[name]) is type(whole[name])
        if isinstance(whole[name], torch.Tensor):
            assert empty[name].dtype == whole[name].dtype
            assert empty[name].ndim == whole[name].ndim


@pytest.mark.parametrize("count", [0, 2])
def test_a_batch_that_a_function_refused_has_no_rows(count: int) -> None:
    pipe = ps.arrays(x=np.arange(20)).map(_raise_at_nine).batch(1)
    with ps.Loader(pipe, workers=count, on_error="skip", shuffle=False) as loader:
        assert [len(batch["x"]) for batch in loader] == [1] * 9 + [0] + [1] * 10


def _raise_at_nine(sample: Batch) -> Batch:
    if sample["x"] == 9:
        raise LookupError("nine is not to be found")
    return sample


@pytest.mark.parametrize("count", [0, 2])
def test_a_users_traceback_is_in_the_chain(count: int) -> None:
    pipe = ps.arrays(x=np.arange(20)).map(_raise_at_nine).batch(4)
    with ps.Loader(pipe, workers=count, shuffle=False) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        with pytest.raises(ps.SampleError, match=r"sample 9.*LookupError: nine is not to be found") as caught:
            next(batches)
    error = caught.value
    assert error.operator == "map(_raise_at_nine)"
    chain = str(error.__cause__)
    assert "test_loader_errors.py" in chain
    assert 'raise LookupError("nine is not to be found")' in chain


class _OddError(Exception):
    """Cannot be pickled, and does not come apart the way exceptions do."""

    def __init__(self, one: object, *, two: object) -> None:
        super().__init__(lambda: None)


@pytest.mark.parametrize("count", [0, 2])
def test_exceptions_of_any_kind_arrive(count: int) -> None:
    def fail(sample: Batch) -> Batch:
        raise _OddError(1, two=2)

    pipe = ps.arrays(x=np.arange(4)).map(fail).batch(2)
    with ps.Loader(pipe, workers=count) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(ps.SampleError, match="_OddError"):
                next(batches)
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_samples_that_do_not_fit_together_are_named(count: int) -> None:
    pipe = ps.arrays(x=np.arange(12)).map(lambda s: {"x": np.zeros(2 if s["x"] == 6 else 3)}).batch(4)
    with ps.Loader(pipe, workers=count, shuffle=False) as loader:
        batches = iter(loader)
        assert next(batches)["id"].tolist() == [0, 1, 2, 3]
        with pytest.raises(ps.PenstockError, match=r"(?s)sample 6.*ragged"):
            next(batches)
        assert next(batches)["id"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("count", [0, 2])
def test_a_function_that_returns_no_sample_is_told(count: int) -> None:
    pipe = ps.arrays(x=np.arange(4)).map(lambda sample: None).batch(2)
    with ps.Loader(pipe, workers=count) as loader, pytest.raises(ps.SampleError, match="it returned NoneType"):
        next(iter(loader))


@pytest.mark.parametrize("count", [0, 2])
def test_only_the_first_bad_row_of_a_failed_batch_counts(count: int) -> None:
    """Rows behind it may or may not have been tried, as the batch was cut."""

    def fail(sample: Batch) -> Batch:
        if sample["x"] % 4 >= 2:
            raise ValueError
        return {"row": np.zeros(2000)}

    pipe = ps.arrays(x=np.arange(16)).map(fail).batch(8)
    with ps.Loader(pipe, workers=count, shuffle=False) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(ps.SampleError):
                next(batches)
        assert [error["id"] for error in loader.stats()["errors"]] == [2, 10]
        assert loader.stats()["bad_samples"] == 2
