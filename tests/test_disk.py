"""The disk tier gives the source's bytes, whatever dies or is damaged when, and keeps to its budget."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.disk import Disk, DiskPlan, DiskReader, plan_disk, survey
from penstock.disk.plan import file_system, held_bytes
from penstock.errors import OptionError
from penstock.graph import Field, Reader, Sample, Source, Spec
from penstock.read import Arrays, Files
from penstock.record import packed, unpacked

PLENTY = 1 << 24


@dataclass(frozen=True)
class Noise(Source):
    """Random bytes of various lengths; every seed another data set whose samples have the same names."""

    seed: int = 0
    samples: int = 40
    most: int = 9000
    place_: str = "noise"

    def __len__(self) -> int:
        return self.samples

    def open(self) -> Counting:
        return Counting(self)

    def spec(self) -> Spec:
        return {"image": Field("encoded"), "label": Field("value", (), "int64")}

    def place(self, id: int) -> str:
        return f"{self.place_}/{id}"

    def fingerprint(self) -> str:
        return f"noise-{self.samples}"

    def version(self) -> str:
        return f"{self.place_}-{self.samples}"

    def sample(self, id: int) -> Sample:
        rng = np.random.default_rng((self.seed, id))
        return {"image": rng.bytes(int(rng.integers(1, self.most))), "label": id % 7}


class Counting(Reader):
    """A reader that knows what it was asked for."""

    def __init__(self, source: Noise) -> None:
        self.source = source
        self.asked: list[int] = []

    def read(self, id: int) -> Sample:
        self.asked.append(id)
        return self.source.sample(id)


def plan(folder: Path, source: Source | None = None, budget: int | float = PLENTY) -> DiskPlan:
    return plan_disk(source or Noise(), str(folder), budget)


def read_all(of: DiskPlan, source: Noise | None = None, *, spare: bool = False) -> list[int]:
    """Read everything, see that it is right, and say what was asked of the source."""
    source = source or Noise()
    counting = source.open()
    reader = DiskReader(of, counting)
    if spare:
        reader.drop_behind()
    for id in range(len(source)):
        assert reader.read(id) == source.sample(id)
    reader.close()
    return counting.asked


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a process that does this; negative for the signal that ended it."""
    return ended(begun(work))


def begun(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def data_file(of: DiskPlan) -> Path:
    return Path(of.place, "data")


def index_file(of: DiskPlan) -> Path:
    return Path(of.place, "index")


# what it keeps


def test_what_was_read_once_is_read_from_the_disk_by_later_jobs(tmp_path: Path) -> None:
    assert read_all(plan(tmp_path)) == list(range(40))
    assert read_all(plan(tmp_path)) == []
    assert survey(plan(tmp_path)) == (40, held_bytes(str(tmp_path)))


def test_few_files_hold_many_samples(tmp_path: Path) -> None:
    read_all(plan(tmp_path, Noise(samples=300, most=50)), Noise(samples=300, most=50))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


def test_data_sets_whose_files_have_the_same_names_never_mix(tmp_path: Path) -> None:
    first, second = Noise(1, place_="a"), Noise(2, place_="b")
    assert first.fingerprint() == second.fingerprint()
    for source in (first, second, first, second):
        read_all(plan(tmp_path, source), source)
    assert read_all(plan(tmp_path, first), first) == []


def test_folders_with_files_of_the_same_names_are_two_data_sets(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(name.encode())
    one, other = (Files(tmp_path / name, None) for name in "ab")
    assert one.fingerprint() == other.fingerprint()
    assert plan(tmp_path / "cache", one).identity != plan(tmp_path / "cache", other).identity


def test_objects_that_a_store_lists_as_changed_are_another_data_set(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.jpg").write_bytes(b"old")

    def identity() -> str:
        return plan(tmp_path / "cache", Files(f"local://{tmp_path}/data", None)).identity

    before = identity()
    assert identity() == before
    (tmp_path / "data" / "1.jpg").write_bytes(b"new")
    assert identity() != before


def test_the_fields_that_are_asked_for_count(tmp_path: Path) -> None:
    class Unlabelled(Noise):
        def spec(self) -> Spec:
            return {"image": Field("encoded")}

    assert plan(tmp_path, Noise()).identity != plan(tmp_path, Unlabelled()).identity


def test_data_that_is_in_memory_or_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match="cache_folder keeps encoded samples as they are stored, and the source holds no enc"
    ):
        plan(tmp_path, Arrays(image=np.zeros((2, 4, 4, 3), np.uint8)))
    with pytest.raises(OptionError, match="runs code of yours"):
        plan(tmp_path, ps.dataset([b"1", b"2"]).graph.source)


def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written to"):
        plan(tmp_path / "file" / "cache")


# records


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
arrays = st.sampled_from(["u1", "<i8", "<f4", ">f8", "?"]).flatmap(
    lambda dtype: st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda shape: np.ones(shape, dtype))
)


@given(st.dictionaries(st.text(), st.binary() | values | arrays | st.integers(0, 9).map(np.int16), max_size=4))
@settings(deadline=None)
def test_a_record_gives_back_the_sample(sample: dict[str, Any]) -> None:
    record = packed(sample)
    assert record is not None
    found = unpacked(record)
    assert list(found) == list(sample)
    for name, value in sample.items():
        assert type(found[name]) is type(value)
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert (found[name] == value).all()
        else:
            assert found[name] == value


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, [b"1"], object(), np.array([{}]), {"a": (1,)}, np.void(b"1")])
def test_what_would_come_back_otherwise_has_no_record(value: object) -> None:
    assert packed({"image": b"1", "other": value}) is None


def test_samples_without_a_record_come_from_the_source(tmp_path: Path) -> None:
    class Odd(Noise):
        def sample(self, id: int) -> Sample:
            return {**super().sample(id), "other": (id,)}

    for _ in range(2):
        assert read_all(plan(tmp_path, Odd()), Odd()) == list(range(40))


# budgets and full disks


@pytest.mark.parametrize("share", [0.2, 0.35, 0.65])
def test_the_budget_is_kept_and_every_epoch_hits_what_is_held(tmp_path: Path, share: float) -> None:
    source = Noise(samples=200)
    whole = sum(len(packed(source.sample(id)) or b"") for id in range(200))
    of = plan(tmp_path, source, int(share * whole) + 200 * 32 + 128)
    read_all(of, source)
    held = held_bytes(of.folder)
    assert of.budget_bytes - 9000 < held <= of.budget_bytes
    asked = read_all(of, source)
    assert len(asked) == 200 - survey(of)[0]
    assert 0.9 * share < survey(of)[0] / 200 < 1.25 * share
    for _ in range(2):
        assert read_all(of, source) == asked
    assert held_bytes(of.folder) == held


def test_the_budget_is_one_for_all_data_sets_and_jobs(tmp_path: Path) -> None:
    budget = 120_000

    def job(seed: int) -> Callable[[], None]:
        source = Noise(seed, place_=str(seed))
        return lambda: [read_all(plan(tmp_path, source, budget), source) for _ in range(2)] and None

    pids = [begun(job(number % 3)) for number in range(6)]
    running = set(pids)
    while running:
        assert held_bytes(str(tmp_path)) <= budget
        running = {pid for pid in running if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
    assert [ended(pid) for pid in pids] == [0] * 6
    assert 100_000 < held_bytes(str(tmp_path)) <= budget


def test_a_fraction_is_of_what_is_free_and_what_is_held(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert plan(tmp_path, budget=0.25).budget_bytes == pytest.approx(free / 4, rel=0.05)


def test_a_budget_that_does_not_hold_the_index_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    of = plan(tmp_path, budget=1000)
    reader = DiskReader(of, Noise().open())
    assert reader.read(3) == Noise().sample(3)
    assert reader.problem is not None
    assert "the budget of 1,000 bytes has no room for an index" in reader.problem
    reader.close()
    assert held_bytes(of.folder) == 0


def fills_up(of: DiskPlan, wanted: int) -> None:
    """Everything is read rightly, and the disk's end is told once."""
    counting = Noise().open()
    reader = DiskReader(of, counting)
    for _ in range(2):
        for id in range(40):
            assert reader.read(id) == Noise().sample(id)
    assert reader.problem is not None
    assert os.strerror(wanted) in reader.problem
    assert str(data_file(of)) in reader.problem
    kept = reader.counts["kept_samples"]
    assert 3 < kept < 40
    assert len(counting.asked) == 80 - kept


def test_a_limit_on_files_ends_the_growth_and_nothing_else(tmp_path: Path) -> None:
    of = plan(tmp_path)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        fills_up(of, errno.EFBIG)

    assert in_child(limited) == 0
    assert held_bytes(of.folder) <= 60_000 + index_file(of).stat().st_size
    assert len(read_all(of)) < 40
    assert read_all(of) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KB; needs the right to mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", point], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root; the test with a limit on files stands for it")
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def test_a_full_disk_ends_the_growth_and_nothing_else(small_disk: Path) -> None:
    of = plan(small_disk)
    assert in_child(lambda: fills_up(of, errno.ENOSPC)) == 0
    asked = read_all(of)
    assert 0 < len(asked) < 40
    assert read_all(of) == asked


# damage


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ bit]))


def test_a_damaged_record_is_found_read_from_the_source_and_kept_again(tmp_path: Path) -> None:
    of = plan(tmp_path)
    read_all(of)
    flip(data_file(of), data_file(of).stat().st_size // 2)
    reader = DiskReader(of, counting := Noise().open())
    for id in range(40):
        assert reader.read(id) == Noise().sample(id)
    assert reader.counts["damaged"] == 1
    assert reader.counts["kept_samples"] == 1
    assert len(counting.asked) == 1
    reader.close()
    assert read_all(of) == []


def test_what_was_cut_off_is_read_from_the_source_and_kept_again(tmp_path: Path) -> None:
    of = plan(tmp_path)
    read_all(of)
    os.truncate(data_file(of), data_file(of).stat().st_size // 3)
    assert 10 < len(read_all(of)) < 40
    assert read_all(of) == []


@pytest.mark.parametrize("name", ["data", "index"])
@pytest.mark.parametrize("fault", ["missing", "empty", "other"])
def test_files_that_do_not_belong_together_are_begun_anew(tmp_path: Path, name: str, fault: str) -> None:
    of, other = plan(tmp_path / "one"), plan(tmp_path / "two")
    read_all(of)
    read_all(other)
    path = Path(of.place, name)
    if fault == "other":
        path.write_bytes(Path(other.place, name).read_bytes())
    else:
        path.unlink()
        if fault == "empty":
            path.touch()
    assert read_all(of) == list(range(40))
    assert read_all(of) == []


def test_a_record_that_lies_under_another_id_is_found_out(tmp_path: Path) -> None:
    of = plan(tmp_path, Noise(samples=2))
    read_all(of, Noise(samples=2))
    index = bytearray(index_file(of).read_bytes())
    index[64:96], index[96:128] = index[96:128], index[64:96]
    index_file(of).write_bytes(index)
    assert read_all(of, Noise(samples=2)) == [0, 1]


def test_a_folder_that_is_deleted_under_a_job_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    of = plan(tmp_path)
    reader = DiskReader(of, Noise().open())
    for id in range(20):
        reader.read(id)
    for path in Path(of.place).iterdir():
        path.unlink()
    for id in range(40):
        assert reader.read(id) == Noise().sample(id)
    assert reader.problem is not None
    assert "deleted while in use" in reader.problem
    reader.close()
    assert read_all(of) == list(range(40))


# crashes


def crash_at(call: int, share: float) -> None:
    """This process dies by SIGKILL in its n-th write, of which a part is done."""
    count = 0
    pwrite, truncate = os.pwrite, os.ftruncate

    def write(fd: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count == call:
            pwrite(fd, data[: int(share * len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(fd, data, offset)

    def resize(fd: int, size: int) -> None:
        nonlocal count
        count += 1
        truncate(fd, size)
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)

    os.pwrite, os.ftruncate = write, resize  # type: ignore[assignment]


crashes = st.tuples(st.just("crash"), st.integers(1, 90), st.floats(0, 1))
flips = st.tuples(st.just("flip"), st.sampled_from(["data", "index"]), st.floats(0, 1))
cuts = st.tuples(st.just("cut"), st.sampled_from(["data", "index"]), st.floats(0, 1))


@given(st.lists(crashes | flips | cuts, min_size=1, max_size=5), st.sampled_from([PLENTY, 60_000]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_dies_or_is_damaged_when_reads_are_right(
    tmp_path_factory: pytest.TempPathFactory, faults: list[tuple[Any, ...]], budget: int
) -> None:
    of = plan(tmp_path_factory.mktemp("disk"), budget=budget)
    for kind, what, where in faults:
        path = Path(of.place, str(what))
        if kind == "crash":

            def work(call: int = what, share: float = where) -> None:
                crash_at(call, share)
                read_all(of)

            assert in_child(work) in (0, -signal.SIGKILL)
        elif path.exists() and path.stat().st_size:
            at = int(where * (path.stat().st_size - 1))
            if kind == "flip":
                flip(path, at)
            else:
                os.truncate(path, at)
        assert held_bytes(of.folder) <= budget
    read_all(of)
    assert held_bytes(of.folder) <= budget
    asked = read_all(of)
    assert budget < PLENTY or asked == []


def test_jobs_that_are_killed_at_any_time_leave_others_and_later_ones_right(tmp_path: Path) -> None:
    source = Noise(samples=400)
    of = plan(tmp_path, source)
    rng = np.random.default_rng(5)
    deadline = time.monotonic() + 2.0
    survivor = begun(lambda: [read_all(of, source) for _ in range(20)] and None)
    while time.monotonic() < deadline:
        pid = begun(lambda: [read_all(of, source) for _ in range(20)] and None)
        time.sleep(float(rng.uniform(0.0, 0.02)))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) in (0, -signal.SIGKILL)
        if rng.random() < 0.2 and data_file(of).exists():
            os.truncate(data_file(of), int(rng.uniform(0.5, 1) * data_file(of).stat().st_size))
    assert ended(survivor) == 0
    read_all(of, source)
    assert read_all(of, source) == []


def test_a_job_that_stands_still_with_the_lock_does_not_stop_others(tmp_path: Path) -> None:
    of = plan(tmp_path)
    read_all(plan(tmp_path, Noise(samples=2)), Noise(samples=2))
    reader = DiskReader(of, Noise().open())
    told, tell = os.pipe()

    def stand() -> None:
        with Disk(of)._locked(1.0) as held:
            os.write(tell, b"+" if held else b"-")
            time.sleep(60)

    pid = begun(stand)
    assert os.read(told, 1) == b"+"
    assert reader.read(0) == Noise().sample(0)
    assert reader.counts["kept_samples"] == 0
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    assert reader.read(0) == Noise().sample(0)
    assert reader.counts["kept_samples"] == 1
    assert reader.problem is None
    reader.close()
    os.close(told)
    os.close(tell)


def test_threads_of_one_process_do_not_claim_the_same_room(tmp_path: Path) -> None:
    source = Noise(samples=200)
    of = plan(tmp_path, source)

    def work(number: int) -> None:
        reader = DiskReader(of, source.open())
        for id in range(number, 200, 4):
            reader.read(id)
        reader.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_all(of, source) == []


def test_many_writers_keep_each_sample_about_once(tmp_path: Path) -> None:
    source = Noise(samples=300)
    of = plan(tmp_path, source)

    def worker(number: int) -> Callable[[], None]:
        def work() -> None:
            reader = DiskReader(of, source.open())
            for id in range(number, 300, 4):
                assert reader.read(id) == source.sample(id)
            assert reader.counts["kept_samples"] == 75

        return work

    assert [ended(pid) for pid in [begun(worker(number)) for number in range(4)]] == [0] * 4
    exactly = sum(1 + len(packed(source.sample(id)) or b"") for id in range(300))
    assert data_file(of).stat().st_size == exactly + 64
    assert read_all(of, source) == []


# hosts, and the page cache


def test_a_folder_that_other_hosts_see_has_a_part_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(tmp_path / "local").folder == str(tmp_path / "local")
    monkeypatch.setattr("penstock.disk.plan._LOCAL", set())
    places = []
    for host in ("one", "two"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        places.append(plan(tmp_path / "shared").folder)
    assert places == [str(tmp_path / "shared" / f"host-{host}") for host in ("one", "two")]


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /mnt rw shared:1 - xfs /dev/sdb rw\n"
        "3 1 0:6 / /mnt/a\\040b rw - nfs4 server:/ rw\n"
        "4 1 0:7 / /mnt rw - tmpfs tmpfs rw\n"
    )
    found = [file_system(folder, str(mounts)) for folder in ("/home", "/mnt", "/mnt/a b/c", "/mnt/a", "/mntx")]
    assert found == ["ext4", "tmpfs", "nfs4", "tmpfs", "ext4"]
    assert file_system("/home", str(tmp_path / "none")) == ""


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    done = subprocess.run(["fincore", "-bnro", "RES", path], capture_output=True, text=True, check=True)
    return int(done.stdout or 0)


def test_with_memory_in_front_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    if file_system(str(tmp_path)) not in ("ext4", "xfs", "btrfs"):
        pytest.skip("what lies on a tmpfs lies in the page cache alone")
    source = Noise(samples=60, most=2_000_000)
    plans = {spare: plan(tmp_path / str(spare), source, 1 << 28) for spare in (False, True)}
    for spare, of in plans.items():
        read_all(of, source, spare=spare)
    whole = data_file(plans[False]).stat().st_size
    assert cached_bytes(data_file(plans[False])) > 0.9 * whole
    assert cached_bytes(data_file(plans[True])) < 0.75 * whole  # what is still to be written stays a while
    os.sync()
    for spare, of in plans.items():
        with data_file(of).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_all(of, source, spare=spare) == []
    assert cached_bytes(data_file(plans[False])) > 0.9 * whole
    assert cached_bytes(data_file(plans[True])) < 0.02 * whole


# what is stored anew


@dataclass(frozen=True)
class Stamped(Noise):
    """Knows the version of each sample."""

    versions: tuple[int, ...] = (0,) * 40

    def open(self) -> Counting:
        return CountingStamps(self)

    def sample(self, id: int) -> Sample:
        return {"image": super().sample(id)["image"] + bytes([self.versions[id]])}


class CountingStamps(Counting):
    def stamp(self, id: int) -> bytes:
        assert isinstance(self.source, Stamped)
        if self.source.versions[id] < 0:
            raise FileNotFoundError(id)
        return bytes([self.source.versions[id]])


def test_a_sample_that_was_stored_anew_is_read_anew(tmp_path: Path) -> None:
    of = plan(tmp_path, Stamped())
    read_all(of, Stamped())
    changed = Stamped(versions=(*(0,) * 20, 7, *(0,) * 19))
    assert read_all(of, changed) == [20]
    assert read_all(of, changed) == []


def test_a_source_that_cannot_be_asked_leaves_what_is_kept(tmp_path: Path) -> None:
    of = plan(tmp_path, Stamped())
    read_all(of, Stamped())
    reader = DiskReader(of, counting := Stamped(versions=(-1,) * 40).open())
    for id in range(40):
        assert reader.read(id) == Stamped().sample(id)
    assert counting.asked == []
    reader.close()
