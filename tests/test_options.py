"""Options: what is senseless is refused, with a message that says what would be right."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import typing
from typing import Any

import pytest
import torch

from penstock import limits, options
from penstock.errors import OptionError
from penstock.options import LoaderKeywords, LoaderOptions

SENSELESS: list[tuple[str, Any, str]] = [
    ("seed", 1.0, "a whole number"),
    ("seed", True, "a whole number"),
    ("seed", 2**64, "whole number from"),
    ("seed", -(2**63) - 1, "whole number from"),
    ("shuffle", 1, "True or False"),
    ("shuffle", "yes", "True or False"),
    ("workers", -1, "from 0 to 4096"),
    ("workers", 5000, "from 0 to 4096"),
    ("workers", 2.0, "a whole number"),
    ("workers", True, "a whole number"),
    ("workers", "all", "a whole number or 'auto'"),
    ("workers", None, "a whole number"),
    ("device", "gpu", "'cpu'"),
    ("device", None, "'cpu'"),
    ("gpu_lane", "on", "'auto', 'beside', 'between', 'off'"),
    ("exact", 1, "True or False"),
    ("device", ["cuda:0", "cuda:0"], "several different"),
    ("device_bytes", 1 << 20, "from 67108864"),
    ("on_error", "ignore", "'raise', 'skip', 'replace'"),
    ("on_error", None, "'raise', 'skip', 'replace'"),
    ("rank", -1, "from 0"),
    ("rank", 1, "below world_size=1"),
    ("world_size", 0, "from 1"),
    ("lend", 1, "True or False"),
    ("lend", True, "several ranks"),
    ("order", "any", "'plan', 'ready'"),
    ("order", ["plan"], "'plan', 'ready'"),
    ("start", "spawn", "'auto', 'clean', 'fork'"),
    ("prefetch", 0, "from 1"),
    ("prefetch", "much", "or 'auto'"),
    ("memory_bytes", 1000, "from 131072"),
    ("memory_bytes", "2GB", "or 'auto'"),
    ("memory_bytes", 1e9, "a whole number"),
    ("cache", "24 bananas", "such as '24GB'"),
    ("cache", 1.5, "a share of the memory"),
    ("cache_form", "pixels", "'encoded', 'decoded', 'auto'"),
    ("cache_form", "decoded", "give its size with cache="),
    ("timeout_s", 0, "a number of seconds"),
    ("timeout_s", -1.0, "a number of seconds"),
    ("timeout_s", True, "a number of seconds"),
    ("timeout_s", math.nan, "a number of seconds"),
    ("timeout_s", math.inf, "or None for ever"),
    ("timeout_s", "5", "a number of seconds"),
    ("metrics_port", -1, "from 0 to 65535"),
    ("metrics_port", 70000, "from 0 to 65535"),
    ("metrics_port", "9090", "a whole number"),
    ("cache_folder", 3, "must be a path"),
    ("cache_folder", "", "must be a path"),
    ("cache_folder_bytes", "many", "a text such as '100GB'"),
    ("cache_folder_bytes", 0, "a number of bytes"),
    ("cache_folder_bytes", 1.5, "up to 1.0"),
    ("cache_folder_bytes", "1GB", "the budget of a cache_folder; name one"),
    ("name", 5, "a text"),
    ("name", None, "a text"),
]


@pytest.mark.parametrize(("name", "value", "hint"), SENSELESS)
def test_senseless_values_are_refused(name: str, value: Any, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        LoaderOptions.checked({name: value})
    text = str(caught.value)
    assert text.startswith(name)
    assert hint in text
    assert repr(value) in text


def test_every_option_is_tried_above() -> None:
    assert {name for name, _, _ in SENSELESS} == {field.name for field in dataclasses.fields(LoaderOptions)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("workers", 0),
        ("workers", "auto"),
        ("prefetch", 1),
        ("timeout_s", None),
        ("timeout_s", 0.5),
        ("metrics_port", 0),
        ("memory_bytes", 1 << 20),
        ("cache", None),
        ("cache", "auto"),
        ("cache", "24GB"),
        ("cache", 0.5),
    ],
)
def test_sensible_values_are_kept(name: str, value: Any) -> None:
    assert getattr(LoaderOptions.checked({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("worker", "did you mean 'workers'?"),
        ("num_workers", "did you mean 'workers'?"),
        ("prefetch_factor", "did you mean 'prefetch'?"),
        ("timeout", "did you mean 'timeout_s'?"),
        ("batch_size", ".batch(size)"),
        ("drop_last", ".batch(size, drop_last=...)"),
        ("collate_fn", ".map(fn)"),
        ("sampler", "ps.DataLoader"),
        ("generator", "seed="),
        ("pin_memory", "device='cuda'"),
        ("quite_else", "there are seed, shuffle, workers"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        LoaderOptions.checked({name: 1})
    assert f"no option {name!r}" in str(caught.value)
    assert hint in str(caught.value)


def test_every_argument_of_torchs_loader_has_an_answer() -> None:
    theirs = set(inspect.signature(torch.utils.data.DataLoader).parameters) - {"dataset", "pin_memory_device"}
    for name in theirs - {field.name for field in dataclasses.fields(LoaderOptions)}:
        with pytest.raises(OptionError) as caught:
            LoaderOptions.checked({name: 1})
        assert "there are" not in str(caught.value), name


def test_the_keywords_for_type_checkers_are_the_options() -> None:
    keywords, known = typing.get_type_hints(LoaderKeywords), typing.get_type_hints(LoaderOptions)
    assert keywords == {field.name: known[field.name] for field in dataclasses.fields(LoaderOptions)}


def test_option_errors_are_value_errors() -> None:
    with pytest.raises(ValueError):
        LoaderOptions(seed="x")  # type: ignore[arg-type]


class Files:
    """What the files of a container say."""

    def __init__(self, files: dict[str, str]) -> None:
        self.read = lambda path: files.get(path.removeprefix("/sys/fs/cgroup/"), "")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "10000000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores_are_cut_by_the_containers_quota(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_read", Files(files).read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert options.available_cores() == cores
    assert LoaderOptions().worker_count == cores
    assert LoaderOptions(workers=0).worker_count == 0


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": str(64 * MIB), "memory.current": str(24 * MIB)}, 40 * MIB),
        (
            {
                "memory.max": str(64 * MIB),
                "memory.current": str(63 * MIB),
                "memory.stat": f"anon 5\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\nshmem 7",
            },
            31 * MIB,
        ),
        ({"memory.max": str(64 * MIB), "memory.current": str(70 * MIB)}, 0),
        (
            {
                "memory/memory.limit_in_bytes": str(64 * MIB),
                "memory/memory.usage_in_bytes": str(60 * MIB),
                "memory/memory.stat": f"total_active_file {MIB}\ntotal_inactive_file {2 * MIB}\nactive_file 999999999",
            },
            7 * MIB,
        ),
    ],
)
def test_memory_is_cut_by_the_containers_limit(
    files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options.available_memory_bytes()
    with open("/proc/meminfo") as file:
        machine = {"/proc/meminfo": file.read()}
    monkeypatch.setattr(limits, "_read", Files(files | machine).read)
    if free is None:
        assert options.available_memory_bytes() > 0.5 * whole
    else:
        assert options.available_memory_bytes() == free
        assert LoaderOptions().memory == free // 4


def test_batch_memory_is_two_gibibytes_at_most_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "available_memory_bytes", lambda: 1 << 50)
    assert LoaderOptions().memory == 2 << 30
    assert LoaderOptions(memory_bytes=5 << 30).memory == 5 << 30


def test_a_file_that_is_not_there_says_nothing() -> None:
    assert options._read("/no/such/file") == ""
