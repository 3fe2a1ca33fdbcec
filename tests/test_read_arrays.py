"""Arrays, memory maps and torch datasets as sources: no copies, nothing of the user's changed."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import penstock as ps
from penstock.errors import GraphError
from penstock.graph import Field
from penstock.read import Arrays, Dataset

PIXELS = np.arange(5 * 4 * 3 * 3, dtype=np.uint8).reshape(5, 4, 3, 3)
LABELS = np.array([3, 1, 2**62, -1, 0])


def test_rows_are_samples_with_exact_shapes_and_types() -> None:
    source = Arrays(
        image=PIXELS, label=LABELS, score=np.zeros((5, 2), np.float16), name=np.array(list("abcde"), object)
    )
    assert len(source) == 5
    assert source.spec() == {
        "image": Field("image", (4, 3, 3), "uint8"),
        "label": Field("value", (), "int64"),
        "score": Field("value", (2,), "float16"),
        "name": Field("any"),
    }
    sample = source.open().read(2)
    assert np.array_equal(sample["image"], PIXELS[2])
    assert sample["label"] == 2**62
    assert sample["name"] == "c"
    assert not source.clean


def test_samples_share_the_memory_of_the_array_and_cannot_change_it() -> None:
    tensor = torch.zeros(5, 2)
    tracemalloc.start()
    big = np.zeros((50, 100, 100, 3), np.uint8)
    before = tracemalloc.get_traced_memory()[0]
    sample = Arrays(image=big).open().read(7)
    assert tracemalloc.get_traced_memory()[1] - before < 100_000
    tracemalloc.stop()
    assert np.shares_memory(sample["image"], big)
    tensor[3, 1] = 7
    row = Arrays(row=tensor).open().read(3)["row"]
    assert row.tolist() == [0, 7]
    for view in (sample["image"], row):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
    big[7] = 1  # the user's own array stays writeable
    assert sample["image"].all()


def test_gray_images_get_a_channel_and_audio_and_boxes_are_known() -> None:
    source = Arrays(image=PIXELS[..., 0], audio=np.zeros((5, 2, 80), np.float32), boxes=np.zeros((5, 6, 4), np.float32))
    assert {name: field.kind for name, field in source.spec().items()} == {n: n for n in ("image", "audio", "boxes")}
    assert source.spec()["image"].shape == (4, 3, 1)
    assert np.array_equal(source.open().read(1)["image"], PIXELS[1, :, :, :1])
    assert Arrays(image=PIXELS.astype(np.float32)).spec()["image"].kind == "value"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least one array"),
        ({"image": PIXELS, "label": LABELS[:4]}, r"\{'image': 5, 'label': 4\}"),
        ({"image": PIXELS[:0]}, "no rows"),
        ({"label": 3}, "single value 3"),
        ({"id": LABELS}, "'id'"),
        ({"image": np.zeros((5, 3, 32, 32), np.uint8)}, r"channels first: use .transpose\(0, 2, 3, 1\)"),
        ({"x": torch.zeros(3, requires_grad=True)}, "x .Tensor. cannot be read"),
        ({"x": torch.zeros(3, dtype=torch.bfloat16)}, "x .Tensor. cannot be read.*BFloat16"),
        ({"x": [[1, 2], [3]]}, "x .list. cannot be read"),
    ],
)
def test_arrays_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Arrays(**fields)


@pytest.mark.parametrize("id", [-1, 5])
def test_ids_outside_are_refused_rather_than_wrapped(id: int) -> None:
    with pytest.raises(KeyError):
        Arrays(label=LABELS).open().read(id)


def test_memory_maps_are_pickled_as_their_file(tmp_path: Path) -> None:
    written = np.memmap(tmp_path / "x.bin", np.int32, "w+", offset=12, shape=(100_000, 10))
    written[:] = np.arange(1_000_000).reshape(100_000, 10)
    written.flush()
    source = Arrays(x=np.memmap(tmp_path / "x.bin", np.int32, "r", offset=12, shape=(100_000, 10)))
    assert source.clean
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    assert again.open().read(99_999)["x"].tolist() == written[99_999].tolist()
    assert again.fingerprint() == source.fingerprint()
    assert again.spec() == source.spec()


@given(st.integers(0, 19), st.integers(1, 20), st.integers(1, 3), st.integers(0, 9000))
def test_any_slice_of_a_map_comes_back_as_it_was(first: int, count: int, step: int, offset: int) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        values = np.arange(20 * 3, dtype=np.uint16).reshape(20, 3)
        file.write(bytes(offset) + values.tobytes())
        file.flush()
        mapped = np.memmap(file.name, np.uint16, "r", offset=offset, shape=(20, 3))
        part = mapped[first : first + count : step]
        source = Arrays(x=part)
        assert source.clean == part.flags.c_contiguous
        again = pickle.loads(pickle.dumps(source)).open()
        assert [again.read(i)["x"].tolist() for i in range(len(part))] == part.tolist()


def test_a_private_map_with_changes_of_its_own_travels_by_fork(tmp_path: Path) -> None:
    np.zeros(10, np.uint8).tofile(tmp_path / "x.bin")
    assert not Arrays(x=np.memmap(tmp_path / "x.bin", np.uint8, "c")).clean
    assert not Arrays(x=np.memmap(tmp_path / "x.bin", np.uint8, "r"), y=np.arange(10)).clean


def test_a_gray_map_and_npy_files_stay_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "gray.npy", PIXELS[..., 0].copy())
    source = Arrays(image=np.load(tmp_path / "gray.npy", mmap_mode="r"))
    assert source.clean
    assert np.array_equal(pickle.loads(pickle.dumps(source)).open().read(4)["image"], PIXELS[4, :, :, :1])


def test_the_fingerprint_of_arrays_follows_shape_type_and_content() -> None:
    prints = {
        Arrays(**fields).fingerprint()
        for fields in ({"x": LABELS}, {"y": LABELS}, {"x": LABELS[:4]}, {"x": LABELS + 1}, {"x": LABELS.astype("f8")})
    }
    assert len(prints) == 5
    assert Arrays(x=LABELS.copy()).fingerprint() in prints


class Listed:
    """A map-style dataset over a list."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_tuples_dicts_and_single_items_become_fields() -> None:
    pair = namedtuple("pair", "left right")
    reader = Dataset(Listed((b"jpeg", 3), [b"png", 4], {"x": 1, "y": "z"}, 5, pair(1, 2))).open()
    assert [reader.read(i) for i in range(5)] == [
        {"image": b"jpeg", "label": 3},
        {"image": b"png", "label": 4},
        {"x": 1, "y": "z"},
        {"image": 5},
        {"left": 1, "right": 2},
    ]


def test_fields_name_elements_and_choose_entries() -> None:
    reader = Dataset(Listed((1, 2, 3), {"a": 1, "b": 2, "c": 3, "id": 9}), fields=["a", "b", "c"]).open()
    assert reader.read(0) == reader.read(1) == {"a": 1, "b": 2, "c": 3}
    assert Dataset(Listed(0), fields=["a"]).spec() == {"a": Field("any")}
    with pytest.raises(ValueError, match=r"3 elements.*name them with fields="):
        Dataset(Listed((1, 2, 3))).open().read(0)
    with pytest.raises(ValueError, match="no entry 'a', only z"):
        Dataset(Listed({"z": 1}), fields=["a"]).open().read(0)
    with pytest.raises(ValueError, match="other than 'id'"):
        Dataset(Listed({"id": 1})).open().read(0)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "RGBA"])
def test_pillow_images_become_rgb_arrays(mode: str) -> None:
    image = Image.fromarray(PIXELS[0]).convert(mode)
    found = Dataset(Listed((image, 0))).open().read(0)["image"]
    assert (found.dtype, found.shape) == (np.uint8, (4, 3, 3))
    assert np.array_equal(found, np.asarray(image.convert("RGB")))


def test_a_lazily_opened_pillow_file_is_read() -> None:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(buffer, "png")
    assert np.array_equal(Dataset(Listed(Image.open(buffer))).open().read(0)["image"], PIXELS[0])


def test_tensors_stay_channels_first_in_a_batch() -> None:
    images = torch.rand(3, 3, 8, 6)
    data = torch.utils.data.TensorDataset(images, torch.arange(3))
    with ps.Loader(ps.dataset(data).batch(3), workers=0, shuffle=False) as loader:
        (batch,) = loader
    assert torch.equal(batch["image"], images)


def test_operators_say_that_they_do_not_take_tensors() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(3, 3, 8, 6), torch.arange(3))
    with (
        ps.Loader(ps.dataset(data).flip().batch(3), workers=0) as loader,
        pytest.raises(ps.SampleError, match="HWC numpy arrays, not Tensor"),
    ):
        next(iter(loader))


def test_arrays_of_a_dataset_cannot_be_written_by_operators() -> None:
    own = np.zeros(3)
    sample = Dataset(Listed(own)).open().read(0)
    with pytest.raises(ValueError, match="read-only"):
        sample["image"][0] = 1
    own[0] = 1  # still the user's to write


def test_a_dataset_is_kept_as_it_is_and_not_asked_before_it_is_read() -> None:
    class Untouchable(Listed):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("opened too early")

    source = Dataset(Untouchable(1, 2))
    assert not source.clean
    assert (len(source), source.place(1), list(source.spec())) == (2, "Untouchable[1]", ["image", "label"])
    with pytest.raises(RuntimeError, match="too early"):
        source.open().read(0)
    assert source.fingerprint() != Dataset(Untouchable(1, 2, 3)).fingerprint()


@pytest.mark.parametrize(
    ("dataset", "fields", "message"),
    [
        (iter([]), None, "map-style dataset"),
        (Listed(), None, "Listed is empty"),
        (Listed(1), "image", "list of names"),
        (Listed(1), [], "list of names"),
        (Listed(1), ["id"], "none of them 'id'"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, fields: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Dataset(dataset, fields)
