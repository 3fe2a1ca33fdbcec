"""The options of a Loader: one validated dataclass."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from penstock.cache.budget import CacheSize, check_cache
from penstock.cache.forms import CacheForm, Form
from penstock.errors import OptionError
from penstock.graphwork import OnError
from penstock.lanes import MOST_WORKERS
from penstock.limits import memory_room
from penstock.sharing import Mode
from penstock.units import parse_bytes

__all__ = ["LoaderKeywords", "LoaderOptions", "available_cores", "available_memory_bytes"]

Delivery = Literal["plan", "ready"]
Start = Literal["auto", "clean", "fork"]
Lane = Literal["auto", "beside", "between", "off"]


class LoaderKeywords(TypedDict, total=False):
    """The keywords of `Loader`, for type checkers; `LoaderOptions` says what they mean."""

    seed: int
    shuffle: bool
    workers: int | Literal["auto"]
    device: str | Sequence[str]
    gpu_lane: Lane
    exact: bool
    device_bytes: int
    on_error: OnError
    rank: int
    world_size: int
    lend: bool
    order: Delivery
    start: Start
    prefetch: int | Literal["auto"]
    memory_bytes: int | Literal["auto"]
    cache: CacheSize
    cache_form: CacheForm
    timeout_s: float | None
    metrics_port: int | None
    name: str
    cache_folder: str | os.PathLike[str] | None
    cache_folder_bytes: int | float | str | None


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What a Loader can be told. Everything has a default that suits."""

    seed: int = 0
    """Order and augmentation follow from it, whole number of at most 64 bits."""
    shuffle: bool = True
    workers: int | Literal["auto"] = "auto"
    """Worker processes; 0 prepares batches in the training process; "auto": one for each core this process may use."""
    device: str | Sequence[str] = "cpu"
    """Where batches are: "cpu", "cuda", or one of several GPUs such as "cuda:1". A list of GPUs, such as
    ["cuda:0", "cuda:1"], gets batches in turn: the first batch of each iteration is on the first of them."""
    gpu_lane: Lane = "auto"
    """Whether the GPU, if batches go to one, decodes and augments too, and whether beside the training's steps or
    between them; "auto": where the pipeline lets it, in the way that proves faster."""
    exact: bool = False
    """Tie every sample to a kind of lane, so that runs with a GPU lane repeat bit for bit."""
    device_bytes: int = 1 << 30
    """The budget of memory on the device: what a GPU lane works in, and batches that are prepared ahead."""
    on_error: OnError = "raise"
    """A sample that cannot be prepared: raise an error, skip it (a smaller batch), or replace it by another."""
    rank: int = 0
    world_size: int = 1
    lend: bool = False
    """Lend workers to ranks of the same job on this machine whose training waits while this one does not, and borrow
    theirs; ranks belong to one job if their pipeline, seed, name and world_size are the same."""
    order: Delivery = "plan"
    """Deliver batches in the planned order, or each as soon as it is ready (the same batches)."""
    start: Start = "auto"
    """Workers from a clean process, or forked from this one; "auto": forked if the pipeline holds objects of yours."""
    prefetch: int | Literal["auto"] = "auto"
    """Batches prepared ahead of the training loop."""
    memory_bytes: int | Literal["auto"] = "auto"
    """The budget of all batch memory; "auto": 2 GiB, or a quarter of the memory available if that is less."""
    cache: CacheSize = None
    """Keep encoded samples in memory that all workers and loaders of this user on this host share: a size such as
    "24GB", a share of the memory such as 0.5, or "auto" for what is free; None: keep none."""
    cache_form: CacheForm = "encoded"
    """How the cache keeps samples: "encoded" as they are stored, "decoded" as the pixels that the pipeline begins with
    in every epoch, "auto" as many of either as saves most time."""
    timeout_s: float | None = 300.0
    """How long to wait for a batch before the workers' stacks are shown in an error; None: for ever."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port; 0 takes a free one (`loader.metrics_port`)."""
    name: str = ""
    """What `penstock top` and metrics call this loader."""
    cache_folder: str | os.PathLike[str] | None = None
    """A folder on a local disk in which samples of a slow source (an object store, a network file system) are kept, for
    this job and later ones; None: they are not."""
    cache_folder_bytes: int | float | str | None = None
    """The budget of all that `cache_folder` holds: bytes, a text such as "100GB", or a fraction (a float) of what the
    folder holds and what is free on its disk; None: half of that."""

    @classmethod
    def checked(cls, keywords: dict[str, Any]) -> LoaderOptions:
        """Options from keywords; an unknown one is an error that names the nearest."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name in _INSTEAD:
                raise OptionError(f"Loader has no option {name!r}; {_INSTEAD[name]}")
            if name not in known:
                near = difflib.get_close_matches(_FOREIGN.get(name, name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise OptionError(f"Loader has no option {name!r}; {hint}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        _whole("seed", self.seed, -(2**63), 2**64 - 1)
        _flag("shuffle", self.shuffle)
        _whole_or_auto("workers", self.workers, 0, MOST_WORKERS)
        _one_of("on_error", self.on_error, get_args(OnError))
        _one_of("order", self.order, get_args(Delivery))
        _one_of("start", self.start, get_args(Start))
        _whole("world_size", self.world_size, 1, 2**31)
        _whole("rank", self.rank, 0, 2**31)
        if self.rank >= self.world_size:
            raise OptionError(f"rank must be below world_size={self.world_size}, not {self.rank}; ranks count from 0")
        _whole_or_auto("prefetch", self.prefetch, 1, 10**6)
        _whole_or_auto("memory_bytes", self.memory_bytes, 1 << 17, 2**62)
        check_cache(self.cache)
        _one_of("cache_form", self.cache_form, (*get_args(Form), "auto"))
        if self.cache is None and self.cache_form != "encoded":
            raise OptionError(
                f"cache_form={self.cache_form!r} says how a cache keeps samples; give its size with cache="
            )
        if self.timeout_s is not None:
            _seconds("timeout_s", self.timeout_s)
        if self.metrics_port is not None:
            _whole("metrics_port", self.metrics_port, 0, 65535)
        _device(self.device)
        if len(self.devices) > 1 and self.order == "ready":
            raise OptionError(
                "several devices get batches in turn, which order='ready' does not keep; use order='plan'"
            )
        _one_of("gpu_lane", self.gpu_lane, get_args(Lane))
        _flag("exact", self.exact)
        _flag("lend", self.lend)
        if self.lend and (self.world_size == 1 or self.worker_count == 0):
            raise OptionError(
                "lend=True is for several ranks that have workers; set world_size and rank, or leave it out"
            )
        _whole("device_bytes", self.device_bytes, 64 << 20, 2**40)
        if not isinstance(self.name, str):
            raise OptionError(f"name must be a text, not {self.name!r}")
        self._check_disk()

    def _check_disk(self) -> None:
        folder, budget = self.cache_folder, self.cache_folder_bytes
        if folder is not None and not (isinstance(folder, str | os.PathLike) and os.fspath(folder)):
            raise OptionError(f"cache_folder must be a path, or None for no disk tier, not {folder!r}")
        if budget is not None:
            _amount(budget)
        if budget is not None and folder is None:
            raise OptionError(f"cache_folder_bytes={budget!r} is the budget of a cache_folder; name one too")

    @property
    def worker_count(self) -> int:
        return available_cores() if self.workers == "auto" else self.workers

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs that batches go to; none where they stay in host memory."""
        names = (self.device,) if isinstance(self.device, str) else tuple(self.device)
        return () if names == ("cpu",) else names

    @property
    def pinned_sharing(self) -> Mode | None:
        """How a GPU lane is to share the GPU, where that was said."""
        return None if self.gpu_lane == "auto" or self.gpu_lane == "off" else self.gpu_lane

    @property
    def disk_budget(self) -> int | float:
        """Bytes, or a fraction."""
        return _DISK_SHARE if self.cache_folder_bytes is None else _amount(self.cache_folder_bytes)

    @property
    def memory(self) -> int:
        return min(2 << 30, available_memory_bytes() // 4) if self.memory_bytes == "auto" else self.memory_bytes


_DISK_SHARE = 0.5
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_GPU = re.compile(r"cuda:\d+")
_LONGEST_S = 2_000_000
"""What `poll` can wait at most, in round numbers."""
_SAMPLER = "seed= and shuffle= decide the order; an order of your own is what ps.DataLoader takes samplers for"
_INSTEAD = {
    "batch_size": "it is said in the pipeline: .batch(size)",
    "drop_last": "it is said in the pipeline: .batch(size, drop_last=...)",
    "ragged": "it is said in the pipeline: .batch(size, ragged=...)",
    "collate_fn": "the pipeline makes batches: .batch(size, ragged=...); .map(fn) changes samples",
    "sampler": _SAMPLER,
    "batch_sampler": _SAMPLER,
    "generator": "seed= decides the order and all that is drawn",
    "persistent_workers": "workers always stay until close()",
    "pin_memory": "device='cuda' gives batches that are on the GPU already",
    "worker_init_fn": "samples find the generators seeded; what a worker needs once belongs into a source's open()",
    "multiprocessing_context": "start='clean' or start='fork' says where workers come from",
    "in_order": "order='plan' or order='ready' says it",
}
"""What to say in place of options of torch's DataLoader that have no counterpart by another name."""
_FOREIGN = {"num_workers": "workers", "batch_order": "order", "prefetch_factor": "prefetch", "timeout": "timeout_s"}


def _amount(value: object) -> int | float:
    """Of `cache_folder_bytes`: bytes as an int, a fraction as a float."""
    with contextlib.suppress(OptionError):
        value = parse_bytes(value) if isinstance(value, str) else value
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if whole or (isinstance(value, float) and 0 < value <= 1):
        return value  # type: ignore[return-value]
    raise OptionError(
        "cache_folder_bytes must be a number of bytes, a text such as '100GB', or a fraction above 0.0 and up to 1.0, "
        f"not {value!r}"
    )


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"{name} must be a whole number from {least} to {most}, not {value!r}")


def _whole_or_auto(name: str, value: object, least: int, most: int) -> None:
    if value != "auto":
        if isinstance(value, str):
            raise OptionError(f"{name} must be a whole number or 'auto', not {value!r}")
        _whole(name, value, least, most)


def _device(value: Any) -> None:
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return
    several = isinstance(value, list | tuple) and all(isinstance(item, str) and _GPU.fullmatch(item) for item in value)
    if not several or not value or len(set(value)) < len(value):
        raise OptionError(
            f"device must be 'cpu', 'cuda' or 'cuda:N', or several different 'cuda:N' in a list, not {value!r}"
        )


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")


def _seconds(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= _LONGEST_S:  # type: ignore[operator]
        raise OptionError(
            f"{name} must be a number of seconds, at most {_LONGEST_S:,}, or None for ever, not {value!r}"
        )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def available_cores() -> int:
    """The cores this process may use: its affinity, cut by its container's quota."""
    cores = len(os.sched_getaffinity(0))
    for quota in (_quota_v2(), _quota_v1()):
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def available_memory_bytes() -> int:
    """Memory that can still be had: the machine's, cut by the container's limit."""
    return memory_room().free


def _quota_v2() -> float | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1() -> float | None:
    quota, period = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
