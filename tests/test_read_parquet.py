"""Parquet files as sources: rows in order, whatever the row groups, one group unpacked at a time."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import GraphError, MissingExtraError, SourceError
from penstock.read import Parquet
from penstock.read import parquet as module

HUGGING_FACE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encoded(i: int) -> bytes:
    return random.Random(i).randbytes(500 + i)


def table(first: int, count: int, kind: Any = HUGGING_FACE, **more: Any) -> pa.Table:
    rows = range(first, first + count)
    hugging_face = pa.types.is_struct(kind)
    images = [{"bytes": encoded(i), "path": f"{i}.jpg"} if hugging_face else encoded(i) for i in rows]
    return pa.table({"image": pa.array(images, kind), "label": pa.array(list(rows), pa.int64()), **more})


def write(path: Path, content: pa.Table, rows: int = 7, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content, path, row_group_size=rows, **options)
    return path


@pytest.mark.parametrize("kind", [HUGGING_FACE, pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_dictionary": False, "data_page_size": 1000}])
def test_rows_of_several_files_and_groups_come_in_order(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    write(tmp_path / "a.parquet", table(0, 20, kind), **options)
    write(tmp_path / "b.parquet", table(20, 5, kind), **options)
    source = Parquet(tmp_path)
    reader = pickle.loads(pickle.dumps(source)).open()
    assert len(source) == 25
    ids = list(range(25))
    random.Random(0).shuffle(ids)
    for id in ids:
        assert reader.read(id) == {"image": encoded(id), "label": id}
    assert source.place(22) == f"{tmp_path}/b.parquet: row 2"
    assert source.place(15) == f"{tmp_path}/a.parquet: row 15"
    assert source.spec()["image"].kind == "encoded"
    assert source.spec()["label"].dtype == "int64"
    assert type(reader.read(0)["label"]) is int


def test_patterns_lists_and_folders_name_the_same_files(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / "deep" / f"part-{i}.parquet", table(3 * i, 3))
    (tmp_path / "deep" / "_SUCCESS").write_bytes(b"")
    folder = Parquet(tmp_path)
    for same in (f"{tmp_path}/deep/part-{{0..2}}.parquet", f"{tmp_path}/deep/*.parquet", f"{tmp_path}/d*"):
        assert Parquet(same).fingerprint() == folder.fingerprint()
    assert Parquet([tmp_path / "deep/part-2.parquet", tmp_path / "deep/part-0.parquet"]).open().read(3)["label"] == 0


def test_other_columns_come_with_their_types(tmp_path: Path) -> None:
    more = {
        "score": pa.array([0.5, 1.5], pa.float32()),
        "box": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.float32(), 4)),
        "tags": pa.array([[1, 2, 3], []], pa.list_(pa.int16())),
        "caption": pa.array(["a", None]),
        "id": pa.array(["x", "y"]),
    }
    path = write(tmp_path / "x.parquet", table(0, 2, **more))
    source = Parquet(path, label="score", columns=["box", "tags", "caption"])
    first, second = (source.open().read(i) for i in range(2))
    assert (first["label"], first["label"].dtype) == (0.5, np.float32)
    assert (first["box"].tolist(), first["box"].dtype) == ([1, 2, 3, 4], np.float32)
    assert (first["tags"].tolist(), second["tags"].tolist(), second["tags"].dtype) == ([1, 2, 3], [], np.int16)
    assert (first["caption"], second["caption"]) == ("a", None)
    shapes = {name: (field.kind, field.shape, field.dtype) for name, field in source.spec().items()}
    assert shapes == {
        "image": ("encoded", None, None),
        "label": ("value", (), "float32"),
        "box": ("value", (4,), "float32"),
        "tags": ("value", (None,), "int16"),
        "caption": ("any", None, None),
    }
    with pytest.raises(GraphError, match="must not be called id"):
        Parquet(path, columns=["id"])


def test_audio_and_unlabelled_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(0, 3).rename_columns(["sound", "n"]))
    assert Parquet(path, image=None, audio="sound", label=None).open().read(2) == {"audio": encoded(2)}
    assert Parquet(path, image=None, label="n").open().read(2) == {"label": 2}


def test_hugging_face_class_names_are_kept(tmp_path: Path) -> None:
    about = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    content = table(0, 2).replace_schema_metadata({"huggingface": json.dumps(about)})
    assert Parquet(write(tmp_path / "x.parquet", content)).classes == ["cat", "dog"]
    assert Parquet(write(tmp_path / "y.parquet", table(0, 2))).classes == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "img"}, r"no column 'img' in .*x.parquet, only image, label, text; name another with image=.*None"),
        ({"label": "labels"}, r"no column 'labels' .*label=, or leave it out with None"),
        ({"columns": ["lable"]}, r"no column 'lable' .*name another with columns=$"),
        ({"image": "text"}, r"'text' of .*x.parquet is string; encoded bytes are needed"),
        ({"label": "text"}, r"label column 'text' of .* is string; numbers are needed"),
        ({"columns": "text"}, r"must be a list"),
        ({"image": None, "label": None}, r"no column is asked for"),
        ({"keep_bytes": -1}, r"keep_bytes"),
    ],
)
def test_columns_that_are_not_there_or_do_not_fit_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "x.parquet", table(0, 2, text=pa.array(["a", "b"])))
    with pytest.raises(GraphError, match=message):
        Parquet(path, **options)


def test_files_whose_columns_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 2))
    write(tmp_path / "b.parquet", table(0, 2).set_column(1, "label", pa.array([0.5, 1.5])))
    with pytest.raises(GraphError, match=r"columns of .*b.parquet are .*float64.*those of .*a.parquet .*int64"):
        Parquet(tmp_path)


def test_null_and_empty_values_fail_alone(tmp_path: Path) -> None:
    images = [{"bytes": b"x", "path": None}, {"bytes": None, "path": "a.jpg"}, None, {"bytes": b"", "path": None}]
    content = pa.table({"image": pa.array(images, HUGGING_FACE), "label": pa.array([1, 2, 3, 4])})
    reader = Parquet(write(tmp_path / "x.parquet", content)).open()
    assert reader.read(0) == {"image": b"x", "label": 1}
    for id, word in ((1, "null in this row .*only a path"), (2, "null"), (3, "empty")):
        with pytest.raises(ValueError, match=word):
            reader.read(id)
    content = pa.table({"image": pa.array([b"x"]), "label": pa.array([None], pa.int64())})
    with pytest.raises(ValueError, match="'label' is null"):
        Parquet(write(tmp_path / "y.parquet", content)).open().read(0)


def test_a_group_is_unpacked_once_while_it_is_kept_and_no_more_is_kept_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", table(0, 40), rows=10)
    unpacked = []
    unpack = module._ParquetReader._unpack

    def counted(self: Any, file: int, group: int) -> Any:
        unpacked.append(group)
        return unpack(self, file, group)

    monkeypatch.setattr(module._ParquetReader, "_unpack", counted)
    one_group = 10 * 700
    reader = Parquet(path, keep_bytes=2 * one_group).open()
    for id in (0, 5, 9, 15, 3, 12, 39, 0, 15, 1):
        reader.read(id)
    assert unpacked == [0, 1, 3, 0, 1]
    unpacked.clear()
    reader = Parquet(path, keep_bytes=0).open()
    for id in (0, 1, 2, 11, 12, 0):
        reader.read(id)
    assert unpacked == [0, 1, 0]


def test_reading_starts_no_thread_and_the_child_of_a_fork_reads_what_its_parent_has_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(0, 60))
    program = """
import os, signal, sys
from penstock.read import Parquet
source = Parquet(sys.argv[1])
threads = len(os.listdir("/proc/self/task"))
reader = source.open()
seen = [reader.read(i) for i in range(0, 60, 2)]
assert len(os.listdir("/proc/self/task")) == threads
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = all(reader.read(2 * i) == seen[i] for i in range(30))
        fresh = source.open()
        os._exit(0 if same and all(fresh.read(i)["label"] == i for i in range(60)) else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
    quiet = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, env=quiet)
    assert (done.stdout.strip(), done.stderr) == ("[0, 0, 0, 0]", "")


def test_a_file_that_changes_or_vanishes_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(0, 20))
    source = Parquet(path, keep_bytes=0)
    reader = source.open()
    reader.read(0)
    write(path, table(20, 20))
    os.utime(path, ns=(0, 1))
    for stale in (reader, source.open()):
        with pytest.raises(OSError, match=r"x.parquet changed while in use.*make the source again"):
            stale.read(10)
    assert Parquet(path).fingerprint() != source.fingerprint()
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"x.parquet"):
        reader.read(10)


def test_bytes_spoilt_on_disk_are_an_error_with_the_path(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(0, 20), compression="zstd")
    before = path.stat()
    reader = Parquet(path).open()
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(bytes(2000))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises((ValueError, OSError), match=r"x.parquet"):
        reader.read(0)


def test_what_is_no_parquet_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no .parquet file at"):
        Parquet(tmp_path)
    whole = write(tmp_path / "x.parquet", table(0, 20)).read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[:-100])
    with pytest.raises(SourceError, match=r"x.parquet is no whole Parquet file"):
        Parquet(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match=r"x.parquet is no whole Parquet file"):
        Parquet(tmp_path)
    write(tmp_path / "x.parquet", table(0, 0))
    with pytest.raises(SourceError, match=r"no rows in .*x.parquet"):
        Parquet(tmp_path)


def test_a_store_reads_as_the_disk_does(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name, first in (("a", 0), ("b", 12)):
        path = write(tmp_path / f"{name}.parquet", table(first, 12))
        store.pipe_file(f"/read-parquet/{name}.parquet", path.read_bytes())
    local = Parquet(tmp_path)
    for pattern in ("memory://read-parquet", "memory://read-parquet/*.parquet", "memory://read-parquet/{a,b}.parquet"):
        remote = Parquet(pattern)
        assert [remote.open().read(i) for i in range(24)] == [local.open().read(i) for i in range(24)]
        assert remote.fingerprint() == local.fingerprint()
    assert remote.place(13) == "memory://read-parquet/b.parquet: row 1"
    assert Parquet(f"file://{tmp_path}").fingerprint() == local.fingerprint()


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", table(0, 1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install penstock\[parquet\]"):
        Parquet(path)


def test_importing_the_sources_imports_neither_torch_nor_pyarrow_nor_fsspec() -> None:
    program = "import sys, penstock.read; print([m for m in ('torch', 'pyarrow', 'fsspec', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
