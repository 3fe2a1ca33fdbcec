"""Tars as sources: the same bytes as `tarfile` reads, in WebDataset's groups, through an index that is kept."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import GraphError, SourceError
from penstock.read import Tars, storage, tar_index
from penstock.read.patterns import braces


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "penstock"


def write(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def shard(path: Path, first: int, count: int) -> Path:
    pairs = [[(f"{i:06d}.jpg", b"image %d" % i), (f"{i:06d}.cls", b"%d" % i)] for i in range(first, first + count)]
    return write(path, itertools.chain(*pairs))


def npy(values: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


names = st.text(st.sampled_from("abc/é_- 日"), min_size=1, max_size=130).map(lambda s: s.strip("/ ").replace("//", "/"))
archives = st.lists(st.tuples(names.filter(bool), st.binary(max_size=1500)), max_size=8, unique_by=lambda m: m[0])


@given(archives, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_members_are_what_tarfile_reads(members: list[tuple[str, bytes]], form: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "x.tar", members, form)
        with tarfile.open(path) as tar:
            expected = [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
        with storage.scanning(str(path)) as read:
            assert [tuple(m) for m in tar_index.members(read, str(path), path.stat().st_size)] == expected


def test_links_folders_devices_global_headers_and_binary_sizes_are_passed_over_as_tarfile_does(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "made by a test"}) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("p", b"6")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
        info = tarfile.TarInfo("a.jpg")
        info.size, info.pax_headers = 3, {"mtime": "1.5", "path": "long/" * 60 + "a.jpg"}
        tar.addfile(info, io.BytesIO(b"abc"))
    source = Tars(path)
    assert len(source) == 1
    assert source.open().read(0) == {"image": b"abc"}
    assert source.place(0) == f"{path}: {'long/' * 60}a.jpg"


def test_a_member_of_more_than_8_gib_is_stepped_over(tmp_path: Path) -> None:
    big = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{form}.tar"
        info = tarfile.TarInfo("a.bin")
        info.size = big
        with open(path, "wb") as file:
            file.write(info.tobuf(form))
            file.seek(big, os.SEEK_CUR)
            tail = tarfile.TarInfo("b.bin")
            tail.size = 1
            file.write(tail.tobuf(form) + b"x".ljust(512, b"\0") + bytes(1024))
        source = Tars(path, fields=["bin"])
        assert list(source.sizes()) == [big, 1]
        assert source.open().read(1) == {"bin": b"x"}


def test_samples_are_grouped_and_read_by_extension(tmp_path: Path) -> None:
    members = [
        ("dir.v1/0001.jpg", b"jpeg"),
        ("dir.v1/0001.cls", b"41\n"),
        ("dir.v1/0001.json", b'{"a": [1, null]}'),
        ("dir.v1/0001.txt", "größe".encode()),
        ("dir.v1/0001.npy", npy([[1.5, 2]])),
        ("dir.v1/0001.seg.png", b"mask"),
        ("dir.v1/0001.FLAC", b"fLaC"),
        ("dir.v1/.hidden.jpg", b"no key"),
        ("dir.v1/README", b"no extension"),
        ("__meta.x__", b"meta"),
    ]
    source = Tars(write(tmp_path / "x.tar", members))
    sample = source.open().read(0)
    assert sample.pop("npy").tolist() == [[1.5, 2]]
    assert sample == {
        "image": b"jpeg",
        "label": 41,
        "json": {"a": [1, None]},
        "txt": "größe",
        "seg.png": b"mask",
        "audio": b"fLaC",
    }
    assert len(source) == 1
    assert {name: field.kind for name, field in source.spec().items()} == {
        "image": "encoded",
        "audio": "encoded",
        "label": "value",
        **dict.fromkeys(("json", "txt", "npy", "seg.png"), "any"),
    }
    assert list(source.sizes()) == [sum(len(data) for _, data in members[:7])]
    assert set(Tars(tmp_path / "x.tar", fields=["label", "txt"]).open().read(0)) == {"label", "txt"}


def test_images_may_be_of_several_kinds_unless_one_sample_has_two(tmp_path: Path) -> None:
    mixed = Tars(write(tmp_path / "mixed.tar", [("a.jpg", b"j"), ("b.png", b"p"), ("c.webp", b"w")]))
    assert [mixed.open().read(i)["image"] for i in range(3)] == [b"j", b"p", b"w"]
    masked = Tars(
        write(tmp_path / "masked.tar", [("a.png", b"mask"), ("a.jpg", b"j"), ("b.png", b"n"), ("b.jpg", b"k")])
    )
    assert [masked.open().read(i) for i in range(2)] == [{"image": b"j", "png": b"mask"}, {"image": b"k", "png": b"n"}]


def test_ids_follow_the_order_of_the_tars_and_equal_keys_in_two_tars_are_two_samples(tmp_path: Path) -> None:
    shard(tmp_path / "s-000.tar", 0, 3)
    shard(tmp_path / "s-001.tar", 0, 2)
    shard(tmp_path / "s-002.tar", 7, 1)
    source = Tars(f"{tmp_path}/s-{{000..002}}.tar")
    reader = pickle.loads(pickle.dumps(source)).open()
    assert [reader.read(i)["label"] for i in range(len(source))] == [0, 1, 2, 0, 1, 7]
    assert source.place(3) == f"{tmp_path}/s-001.tar: 000000.jpg"
    backwards = Tars([tmp_path / "s-002.tar", f"{tmp_path}/s-00[01].tar"])
    assert [backwards.open().read(i)["label"] for i in range(6)] == [7, 0, 1, 2, 0, 1]
    assert len(Tars(tmp_path)) == 6
    assert backwards.fingerprint() != source.fingerprint() == Tars(tmp_path).fingerprint()


def test_members_of_one_key_need_not_stand_together_but_may_not_repeat(tmp_path: Path) -> None:
    apart = Tars(write(tmp_path / "a.tar", [("1.jpg", b"x"), ("2.jpg", b"y"), ("1.cls", b"1"), ("2.cls", b"2")]))
    assert [apart.open().read(i) for i in range(2)] == [{"image": b"x", "label": 1}, {"image": b"y", "label": 2}]
    with pytest.raises(SourceError, match=r"2 members are 1.jpg"):
        Tars(write(tmp_path / "b.tar", [("1.jpg", b"x"), ("1.JPG", b"y")]))


def test_a_sample_that_lacks_what_others_have_fails_alone(tmp_path: Path) -> None:
    reader = Tars(write(tmp_path / "x.tar", [("1.jpg", b"x"), ("1.cls", b"1"), ("2.jpg", b"y")])).open()
    assert reader.read(0)["label"] == 1
    with pytest.raises(ValueError, match="no member for the field 'label', only jpg"):
        reader.read(1)


@pytest.mark.parametrize(
    ("name", "data"),
    [("1.cls", b"cat"), ("1.cls", b"9" * 30), ("1.json", b"{"), ("1.txt", b"\xff"), ("1.npy", b""), ("1.jpg", b"")],
)
def test_a_member_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    source = Tars(write(tmp_path / "x.tar", [(name, data)]))
    with pytest.raises(ValueError, match=rf"x.tar: {name}"):
        source.open().read(0)


def test_pickled_arrays_in_a_tar_are_never_run(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        Tars(write(tmp_path / "x.tar", [("1.npy", buffer.getvalue())])).open().read(0)


def test_the_index_is_kept_and_spares_the_scan(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "x.tar", 0, 5)
    first = Tars(path)
    assert len(list(cache.iterdir())) == 1

    def scanned(*_: object) -> None:
        raise AssertionError("scanned again")

    monkeypatch.setattr(tar_index, "members", scanned)
    again = Tars(path)
    assert again.fingerprint() == first.fingerprint()
    assert again.open().read(4) == {"image": b"image 4", "label": 4}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    path = shard(tmp_path / "x.tar", 0, 5)
    first = Tars(path)
    (kept,) = cache.iterdir()
    good = kept.read_bytes()
    middle = len(good) // 2
    kept.write_bytes(
        {
            "empty": b"",
            "cut": good[:-9],
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "other": os.urandom(len(good)),
        }[damage]
    )
    assert Tars(path).fingerprint() == first.fingerprint()
    assert kept.read_bytes() == good


def test_a_tar_that_changed_is_indexed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("1.jpg", b"one"), ("2.jpg", b"two")])
    before = path.stat()
    assert Tars(path).open().read(0)["image"] == b"one"
    write(path, [("1.jpg", b"eno"), ("3.jpg", b"owt")])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    source = Tars(path)
    assert source.open().read(1)["image"] == b"owt"
    assert "3.jpg" in source.place(1)


def test_a_tar_that_changes_while_in_use_gives_an_error_not_other_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("1.jpg", b"one"), ("2.jpg", b"two")])
    source = Tars(path)
    reader = source.open()
    assert reader.read(0)["image"] == b"one"
    write(path, [("1.jpg", b"another"), ("2.jpg", b"two!")])
    os.utime(path, ns=(0, 1))
    for stale in (reader, source.open()):
        with pytest.raises(OSError, match=r"x.tar changed while in use.*make the source again"):
            stale.read(1)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"x.tar"):
        source.open().read(0)


def test_a_cut_off_tar_loses_only_the_sample_that_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("1.jpg", b"a" * 600), ("2.jpg", b"b" * 2000)])
    with open(path, "r+b") as file:
        file.truncate(512 + 1024 + 512 + 700)
    source = Tars(path)
    reader = source.open()
    assert reader.read(0)["image"] == b"a" * 600
    with pytest.raises(ValueError, match=r"x.tar: 2.jpg: 2000 bytes expected.*700 found.*cut off at 2748 bytes"):
        reader.read(1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[: 512 + 512 + 100], "cut off at 1124 bytes, inside a header"),
        (lambda data: data[:1024] + b"\x01" + data[1025:], "damaged: no tar header at byte 1024"),
        (lambda data: b"<html>404</html>" * 100, "is not a tar"),
        (lambda data: b"\x1f\x8b\x08" + data, "is compressed.*gunzip x.tar"),
        (lambda data: b"", "no sample"),
    ],
)
def test_what_is_no_whole_tar_is_refused(tmp_path: Path, spoil: object, message: str) -> None:
    path = write(tmp_path / "x.tar", [("1.jpg", b"one"), ("2.jpg", b"two")])
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(SourceError, match=message):
        Tars(path)


def test_a_cache_directory_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(Tars(shard(tmp_path / "x.tar", 0, 2))) == 2


def test_processes_that_index_the_same_tar_at_once_do_not_disturb_each_other(tmp_path: Path, cache: Path) -> None:
    path = shard(tmp_path / "x.tar", 0, 300)
    program = """
import sys
from penstock.read import Tars
from penstock.read.tar_index import cache_folder
for _ in range(20):
    for kept in cache_folder().glob("*"):
        kept.unlink(missing_ok=True)
    print(Tars(sys.argv[1]).fingerprint())
"""
    both = [subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) for _ in range(2)]
    prints = {line for process in both for line in process.communicate(timeout=60)[0].split()}
    assert [process.returncode for process in both] == [0, 0]
    assert len(prints) == 1
    assert all(kept.name.endswith(".index") for kept in cache.iterdir())


def test_what_no_pattern_finds_is_named(tmp_path: Path) -> None:
    shard(tmp_path / "s-0.tar", 0, 1)
    with pytest.raises(SourceError, match=r"s-1.tar, .*s-2.tar, .*s-3.tar and 1 more; 1 others were found"):
        Tars(f"{tmp_path}/s-{{0..4}}.tar")
    with pytest.raises(FileNotFoundError, match="empty list"):
        Tars([])
    with pytest.raises(GraphError, match=r"must be a list of image, label; found \['cls'\]"):
        Tars(tmp_path / "s-0.tar", fields=["cls"])
    with pytest.raises(GraphError, match=r"the members .id"):
        Tars(write(tmp_path / "id.tar", [("1.jpg", b"x"), ("1.id", b"1")]))


def test_more_tars_than_may_be_open_are_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        shard(tmp_path / f"{i}.tar", 10 * i, 2)
    monkeypatch.setattr(storage, "_OPEN_FILES", 2)
    before = len(os.listdir("/proc/self/fd"))
    reader = Tars(tmp_path).open()
    for id in (0, 11, 4, 7, 1, 10, 3, 0, 9):
        assert reader.read(id)["label"] == 10 * (id // 2) + id % 2
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_that_share_a_reader_get_their_own_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        shard(tmp_path / f"{i}.tar", 10 * i, 10)
    monkeypatch.setattr(storage, "_OPEN_FILES", 1)
    reader = Tars(tmp_path).open()
    with ThreadPoolExecutor(4) as pool:
        ids = [(7 * i) % 50 for i in range(1000)]
        assert [sample["label"] for sample in pool.map(reader.read, ids)] == ids


def test_tars_on_a_store_read_as_on_disk(tmp_path: Path, cache: Path) -> None:
    store = fsspec.filesystem("memory")
    for i in range(2):
        store.pipe_file(f"/read-tars/s-{i}.tar", shard(tmp_path / f"s-{i}.tar", 5 * i, 3).read_bytes())
    local = Tars(tmp_path)
    for pattern in ("memory://read-tars/s-{0..1}.tar", "memory://read-tars/*.tar", "memory://read-tars"):
        remote = pickle.loads(pickle.dumps(Tars(pattern)))
        assert [remote.open().read(i) for i in range(6)] == [local.open().read(i) for i in range(6)]
        assert remote.fingerprint() == local.fingerprint()
        assert remote.place(4) == "memory://read-tars/s-1.tar: 000006.jpg"
    assert len(list(cache.iterdir())) == 4
    assert Tars(f"file://{tmp_path}/s-0.tar").open().read(0) == local.open().read(0)

    store.pipe_file("/read-tars/s-0.tar", shard(tmp_path / "s-0.tar", 90, 3).read_bytes())
    with pytest.raises(OSError, match=r"memory://read-tars/s-0.tar changed while in use"):
        remote.open().read(0)
    assert Tars("memory://read-tars").open().read(0)["label"] == 90
    with pytest.raises(SourceError, match="read-tars-not"):
        Tars("memory://read-tars-not/*.tar")


def test_many_samples_are_held_as_arrays(tmp_path: Path) -> None:
    source = Tars(write(tmp_path / "x.tar", ((f"{i:08d}.txt", b"%d" % i) for i in range(20_000))))
    assert len(pickle.dumps(source)) < 20_000 * 50
    reader = source.open()
    assert [reader.read(i)["txt"] for i in (0, 12_345, 19_999)] == ["0", "12345", "19999"]


words = st.text("abc-.", max_size=3)


@given(words, st.lists(st.lists(words, min_size=2, max_size=3), max_size=3), words)
def test_braces_give_every_combination_in_the_order_written(head: str, groups: list[list[str]], tail: str) -> None:
    pattern = head + "".join("{" + ",".join(group) + "}" for group in groups) + tail
    assert braces(pattern) == [head + "".join(chosen) + tail for chosen in itertools.product(*groups)]


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 7), st.sampled_from([0, 3, 6]))
def test_brace_ranges_include_both_ends_and_keep_the_width(first: int, last: int, step: int, width: int) -> None:
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    padded = width and (first < 10 ** (width - 1) or last < 10 ** (width - 1))
    expected = [f"{value:0{width if padded else 0}d}" for value in values]
    assert braces(f"{{{first:0{width}d}..{last:0{width}d}..{step}}}") == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("x{a,b{0..1}}y", ["xay", "xb0y", "xb1y"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{}{a}{1..b}{", ["{}{a}{1..b}{"]),
        ("{{a,b}}", ["{a}", "{b}"]),
        ("", [""]),
    ],
)
def test_braces_that_mean_nothing_stay(pattern: str, expected: list[str]) -> None:
    assert braces(pattern) == expected
