"""`penstock.DataLoader` beside `torch.utils.data.DataLoader`: same arguments, datasets that neither can look into.

tiny: a __getitem__ of about a microsecond. light: a float tensor 3x32x32. heavy: Pillow decodes and augments a
photograph. uneven: one sample in twenty computes twenty times as long; waiting: it waits for its storage so long, and
there are four workers. `balance` is the time that the work would take if it were spread perfectly over the workers, as
a share of the time it took; `longest wait` is that between two batches, the first of an epoch being apart.

`python -m benchmarks.opaque [--only uneven]`
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks import harness, photos
from benchmarks.harness import Measured, Row

SAMPLES = {"tiny": 640_000, "light": 64_000, "heavy": 2_000, "uneven": 6_400, "waiting": 12_800}
WORKERS = {"waiting": 4}
"""Two where nothing else is said."""
QUICK = 20
"""A quick run takes this fraction of the samples."""
LOADERS = ("torch", "penstock")
BASE_S, SLOW_EVERY, SLOW_TIMES = 0.001, 20, 20
_INEXACT_S = 0.0002
"""How much longer than asked for a sleep may take."""


class Tiny(Dataset[int]):
    """An int, at once."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return index


class Light(Tiny):
    """A small tensor from memory."""

    def __init__(self, samples: int) -> None:
        import torch

        super().__init__(samples)
        self.data = torch.rand(1024, 3, 32, 32)

    def __getitem__(self, index: int) -> Any:
        return self.data[index % 1024], index % 10


class Uneven(Tiny):
    """Computes for 1 ms, or 20 ms. Counted in CPU time, so that the amount of work does not depend on the machine."""

    def seconds(self, index: int) -> float:
        """The CPU time of one sample."""
        return BASE_S * (SLOW_TIMES if index % SLOW_EVERY == 0 else 1)

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.seconds(index)
        while time.thread_time() < until:
            pass
        return index


class Waiting(Uneven):
    """Waits for 1 ms, or 20 ms. It sleeps for most of that time, and looks at the clock for the rest of it."""

    def __getitem__(self, index: int) -> Any:
        until = time.perf_counter() + self.seconds(index)
        time.sleep(self.seconds(index) - _INEXACT_S)
        while time.perf_counter() < until:
            pass
        return index


def _dataset(case: str, samples: int, root: str) -> Dataset[Any]:
    if case == "heavy":
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        steps = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        folder: Dataset[Any] = ImageFolder(root, steps)
        return folder
    kinds: dict[str, type[Tiny]] = {"tiny": Tiny, "light": Light, "uneven": Uneven, "waiting": Waiting}
    return kinds[case](samples)


def _loader(name: str) -> type[DataLoader[Any]]:
    if name == "torch":
        return DataLoader
    from penstock import DataLoader as PenstockLoader

    return PenstockLoader


def measure(request: Measured) -> Measured:
    """A warm-up epoch, then a timed one. In a round both loaders have the same order, on which the waits depend."""
    import torch

    torch.manual_seed(request["round"])
    case, samples = request["case"], request["samples"]
    dataset = _dataset(case, samples, request["root"])
    workers = request["workers"]
    loader = _loader(request["loader"])(
        dataset, batch_size=64, shuffle=True, num_workers=workers, persistent_workers=True
    )
    for _ in loader:
        pass
    arrivals = [time.perf_counter()]
    for _ in loader:
        arrivals.append(time.perf_counter())
    seconds = time.perf_counter() - arrivals[0]
    waits = [after - before for before, after in itertools.pairwise(arrivals[1:])]
    measured = {
        "samples_per_s": samples / seconds,
        "longest_wait_s": max(waits),
        "first_wait_s": arrivals[1] - arrivals[0],
    }
    if isinstance(dataset, Uneven):
        measured["balance"] = sum(dataset.seconds(i) for i in range(samples)) / workers / seconds
    return measured


def _run(row: Row, options: argparse.Namespace) -> Measured:
    case, loader = row.name.split("/")
    samples = SAMPLES[case] // (QUICK if options.quick else 1)
    root = photos.class_folders(options.photos, samples) if case == "heavy" else Path()
    request = {"case": case, "loader": loader, "samples": samples, "workers": WORKERS.get(case, 2), "root": str(root)}
    request["round"] = len(row.samples)
    return harness.measure("benchmarks.opaque:measure", request, cores=options.cores, timeout=options.timeout)


def _line(case: str, torch: Row, penstock: Row) -> tuple[str, ...]:
    if torch.error or penstock.error:
        return case, "failed", "", "", "", "", "", ""
    rates = [row.median("samples_per_s") for row in (torch, penstock)]
    waits = [row.median("longest_wait_s") for row in (torch, penstock)]
    uneven = case in ("uneven", "waiting")
    balance = [f"{row.median('balance'):.3f}" if uneven else "" for row in (torch, penstock)]
    return (
        *(case, *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.3f}"),
        *(*balance, f"{1000 * waits[0]:.1f}", f"{1000 * waits[1]:.1f}"),
    )


def main() -> int:
    """Run it from the command line."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(SAMPLES), default=list(SAMPLES), help="these datasets")
    options = parser.parse_args()
    rows = [Row(f"{case}/{loader}") for case in options.only for loader in LOADERS]
    harness.alternate(rows, 1 if options.quick else options.rounds, lambda row: _run(row, options))
    head = (
        *("dataset", "torch/s", "penstock/s", "ratio", "balance torch", "balance penstock"),
        *("longest wait ms torch", "longest wait ms penstock"),
    )
    pairs = zip(options.only, rows[::2], rows[1::2], strict=True)
    text = harness.table(head, [_line(case, torch, penstock) for case, torch, penstock in pairs])
    workers = {case: WORKERS.get(case, 2) for case in options.only}
    samples = {case: SAMPLES[case] for case in options.only}
    settings = {"cores": options.cores, "workers": workers, "batch": 64, "samples": samples}
    return harness.finish("opaque", options, settings, rows, text)


if __name__ == "__main__":
    raise SystemExit(main())
