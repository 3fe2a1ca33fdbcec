"""Images per second of Penstock and its peers on the same photographs: random resized crop, flip, or RandAugment too.

`python -m benchmarks.contest [--augment rand] [--cores 1] [--only torch_pillow dali]`
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness, photos
from benchmarks.contenders import CONTENDERS, Contender, Job
from benchmarks.harness import Measured, Row

Batch = tuple[Any, Any]


def describe(request: Measured) -> Measured:
    """What a contender says of itself."""
    module = _contender(request["name"])
    return {"note": module.NOTE, "augments": module.AUGMENTS, "workers": module.WORKERS}


def prepare(request: Measured) -> Measured:
    """Write the contender's own form of the data set, if it has one, and read all files once."""
    module, job = _contender(request["name"]), _job(request)
    if hasattr(module, "prepare"):
        photos.made(job.own, lambda folder: module.prepare(Job(**{**vars(job), "own": folder})))
    return {"bytes": photos.warm(job.own if job.own.exists() else job.root)}


def measure(request: Measured) -> Measured:
    """One warm-up epoch, one timed epoch."""
    job = _job(request)
    batches = _contender(request["name"]).batches(job)
    first = _checked(next(batches), job)
    if request["show"]:
        _save(first, Path(request["show"]) / f"{request['name']}-{job.augment}.png")
    _take(batches, job.samples - len(first))
    start = time.perf_counter()
    images = _take(batches, job.samples)
    seconds = time.perf_counter() - start
    return {"images_per_s": images / seconds, "seconds": seconds, "images": images, "mean": float(first.mean())}


def _contender(name: str) -> Contender:
    return cast(Contender, importlib.import_module(f"benchmarks.contenders.{name}"))


def _job(request: Measured) -> Job:
    return Job(**{**request["job"], "root": Path(request["job"]["root"]), "own": Path(request["job"]["own"])})


def _take(batches: Iterator[Batch], images: int) -> int:
    """Ask for batches until they hold so many images; the number they held."""
    count = 0
    while count < images:
        count += len(next(batches)[1])
    return count


def _checked(batch: Batch, job: Job) -> NDArray[np.uint8]:
    """The images as NHWC, if they are what the job asks for."""
    images, labels = np.asarray(batch[0]), np.asarray(batch[1])
    if images.shape[1] == 3:
        images = images.transpose(0, 2, 3, 1)
    expected = (job.batch, job.size, job.size, 3)
    if images.shape != expected or images.dtype != np.uint8 or labels.shape != (job.batch,):
        raise ValueError(f"expected uint8 images {expected}, got {images.dtype} {images.shape}, labels {labels.shape}")
    if len(np.unique(labels)) < min(job.batch, photos.CLASSES) / 3:
        raise ValueError(f"expected a shuffled batch, got labels {labels.tolist()}")
    return images


def _save(images: NDArray[np.uint8], path: Path) -> None:
    """The first 16 images as one picture, for a look at what a contender makes."""
    from PIL import Image

    rows = [np.concatenate(list(images[start : start + 4]), axis=1) for start in range(0, 16, 4)]
    Image.fromarray(np.concatenate(rows)).save(path)


class Contest:
    """The parent's side: a row per contender, each with the number of workers that suits it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.samples = 256 if options.quick else options.samples
        self.root = photos.class_folders(options.photos, self.samples)
        self.workers: dict[str, int] = {}
        self.rows: list[Row] = []

    def request(self, name: str, workers: int, samples: int | None = None) -> Measured:
        """What a measuring process is told."""
        own = self.root.with_name(f"{self.root.name}-{name}")
        job = {
            "root": str(self.root),
            "own": str(own),
            "samples": samples or self.samples,
            "workers": workers,
            "batch": 64,
            "size": 224,
            "augment": self.options.augment,
            "seed": 0,
        }
        return {"name": name, "job": job, "show": str(self.options.show.resolve()) if self.options.show else ""}

    def call(self, function: str, request: Measured) -> Measured:
        """In a process of its own."""
        options = self.options
        return harness.measure(f"benchmarks.contest:{function}", request, cores=options.cores, timeout=options.timeout)

    def enter(self, name: str) -> None:
        """Make the row; find its number of workers in an untimed round."""
        row = Row(name)
        try:
            said = self.call("describe", {"name": name})
            if self.options.augment not in said["augments"]:
                return
            row.note = said["note"]
            self.call("prepare", self.request(name, 1))
            self.workers[name] = self._tuned(name, [self.options.cores + extra for extra in said["workers"]])
        except RuntimeError as error:
            row.error = str(error)
        self.rows.append(row)

    def _tuned(self, name: str, choices: list[int]) -> int:
        if len(choices) == 1 or self.options.quick:
            return choices[0]
        samples = min(self.samples, 1000)
        rates = [self.call("measure", self.request(name, n, samples))["images_per_s"] for n in choices]
        return max(zip(rates, choices, strict=True))[1]

    def run(self) -> None:
        """Enter all, then all rounds in turn."""
        for name in self.options.only or CONTENDERS:
            self.enter(name)
        rounds = 1 if self.options.quick else self.options.rounds
        harness.alternate(self.rows, rounds, lambda r: self.call("measure", self.request(r.name, self.workers[r.name])))

    def table(self) -> str:
        """Medians, the spread, and the ratio to the first contender."""
        base = self.rows[0].median("images_per_s")
        head = ("images/s", "median", "min", "max", "ratio", "workers", "note")
        return harness.table(head, [self._line(row, base) for row in self.rows])

    def _line(self, row: Row, base: float) -> tuple[str, ...]:
        if row.error is not None:
            return row.name, "failed", "", "", "", "", ""
        rates = row.values("images_per_s")
        median = row.median("images_per_s")
        figures = (f"{median:.0f}", f"{min(rates):.0f}", f"{max(rates):.0f}", f"{median / base:.2f}")
        return row.name, *figures, str(self.workers[row.name]), row.note


def main() -> int:
    """Run it from the command line."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--augment", choices=("default", "rand"), default="default")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders")
    parser.add_argument("--show", type=Path, help="save a picture of each contender's first batch to this folder")
    options = parser.parse_args()
    contest = Contest(options)
    contest.run()
    sizes = [path.stat().st_size for path in itertools.islice(contest.root.rglob("*.jpg"), contest.samples)]
    settings = {
        "augment": options.augment,
        "cores": options.cores,
        "rounds": options.rounds,
        "samples": contest.samples,
        "batch": 64,
        "size": 224,
        "workers": contest.workers,
        "mean_file_bytes": round(sum(sizes) / len(sizes)),
        "photographs": "generated" if options.photos is None else "given",
    }
    name = f"contest-{options.augment}-{options.cores}core{'s' if options.cores > 1 else ''}"
    return harness.finish(name, options, settings, contest.rows, contest.table())


if __name__ == "__main__":
    raise SystemExit(main())
