"""Sizes of a cache: what can be said, what is refused, what the machine and the container leave."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import limits
from penstock.cache import budget
from penstock.cache.budget import budget_bytes, check_cache
from penstock.errors import OptionError
from penstock.limits import Room

GB, MIB = 10**9, 1 << 20


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("24GB", 24 * GB),
        ("512MiB", 512 * MIB),
        ("1.5 gib", 3 << 29),
        ("2000KB", 2_000_000),
        ("2TiB", 2 << 40),
        (0.5, 5 * GB),
        (1.0, 10 * GB),
    ],
)
def test_sizes_and_shares(value: Any, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory_room", lambda: Room(10 * GB, 7 * GB))
    check_cache(value)
    assert budget_bytes(value, 0, 1) == found


def test_auto_is_what_is_free_beyond_batches_the_reserve_and_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory_room", lambda: Room(16 * GB, 9 * GB))
    assert budget_bytes("auto", 2 * GB, 0) == 6 * GB
    assert budget_bytes("auto", 2 * GB, 512) == 3 * GB
    assert budget_bytes("auto", 20 * GB, 0) == MIB


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("24", "such as '24GB'"),
        ("much", "such as '24GB'"),
        ("-1GB", "such as '24GB'"),
        ("1KB", "from 1MiB"),
        ("3TiB", "to 2TiB"),
        (0, "a share of the memory"),
        (0.0, "a share of the memory"),
        (1.5, "up to 1.0"),
        (1, "up to 1.0"),
        (-0.5, "above 0.0"),
        (24 * GB, "write '22888MiB'"),
        (float("nan"), "a share of the memory"),
        (True, "such as '24GB'"),
        (b"24GB", "such as '24GB'"),
    ],
)
def test_senseless_sizes_are_refused(value: Any, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_cache(value)
    assert str(caught.value).startswith("cache")
    assert hint in str(caught.value)
    assert repr(value) in str(caught.value)


class Files:
    """What the kernel's files say."""

    def __init__(self, files: dict[str, str]) -> None:
        meminfo = {"/proc/meminfo": f"MemTotal: {1 << 20} kB\nMemFree: 7 kB\nMemAvailable: {1 << 19} kB"}
        self.files = meminfo | files
        self.read = lambda path: self.files.get(path, "")


V1 = "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, Room(1024 * MIB, 512 * MIB)),
        (
            {f"{V1}/memory.limit_in_bytes": str(2**63 - 1), f"{V1}/memory.usage_in_bytes": "5"},
            Room(1024 * MIB, 512 * MIB),
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu:/\n4:memory:/job/step\n0::/",
                f"{V1}/job/step/memory.limit_in_bytes": str(300 * MIB),
                f"{V1}/job/step/memory.usage_in_bytes": str(100 * MIB),
                f"{V1}/job/memory.limit_in_bytes": str(400 * MIB),
                f"{V1}/job/memory.usage_in_bytes": str(350 * MIB),
                f"{V1}/job/memory.stat": f"total_active_file {MIB}\ntotal_inactive_file {2 * MIB}",
            },
            Room(300 * MIB, 53 * MIB),
        ),
        (
            {
                "/proc/self/cgroup": "0::/job",
                "/sys/fs/cgroup/job/memory.max": str(200 * MIB),
                "/sys/fs/cgroup/job/memory.current": str(210 * MIB),
            },
            Room(200 * MIB, 0),
        ),
    ],
)
def test_memory_is_cut_by_every_group_around_the_process(
    files: dict[str, str], room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_read", Files(files).read)
    assert limits.memory_room() == room


def test_time_lost_to_memory_is_the_kernels_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7"
    monkeypatch.setattr(limits, "_read", Files({"/proc/pressure/memory": text}).read)
    assert limits.memory_stall_s() == 1.5
    group = {"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/memory.pressure": text.replace("1500000", "2000000")}
    monkeypatch.setattr(limits, "_read", Files(group).read)
    assert limits.memory_stall_s() == 2.0
    monkeypatch.setattr(limits, "_read", Files({}).read)
    assert limits.memory_stall_s() == 0.0
