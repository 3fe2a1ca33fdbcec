"""Before a cache, readers leave the page cache as they found it, count what they request, and tell versions apart."""

from __future__ import annotations

import ctypes
import mmap
import os
import tarfile
from pathlib import Path

import fsspec
import pytest

from penstock.graph import Reader
from penstock.read import Files, Tars
from penstock.read.storage import read_file

SIZE = 300_000


def resident(path: Path, offset: int = 0, size: int = SIZE) -> bool:
    """All of this is in the page cache; asking brings nothing into it, as reading with RWF_NOWAIT would."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), len(mapped), pages) == 0
        del start
    return all(page & 1 for page in pages[offset // mmap.PAGESIZE : -(-(offset + size) // mmap.PAGESIZE)])


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if resident(path):
        pytest.skip("the files of this folder are always in memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(name.encode() * SIZE)
    return tmp_path


def test_pages_that_were_read_are_dropped(folder: Path) -> None:
    path = folder / "a.jpg"
    forget(path)
    assert read_file(str(path), drop=True) == b"a" * SIZE
    assert not resident(path)
    read_file(str(path))
    assert resident(path)


def test_pages_that_others_hold_stay(folder: Path) -> None:
    path = folder / "a.jpg"
    path.read_bytes()
    assert read_file(str(path), drop=True) == b"a" * SIZE
    assert resident(path)


def test_a_tar_is_read_and_dropped_member_by_member(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "indexes"))
    path = folder / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for name in "abc":
            tar.add(folder / f"{name}.jpg", f"{name}.jpg")
    reader = Tars(path).open()
    reader.drop_behind()
    forget(path)
    assert reader.read(1)["image"] == b"b" * SIZE
    assert not resident(path, 1 << 19, 4096), "nothing was read ahead"
    assert not resident(path, SIZE + (1 << 15), 4096), "nor kept"
    assert reader.requested() == SIZE


def test_files_count_what_is_requested(folder: Path) -> None:
    reader = Files(folder).open()
    assert reader.requested() == 0
    reader.read(0), reader.read(2)
    assert reader.requested() == 2 * SIZE


def stamps(reader: Reader) -> list[bytes]:
    return [reader.stamp(id) for id in range(3)]


def test_a_file_that_is_written_anew_has_another_stamp(folder: Path) -> None:
    reader = Files(folder).open()
    before = stamps(reader)
    (folder / "b.jpg").write_bytes(b"x" * SIZE)
    os.utime(folder / "b.jpg", ns=(0, 7))
    after = stamps(reader)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_data_sets_of_the_same_names_have_other_versions(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(b"x")
    one, other = Files(tmp_path / "one"), Files(tmp_path / "other")
    assert one.fingerprint() == other.fingerprint()
    assert one.version() != other.version()
    assert one.version() == Files(tmp_path / "one").version()


def test_a_store_tells_versions_with_its_listing() -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/read-behind/a.jpg", b"old")
    before = Files("memory://read-behind")
    assert before.open().stamp(0) == b"", "no request for each sample"
    assert before.version() == Files("memory://read-behind").version()
    store.pipe_file("/read-behind/a.jpg", b"new")
    assert Files("memory://read-behind").version() != before.version()


def test_a_tar_that_is_written_anew_is_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "indexes"))
    versions = []
    for stamp in (7, 7, 8):
        with tarfile.open(folder / "shard.tar", "w") as tar:
            tar.add(folder / "a.jpg", "a.jpg")
        os.utime(folder / "shard.tar", ns=(stamp, stamp))
        versions.append(Tars(folder / "shard.tar").version())
    assert versions[0] == versions[1] != versions[2]
