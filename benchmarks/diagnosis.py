"""Whether a diagnosis tells the truth: its rates, its predictions, and what it costs a step while it watches.

- `truth`: G, P and S of trainings whose step, preparation and disk take known times.
- `overhead`: steps with and without the watch.
- `real`: a network's steps on the CPU, decoded photographs, a real disk that the kernel throttles. One diagnosis
  predicts what five cache sizes and three numbers of workers bring; each is then measured. Needs root and control
  groups of version 1.

`python -m benchmarks.diagnosis --part real`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks import harness, photos
from benchmarks.bystanders import Bystanders, undisturbed
from benchmarks.harness import Measured, Row
from benchmarks.throttled import Disk, Samples, limited
from penstock.diagnosis import diagnose
from penstock.diagnosis.conduct import Conductor
from penstock.diagnosis.session import Settings
from penstock.diagnosis.storage import drop
from penstock.profile import Profile
from penstock.whatif import as_it_is, predict

PARTS = ("truth", "overhead", "real")

# truth: seconds of a step of 16 samples, seconds to prepare one, bytes per second
TRUTHS = {
    "the step is slowest": (0.120, 0.008, 40e6),
    "preparing is slowest": (0.040, 0.012, 40e6),
    "the disk is slowest": (0.060, 0.008, 10e6),
    "all within 10%": (0.080, 0.0105, 20e6),
}
TRUTH_FILES, FILE_BYTES = 1200, 100_000
WITHIN_TRUTH, WITHIN_PREDICTION, WITHIN_OVERHEAD = 0.05, 0.04, 0.02

# real
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
WORKERS = (1, 2, 3)
DIAGNOSED_WORKERS = 2
BATCH, SIDE, CHANNELS = 16, 160, 52
DISK_BYTES_PER_S = 25_000_000
MEMORY_BYTES = 3 << 30


def truth(request: Measured) -> Measured:
    """A diagnosis of sleeping parts."""
    step_s, prep_s, bytes_per_s = TRUTHS[request["row"]]
    folder = photos.made(harness.scratch() / f"random-{TRUTH_FILES}-{FILE_BYTES}", _write_random)
    data = Samples(folder, Disk(bytes_per_s), prep_s)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2)
    profile = diagnose(loader, lambda batch: time.sleep(step_s), steps=request["steps"])
    return {
        "G_samples_per_s": profile.gpu_samples_per_s,
        "G_true": BATCH / step_s,
        "P_samples_per_s": profile.prep_samples_per_s,
        "P_true": 2 / prep_s,
        "S_bytes_per_s": profile.storage_bytes_per_s or float("nan"),
        "S_true": bytes_per_s,
        "notes": list(profile.notes),
    }


def _write_random(folder: Path) -> None:
    for number in range(TRUTH_FILES):
        (folder / f"{number:06}.bin").write_bytes(os.urandom(FILE_BYTES))


def overhead(request: Measured) -> Measured:
    """Seconds of a step that computes, watched or not."""
    torch.set_num_threads(1)
    steps, settle = request["steps"], request["steps"] // 2
    loader = DataLoader(TensorDataset(torch.randn(64 * 4 * steps, 32)), batch_size=64, num_workers=1)
    model = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    conductor = Conductor("overhead", Settings(steps=steps))
    begun: list[float] = []
    with conductor.watched() if request["row"] == "watched" else contextlib.nullcontext():
        for (batch,) in loader:
            begun.append(time.perf_counter())
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if len(begun) > settle + steps // 2:
                break
    assert (conductor.session is not None) == (request["row"] == "watched")
    durations = [after - before for before, after in itertools.pairwise(begun[settle:])]
    tenth = statistics.quantiles(durations, n=10)[0]  # other programs disturb the slower steps
    return {"tenth_s": tenth, "median_s": statistics.median(durations), "mean_s": statistics.fmean(durations)}


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Decoded and resized. A share of the files is held in memory for good; the others are read each time anew."""

    def __init__(self, root: Path, share: float) -> None:
        self._paths = sorted(root.rglob("*.jpg"))
        count = round(share * len(self._paths))
        held = random.Random(0).sample(range(len(self._paths)), count)
        self._held = {index: self._paths[index].read_bytes() for index in held}
        self._caches = share > 0

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self._open(index) as file, Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), index % photos.CLASSES

    @contextlib.contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        if index in self._held:
            yield io.BytesIO(self._held[index])
            return
        with self._paths[index].open("rb") as file:
            yield file
            if self._caches:  # what the cache does not hold is not to be in the page cache either
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Training:
    """A small network's steps on the CPU."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        width = CHANNELS
        self._model = nn.Sequential(
            *(nn.Conv2d(3, width, 5, 4), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2), nn.ReLU()),
            *(nn.Conv2d(2 * width, 4 * width, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(4 * width, photos.CLASSES),
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3, momentum=0.9)

    def step(self, batch: Any) -> None:
        pixels, labels = batch
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(pixels.float().div_(255)), labels).backward()
        self._optimizer.step()


def diagnosed(request: Measured) -> Measured:
    """The profile of the training without a cache."""
    root = Path(request["root"])
    with limited(root, DISK_BYTES_PER_S, MEMORY_BYTES):
        loader = DataLoader(
            Photographs(root, 0.0), batch_size=BATCH, shuffle=True, num_workers=DIAGNOSED_WORKERS, drop_last=True
        )
        others = Bystanders()
        profile = diagnose(loader, Training().step, steps=request["steps"])
    found = {"gpu_samples_per_s": profile.gpu_samples_per_s, "prep_samples_per_s": profile.prep_samples_per_s}
    return {"profile": profile.to_json(), "others_cores": others.cores(), **found}


def trained(request: Measured) -> Measured:
    """The rate of the training with a share of the files cached."""
    root = Path(request["root"])
    data = Photographs(root, request["share"])
    drop(map(str, root.rglob("*.jpg")))
    with limited(root, DISK_BYTES_PER_S, MEMORY_BYTES):
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=request["workers"], drop_last=True)
        training = Training()
        begun: list[float] = []
        others = Bystanders()
        for batch in itertools.islice(loader, request["settle"] + request["steps"] + 1):
            begun.append(time.perf_counter())
            training.step(batch)
        seconds = begun[-1] - begun[request["settle"]]
        rate = BATCH * (len(begun) - 1 - request["settle"]) / seconds
        return {"samples_per_s": rate, "others_cores": others.cores()}


def _truth_line(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return row.name, "failed", "", ""
    cells = []
    for part, true in (("G_samples_per_s", "G_true"), ("P_samples_per_s", "P_true"), ("S_bytes_per_s", "S_true")):
        found, expected = row.median(part), row.median(true)
        scale = 1e6 if expected > 1e6 else 1
        cells.append(f"{found / scale:.1f} / {expected / scale:.1f} ({found / expected - 1:+.1%})")
    return row.name, *cells


def _truths(options: argparse.Namespace) -> int:
    rows = [Row(name) for name in TRUTHS]
    request = {"steps": 4 if options.quick else 30}
    run = "benchmarks.diagnosis:truth"
    harness.alternate(
        rows,
        1 if options.quick else options.rounds,
        lambda row: harness.measure(run, {**request, "row": row.name}, cores=options.cores, timeout=options.timeout),
    )
    head = ("found / true", "G samples/s", "P samples/s", "S MB/s")
    text = harness.table(head, [_truth_line(row) for row in rows])
    for row in rows:
        if row.error is None and not options.quick and (far := _far(row)):
            row.error = f"further from the truth than {WITHIN_TRUTH:.0%}: {far}"
    return harness.finish("diagnosis-truth", options, {"cores": options.cores, **request}, rows, text)


def _far(row: Row) -> str:
    pairs = (("G_samples_per_s", "G_true"), ("P_samples_per_s", "P_true"), ("S_bytes_per_s", "S_true"))
    return ", ".join(part for part, true in pairs if not abs(row.median(part) / row.median(true) - 1) <= WITHIN_TRUTH)


def _overheads(options: argparse.Namespace) -> int:
    rows = [Row("alone"), Row("watched")]
    request = {"steps": 20 if options.quick else 1000}
    run = "benchmarks.diagnosis:overhead"
    harness.alternate(
        rows,
        1 if options.quick else options.rounds,
        lambda row: harness.measure(run, {**request, "row": row.name}, cores=options.cores, timeout=options.timeout),
    )
    keys = ("tenth_s", "median_s", "mean_s")
    lines = [(row.name, *(f"{1e3 * row.median(key):.3f}" for key in keys)) for row in rows]
    text = harness.table(("ms/step", "fastest tenth", "median", "mean"), lines)
    if not any(row.error for row in rows):
        added = rows[1].median("tenth_s") / rows[0].median("tenth_s") - 1
        text += f"\n\nthe watch adds {added:+.2%} to the fastest tenth"
        if added > WITHIN_OVERHEAD and not options.quick:
            rows[1].error = f"the watch adds {added:.2%} to a step, more than {WITHIN_OVERHEAD:.0%}"
    return harness.finish("diagnosis-overhead", options, {"cores": options.cores, **request}, rows, text)


def _reals(options: argparse.Namespace) -> int:
    root = photos.class_folders(options.photos, 256 if options.quick else 4000)
    steps, settle = (4, 4) if options.quick else (80, 20)
    profile_row = Row("diagnosis")
    rows = [Row(f"{workers} workers, {share:.0%} cached") for workers in WORKERS for share in SHARES]
    points = dict(zip((row.name for row in rows), itertools.product(WORKERS, SHARES), strict=True))

    def run(row: Row) -> Measured:
        request: Measured = {"root": str(root), "steps": steps, "settle": settle}
        name = "diagnosed"
        if row is not profile_row:
            name = "trained"
            request["workers"], request["share"] = points[row.name]

        def measure() -> Measured:
            return harness.measure(
                f"benchmarks.diagnosis:{name}", request, cores=options.cores, timeout=options.timeout
            )

        return measure() if options.quick else undisturbed(measure)

    rounds = 1 if options.quick else options.rounds
    harness.alternate([profile_row, *rows], rounds, run)
    if profile_row.error is None:
        middle = profile_row.median("gpu_samples_per_s")  # the same step differs by a tenth from process to process
        profile_row.samples.sort(key=lambda sample: abs(sample["gpu_samples_per_s"] - middle))
        text = _predictions(Profile.from_json(profile_row.samples[0]["profile"]), rows, points)
    else:
        text = "nothing was predicted"
    settings = {
        "cores": options.cores,
        "disk_bytes_per_s": DISK_BYTES_PER_S,
        "memory_bytes": MEMORY_BYTES,
        "batch": BATCH,
        "steps": steps,
    }
    return harness.finish("diagnosis-real", options, settings, [profile_row, *rows], text)


def _predictions(profile: Profile, rows: list[Row], points: dict[str, tuple[int, float]]) -> str:
    lines = []
    errors = []
    for row in rows:
        if row.error is not None:
            lines.append((row.name, "failed", "", "", "", "", ""))
            continue
        workers, share = points[row.name]
        setup = replace(as_it_is(profile), workers=workers, cached_share=share)
        found, measured = predict(profile, setup), row.median("samples_per_s")
        errors.append(abs(found.samples_per_s / measured - 1))
        rates = (found.fetch_samples_per_s or 0.0, found.prep_samples_per_s, found.gpu_samples_per_s)
        near = " *" if max(rates) < 1.1 * min(rates) else ""
        lines.append(
            (
                f"{row.name}{near}",
                *(f"{rate:.0f}" for rate in (*rates, found.least_samples_per_s, found.samples_per_s, measured)),
                f"{found.samples_per_s / measured - 1:+.1%}",
            )
        )
    head = ("samples/s", "F", "P", "G", "min(F, P, G)", "predicted", "measured", "off by")
    text = harness.table(head, lines)
    if errors:
        within = sum(error <= WITHIN_PREDICTION for error in errors)
        text += f"\n\n* F, P and G lie within 10% of each other; furthest off: {max(errors):.1%}; "
        text += f"{within} of {len(errors)} within {WITHIN_PREDICTION:.0%}"
    return text


def main() -> int:
    """Run it from the command line."""
    parser = harness.arguments(__doc__ or "", rounds=3)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args()
    runs = {"truth": _truths, "overhead": _overheads, "real": _reals}
    return max(runs[part](options) for part in PARTS if options.part in (None, part))


if __name__ == "__main__":
    raise SystemExit(main())
