"""A loader with a cache gives the same batches, reads what is cached once, and shares it with every other loader."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from arenas import apart, joined
from loading import Batch, Launcher, assert_same, epochs, ids, rest, wait_until, workers
from penstock.graph import Field, Reader, Sample, Source, Spec

__all__ = ["apart"]

pytestmark = pytest.mark.processes

Cache = dict[str, Any]


def prepared(pipe: ps.Pipe) -> ps.Pipe:
    return pipe.decode().random_resized_crop(24).flip().batch(4)


def of_files(photos: Path, folder: Path) -> ps.Pipe:
    return ps.files(photos)


def of_tars(photos: Path, folder: Path) -> ps.Pipe:
    """Two members, one of them parsed, and some text."""
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
            for name, data in (("jpg", path.read_bytes()), ("cls", b"%d" % number), ("json", b'{"n": [1, 2.5]}')):
                info = tarfile.TarInfo(f"{number:04}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return ps.tars(folder / "shard.tar", fields=["image", "label"])


def of_parquet(photos: Path, folder: Path) -> ps.Pipe:
    images = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))]
    table = pa.table({"image": images, "label": list(range(30)), "weight": np.linspace(0, 1, 30)})
    pq.write_table(table, folder / "part.parquet", row_group_size=10)
    return ps.parquet(folder / "part.parquet", columns=["weight"])


def of_a_store(photos: Path, folder: Path) -> ps.Pipe:
    """Files through fsspec; its local file system stands for a store."""
    return ps.files(f"local://{photos}")


SOURCES = [of_files, of_tars, of_parquet, of_a_store]


@pytest.fixture(autouse=True)
def _indexes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("indexes")))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("processes", [0, 2])
def test_batches_are_the_same_with_and_without_it(
    source: Callable[[Path, Path], ps.Pipe], processes: int, photos: Path, tmp_path: Path
) -> None:
    pipe = prepared(source(photos, tmp_path))
    plain = epochs(pipe, 2, workers=processes)
    with ps.Loader(pipe, workers=processes, cache="4MiB") as loader:
        for expected in plain:
            assert_same(rest(loader), expected)
        assert cache(loader)["hits"] == cache(loader)["misses"] == 30


def cache(loader: ps.Loader) -> Cache:
    found: Cache = loader.stats()["cache"]
    return found


def epoch(loader: ps.Loader) -> tuple[list[Batch], Cache]:
    """Its batches, and what its counters rose by."""
    before = loader.stats()["cache"] or dict.fromkeys(_COUNTS, 0)
    batches = rest(loader)
    return batches, {name: cache(loader)[name] - before[name] for name in _COUNTS}


_COUNTS = ("hits", "misses", "hit_bytes", "read_bytes", "stored")


class Sized(Source):
    """Samples of 100 KB, and a little more by their number; what was read is written down in a file."""

    def __init__(self, samples: int, log: Path | None = None, name: str = "") -> None:
        self.samples, self.log, self.name = samples, log, name

    def __len__(self) -> int:
        return self.samples

    def spec(self) -> Spec:
        return {"image": Field("encoded")}

    def open(self) -> Reader:
        return SizedReader(self)

    def place(self, id: int) -> str:
        return f"number {id}"

    def fingerprint(self) -> str:
        return f"{self.samples} {self.name}"


class SizedReader(Reader):
    def __init__(self, source: Sized) -> None:
        self.source = source

    def read(self, id: int) -> Sample:
        if self.source.log is not None:
            with self.source.log.open("a") as log:
                log.write(f"{id}\n")
        return {"image": bytes([id % 251]) * (100_000 + id)}


def summed(sample: Sample) -> Sample:
    image = np.frombuffer(sample["image"], np.uint8)
    return {"size": len(image), "sum": int(image.astype(np.int64).sum())}


def sized(samples: int, log: Path | None = None, name: str = "") -> ps.Pipe:
    return ps.source(Sized(samples, log, name)).map(summed).batch(4)


@pytest.mark.parametrize("processes", [0, 3])
def test_every_epoch_reads_exactly_what_is_not_cached(processes: int, tmp_path: Path) -> None:
    pipe = sized(40, tmp_path / "log")
    whole = sum(100_000 + id for id in range(40))
    with ps.Loader(pipe, workers=processes, cache="2MiB") as loader:
        _, first = epoch(loader)
        assert (first["hits"], first["misses"], first["read_bytes"]) == (0, 40, whole)
        assert first["stored"] == 20
        reads = set()
        for _ in range(3):
            (tmp_path / "log").write_text("")
            batches, counts = epoch(loader)
            assert sorted(ids(batches)) == list(range(40))
            read = [int(line) for line in (tmp_path / "log").read_text().split()]
            assert (counts["hits"], counts["misses"], counts["stored"]) == (20, 20, 0)
            assert counts["read_bytes"] == sum(100_000 + id for id in read)
            assert counts["hit_bytes"] + counts["read_bytes"] == whole
            reads.add(tuple(sorted(read)))
        assert len(reads) == 1, "the same ones each time"
        assert cache(loader)["held_bytes"] <= cache(loader)["budget_bytes"] == 2 << 20


@pytest.mark.parametrize("processes", [(2, 2), (2, 0), (0, 0)], ids=str)
def test_loaders_of_one_process_share(processes: tuple[int, int], tmp_path: Path) -> None:
    pipe = sized(20)
    with ps.Loader(pipe, workers=processes[0], cache="4MiB", seed=1) as one:
        epoch(one)
        with ps.Loader(pipe, workers=processes[1], cache="2MiB", seed=2) as other:
            _, counts = epoch(other)
            assert (counts["hits"], counts["misses"]) == (20, 0)
            assert cache(other)["budget_bytes"] == 4 << 20, "the largest that was asked for"


def test_a_training_and_a_validation_set_share_the_budget() -> None:
    with ps.Loader(sized(16, name="train"), workers=1, cache="3MiB") as train:
        epoch(train)
        with ps.Loader(sized(16, name="val"), workers=1, cache="3MiB") as val:
            first, second = epoch(val)[1], epoch(val)[1]
            assert first["hits"] == 0
            assert 13 <= first["stored"] < 16
            assert (second["hits"], second["misses"]) == (first["stored"], 16 - first["stored"])
            assert cache(val)["held_bytes"] == cache(train)["held_bytes"] <= 3 << 20
        assert epoch(train)[1]["hits"] == 16


_SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import penstock as ps
from penstock.cache import finding
finding._PREFIX = {prefix!r}
from test_cache_loader import sized

with ps.Loader(sized({samples}), workers=2, cache="8MiB", rank={rank}, world_size={world}) as loader:
    for _ in loader:
        pass
    print(loader.stats()["cache"]["misses"], flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def script(prefix: str, rank: int = 0, world: int = 1, samples: int = 40) -> str:
    tests = str(Path(__file__).parent)
    return _SCRIPT.format(tests=tests, prefix=prefix, rank=rank, world=world, samples=samples)


def test_ranks_share_and_memory_goes_with_the_last_holder(launcher: Launcher, apart: str, tmp_path: Path) -> None:
    """Also where each is killed; the one that made the arena need not be the last."""
    first = launcher.start(tmp_path / "rank0.py", script(apart, 0, 2))
    assert first.first_line() == "20"
    before = psutil.virtual_memory().shared
    with ps.Loader(sized(40), workers=1, cache="8MiB", rank=1, world_size=2) as rank:
        _, counts = epoch(rank)
        assert (counts["hits"], counts["misses"]) == (0, 20)
        os.kill(first.pid, signal.SIGKILL)
        first.end()
        with ps.Loader(sized(40), workers=1, cache="8MiB") as both:
            assert epoch(both)[1]["hits"] == 40
    with ps.Loader(sized(40), workers=1, cache="8MiB") as anew:
        assert epoch(anew)[1]["hits"] == 0
    wait_until(lambda: psutil.virtual_memory().shared < before)


def test_loaders_that_start_at_once_make_one_arena(launcher: Launcher, apart: str, tmp_path: Path) -> None:
    """Together they read a data set once, though each wants all of it."""
    other = Launcher()
    running = [launcher.start(tmp_path / "a.py", script(apart)), other.start(tmp_path / "b.py", script(apart))]
    misses = [int(one.first_line()) for one in running]
    for one in running:
        os.kill(one.pid, signal.SIGKILL)
        one.end()
    other.close()
    assert sum(misses) < 70, "of 80 that two arenas would have cost"


def test_killed_workers_cost_no_sample_and_no_count(photos: Path) -> None:
    pipe = prepared(ps.files(photos))
    plain = epochs(pipe, 3)
    with ps.Loader(pipe, workers=2, cache="4MiB") as loader:
        found = []
        for number in range(3):
            batches = iter(loader)
            found.append([next(batches)])
            os.kill(workers(loader, 2)[number % 2], signal.SIGKILL)
            found[-1] += rest(batches)
        for one, expected in zip(found, plain, strict=True):
            assert_same([{k: v.clone() for k, v in batch.items()} for batch in one], expected)
        assert cache(loader)["samples"] == 30
        assert epoch(loader)[1]["hits"] == 30


def test_a_damaged_sample_is_read_from_storage(photos: Path) -> None:
    pipe = prepared(ps.files(photos))
    plain = epochs(pipe, 2)
    with ps.Loader(pipe, workers=2, cache="4MiB") as loader:
        assert_same(rest(loader), plain[0])
        with joined() as arena:
            middle = cache(loader)["bytes"] // 2
            (byte,) = os.pread(arena.descriptors[1], 1, middle)
            os.pwrite(arena.descriptors[1], bytes([byte ^ 1]), middle)
        for pid in workers(loader, 2):  # others have not met the sample yet
            os.kill(pid, signal.SIGKILL)
        assert_same(rest(loader), plain[1])
        assert (cache(loader)["spoiled"], cache(loader)["samples"]) == (1, 29)


def test_files_that_changed_are_never_stale(photos: Path, tmp_path: Path) -> None:
    """Written in place under their names while another job keeps the cache."""
    folder = tmp_path / "data"
    folder.mkdir()
    names = [f"{number:02}.jpg" for number in range(10)]
    for name in names:
        (folder / name).write_bytes(b"old bytes of " + name.encode())

    def read(loader: ps.Loader) -> list[bytes]:
        return [bytes(image) for batch in loader for image in batch["image"]]

    pipe = ps.files(folder).batch(5, ragged="list")
    with ps.Loader(pipe, workers=1, cache="4MiB", shuffle=False) as keeper:
        assert read(keeper) == [b"old bytes of " + name.encode() for name in names]
        for name in names[::2]:
            (folder / name).write_bytes(b"new bytes of " + name.encode())
        with ps.Loader(ps.files(folder).batch(5, ragged="list"), workers=1, cache="4MiB", shuffle=False) as other:
            now = [(folder / name).read_bytes() for name in names]
            assert read(other) == now
            assert (cache(other)["hits"], cache(other)["misses"], cache(other)["spoiled"]) == (5, 5, 5)
        assert read(keeper) == now, "what one reader found outdated nobody gets"


def test_files_of_the_same_names_in_two_folders_never_mix(photos: Path, tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        (folder / "a.jpg").write_bytes(f"{folder.name:>10}".encode())
        os.utime(folder / "a.jpg", ns=(0, 0))
    with contextlib.ExitStack() as stack:
        for name in ("one", "other"):
            pipe = ps.files(tmp_path / name).batch(1, ragged="list")
            loader = stack.enter_context(ps.Loader(pipe, workers=1, cache="4MiB"))
            for _ in range(2):
                found += [bytes(batch["image"][0]).strip() for batch in loader]
    assert found == [b"one", b"one", b"other", b"other"]


def test_explain_says_what_is_cached(photos: Path) -> None:
    with ps.Loader(prepared(ps.files(photos)), workers=1, cache=0.01) as loader:
        assert "cache: 0.01 of memory, shared by this user's loaders" in loader.explain()
        assert "it is opened with the first batch" in loader.explain()
        rest(loader)
        assert "holds 30 of 30 samples in " in loader.explain()
    arrays = ps.arrays(image=np.zeros((8, 4, 4, 3), np.uint8)).batch(4)
    with ps.Loader(arrays, workers=1, cache="auto") as loader:
        rest(loader)
        assert "cache: none, for the source holds no encoded images or audio" in loader.explain()
        assert loader.stats()["cache"] is None
    opaque = ps.dataset([(np.zeros(3), 1)] * 8).batch(4)
    with ps.Loader(opaque, workers=0, cache="auto") as loader:
        rest(loader)
        assert "cache: none, for the source runs code of yours" in loader.explain()
    with ps.Loader(prepared(ps.files(photos)), workers=0) as loader:
        assert "cache" not in loader.explain()


def test_an_index_without_room_leaves_all_to_storage() -> None:
    with ps.Loader(sized(200_000), workers=1, cache="1MiB") as loader:
        next(iter(loader))
        assert "has no room for the index" in loader.explain()
        assert cache(loader)["hits"] == 0
        assert cache(loader)["misses"] > 0
