"""Files as sources: which ones, in which order, with which label, and what happens when they are not there."""

from __future__ import annotations

import os
import pickle
import sys
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest

from penstock.errors import GraphError, MissingExtraError, SourceError
from penstock.read import Files


def tree(root: Path, *names: str) -> Path:
    """Files that each hold their own name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def contents(source: Files) -> list[str]:
    reader = source.open()
    return [reader.read(i)["image"].decode() for i in range(len(source))]


def test_class_folders_are_sorted_classes_and_their_files_are_found_at_any_depth(tmp_path: Path) -> None:
    tree(
        tmp_path,
        *("cat/z.jpg", "cat/a.PNG", "cat/a/b/d.jpeg", "cat/a-b/c.webp", "cat/notes.txt", "cat/.hidden.jpg"),
        *("Dog/1.tiff", "bird/deep/er/2.bmp", "stray.jpg"),
    )
    source = Files(tmp_path)
    assert source.classes == ["Dog", "bird", "cat"]
    assert source.class_to_idx == {"Dog": 0, "bird": 1, "cat": 2}
    # Whole folder paths are compared, so "cat/a-b" comes between "cat/a" and "cat/a/b".
    assert contents(source) == [
        *("Dog/1.tiff", "bird/deep/er/2.bmp"),
        *("cat/.hidden.jpg", "cat/a.PNG", "cat/z.jpg", "cat/a-b/c.webp", "cat/a/b/d.jpeg"),
    ]
    reader = source.open()
    assert [reader.read(i)["label"] for i in range(len(source))] == [0, 1, 2, 2, 2, 2, 2]
    assert source.spec()["image"].kind == "encoded"
    assert source.spec()["label"].dtype == "int64"


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = Files(tree(tmp_path, "b.jpg", "a.jpg", "c.txt"))
    assert contents(source) == ["a.jpg", "b.jpg"]
    assert set(source.spec()) == set(source.open().read(0)) == {"image"}


def test_without_labels_the_whole_tree_is_taken(tmp_path: Path) -> None:
    source = Files(tree(tmp_path, "x/b.jpg", "a.jpg", "x/y/c.jpg"), labels=None)
    assert contents(source) == ["a.jpg", "x/b.jpg", "x/y/c.jpg"]
    assert "label" not in source.spec()


def test_a_linked_class_folder_is_followed(tmp_path: Path) -> None:
    tree(tmp_path, "elsewhere/1.jpg", "root/a/0.jpg")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    assert Files(tmp_path / "root").classes == ["a", "b"]
    assert contents(Files(tmp_path / "root")) == ["root/a/0.jpg", "elsewhere/1.jpg"]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([5, 2**62, -1], [5, 2**62, -1]),
        (np.array([5, 6, 7], np.uint8), [5, 6, 7]),
        ({"a.jpg": 3, "b.jpg": 1, "c.jpg": 2}, [3, 1, 2]),
        (lambda name: ord(name[0]), [97, 98, 99]),
    ],
)
def test_labels_may_be_numbers_a_mapping_or_a_function(tmp_path: Path, labels: object, found: list[int]) -> None:
    for root in (tree(tmp_path, "a.jpg", "b.jpg", "c.jpg"), [tmp_path / n for n in ("a.jpg", "b.jpg", "c.jpg")]):
        if isinstance(root, list) and not isinstance(labels, list | np.ndarray):
            continue
        reader = Files(root, labels=labels).open()  # type: ignore[arg-type]
        assert [reader.read(i)["label"] for i in range(3)] == found


def test_a_label_function_is_asked_once_per_file_and_only_at_the_start(tmp_path: Path) -> None:
    asked = []
    source = Files(tree(tmp_path, "a.jpg", "b.jpg"), labels=lambda name: asked.append(name) or 7)  # type: ignore[func-returns-value]
    pickle.loads(pickle.dumps(source)).open().read(1)
    assert asked == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2], "3 labels are needed"),
        ([1, 2.5, 3], "b.jpg.*2.5|integers"),
        (["1", "2", "3"], "a.jpg"),
        ([1, 2**63, 3], "b.jpg.*9223372036854775808"),
        ({"a.jpg": 1, "c.jpg": 2}, "b.jpg"),
        ("classes", "'classes'"),
    ],
)
def test_labels_that_make_no_sense_are_refused(tmp_path: Path, labels: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Files(tree(tmp_path, "a.jpg", "b.jpg", "c.jpg"), labels=labels)  # type: ignore[arg-type]


def test_a_list_keeps_its_order_and_repeats_and_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, "b.jpg", "a.dat")
    monkeypatch.chdir(tmp_path)
    source = Files(["b.jpg", Path("a.dat"), str(tmp_path / "b.jpg")])
    monkeypatch.chdir("/")
    assert contents(source) == ["b.jpg", "a.dat", "b.jpg"]
    assert source.place(1) == str(tmp_path / "a.dat")


def test_audio_files_have_their_own_field_and_extensions(tmp_path: Path) -> None:
    tree(tmp_path, "a.wav", "b.FLAC", "c.ogg", "d.jpg", "e.mp3")
    assert len(Files(tmp_path, field="audio")) == 3
    source = Files(tmp_path, field="audio", extensions=[".MP3"])
    assert source.open().read(0) == {"audio": b"e.mp3"}
    assert source.spec()["audio"].kind == "encoded"


def test_a_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    with open(os.path.join(os.fsencode(tmp_path), b"\xff\xfe.jpg"), "wb") as file:
        file.write(b"odd")
    source = pickle.loads(pickle.dumps(Files(tmp_path)))
    assert contents(source) == ["odd"]


def test_what_is_missing_or_empty_is_named_when_the_source_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        Files(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"no valid file.*looked for .jpg"):
        Files(tmp_path)
    with pytest.raises(SourceError, match="no class folder"):
        Files(tree(tmp_path, "a.jpg"), labels="folders")
    with pytest.raises(SourceError, match="is a file"):
        Files(tmp_path / "a.jpg")
    with pytest.raises(SourceError, match="empty"):
        Files([])
    tree(tmp_path, "full/a.jpg", "bare/a.txt", "barer/b.txt")
    with pytest.raises(SourceError, match="the classes bare, barer"):
        Files(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error_not_a_smaller_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, "a/1.jpg", "a/locked/2.jpg")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="locked"):
        Files(tmp_path)


def test_a_vanished_file_is_an_oserror_and_an_empty_one_a_valueerror_both_with_the_path(tmp_path: Path) -> None:
    source = Files(tree(tmp_path, "a.jpg", "b.jpg"))
    reader = source.open()
    (tmp_path / "a.jpg").unlink()
    (tmp_path / "b.jpg").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"a.jpg"):
        reader.read(0)
    with pytest.raises(ValueError, match=r"b.jpg is empty"):
        reader.read(1)
    for id in (-1, 2):
        with pytest.raises(KeyError):
            reader.read(id)


def test_a_hundred_thousand_paths_are_held_as_bytes(tmp_path: Path) -> None:
    paths = [f"/data/train/class{i % 1000:04d}/image{i:07d}.jpg" for i in range(100_000)]
    source = Files(paths, labels=[i % 1000 for i in range(100_000)])
    names = sum(map(len, paths))
    pickled = pickle.dumps(source)
    assert len(pickled) < names + 17 * len(paths)
    tracemalloc.start()
    again = pickle.loads(pickled)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < names + 18 * len(paths)
    assert [again.place(i) for i in (0, 4711, 99_999)] == [paths[i] for i in (0, 4711, 99_999)]


def test_the_fingerprint_follows_what_the_ids_mean(tmp_path: Path) -> None:
    first = Files(tree(tmp_path / "one", "a/1.jpg", "b/2.jpg")).fingerprint()
    assert Files(tree(tmp_path / "moved", "a/1.jpg", "b/2.jpg")).fingerprint() == first
    assert pickle.loads(pickle.dumps(Files(tmp_path / "one"))).fingerprint() == first
    assert Files(tree(tmp_path / "renamed", "a/1.jpg", "b/3.jpg")).fingerprint() != first
    assert Files(tmp_path / "one", labels=None).fingerprint() != first
    assert Files(["ab", "c"]).fingerprint() != Files(["a", "bc"]).fingerprint()


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.jpg", "b/2.jpg")
    assert contents(Files(f"file://{tmp_path}")) == contents(
        Files([f"file://{tmp_path}/a/1.jpg", f"{tmp_path}/b/2.jpg"])
    )
    assert Files(f"file://{tmp_path}").fingerprint() == Files(tmp_path).fingerprint()


def test_a_store_reads_as_the_same_folder_on_disk_does(tmp_path: Path) -> None:
    names = ("a/z.jpg", "a/b/1.jpg", "a/b-c/2.png", "c/3.jpg", "c/no.txt", "top.jpg")
    tree(tmp_path, *names)
    store = fsspec.filesystem("memory")
    for name in names:
        store.pipe_file(f"/read-files/{name}", name.encode())
    local, remote = Files(tmp_path), pickle.loads(pickle.dumps(Files("memory://read-files")))
    assert contents(remote) == contents(local)
    assert remote.targets == local.targets
    assert remote.classes == local.classes
    assert remote.fingerprint() == local.fingerprint()
    assert list(remote.sizes()) == [len(name) for name in contents(local)]
    assert contents(Files([remote.place(1), str(tmp_path / "c/3.jpg")])) == [contents(local)[1], "c/3.jpg"]

    store.pipe_file("/read-files/a/z.jpg", b"short")
    with pytest.raises(ValueError, match=r"memory://read-files/a/z.jpg: 7 bytes expected, 5 found"):
        remote.open().read(0)
    store.rm("/read-files/a/z.jpg")
    with pytest.raises(FileNotFoundError):
        remote.open().read(0)
    with pytest.raises(SourceError, match="nothing is stored"):
        Files("memory://read-files-not")


def test_a_url_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"pip install penstock\[remote-files\]"):
        Files("s3://bucket/train")
    monkeypatch.undo()
    with pytest.raises(SourceError, match="nosuchprotocol"):
        Files("nosuchprotocol://bucket/train")


def test_what_a_store_raises_arrives_as_an_oserror_with_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file("/read-files-odd/1.jpg", b"x")
    source = Files("memory://read-files-odd")

    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("token expired")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", broken)
    with pytest.raises(OSError, match=r"memory://read-files-odd/1.jpg: RuntimeError: token expired"):
        source.open().read(0)


def test_files_inside_a_zip_are_read_through_a_chained_url(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in ("train/a/1.jpg", "train/b/2.jpg"):
            archive.writestr(name, name)
    source = Files(f"zip://train::{tmp_path}/set.zip")
    assert contents(source) == ["train/a/1.jpg", "train/b/2.jpg"]
    assert source.classes == ["a", "b"]
