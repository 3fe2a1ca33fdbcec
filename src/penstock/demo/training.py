"""The comparison: one network, trained from each loader, with the same clock on both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import penstock as ps
from penstock.demo.dataset import PillowImages
from penstock.demo.images import CLASSES
from penstock.options import available_cores
from penstock.terminal import progress

__all__ = ["Comparison", "Outcome", "compare", "report"]

BATCH = 64
SIDE = 64
SCALE = (0.35, 1.0)

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What one training did."""

    name: str
    images: int
    seconds: float
    waited_s: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Comparison:
    """Both outcomes, and what they had at their disposal."""

    outcomes: tuple[Outcome, ...]
    images: int
    epochs: int
    workers: int
    threads: int


def compare(root: Path, epochs: int) -> Comparison:
    """Train from Penstock and from torch's DataLoader, an epoch of each in turn, so that both have the same weather."""
    cores = available_cores()
    threads = max(1, cores // 2)
    workers = max(1, cores - threads)
    held_out = list(_held_out(root / "val"))
    images = sum(1 for path in (root / "train").rglob("*.jpg") if path.read_bytes())  # into the page cache, for both
    samples = PillowImages(root / "train", SIDE, SCALE)
    theirs = DataLoader(samples, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    with _threads(threads), ps.Loader(_pipe(root / "train"), workers=workers, name="demo") as ours:
        _Training("warming up", lambda: held_out, len(held_out)).epoch(lambda images: None)
        steps = epochs * len(ours)
        trainings = [
            _Training("Penstock", lambda: _from_penstock(ours), steps),
            _Training("DataLoader", lambda: theirs, steps),
        ]
        for number in range(epochs):
            for training in trainings:
                with progress(f"{training.name}, epoch {number + 1}", images) as advance:
                    training.epoch(advance)
        outcomes = tuple(training.outcome(held_out) for training in trainings)
    return Comparison(outcomes, images, epochs, workers, threads)


def _pipe(folder: Path) -> ps.Pipe:
    return ps.files(folder).decode().random_resized_crop(SIDE, scale=SCALE).flip().batch(BATCH)


def _from_penstock(loader: ps.Loader) -> Iterator[tuple[Tensor, Tensor]]:
    return ((batch["image"], batch["label"]) for batch in loader)


def _held_out(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    pipe = ps.files(folder).decode().resize(SIDE).center_crop(SIDE).batch(BATCH)
    with ps.Loader(pipe, shuffle=False, workers=0) as loader:
        yield from ((batch["image"].clone(), batch["label"].clone()) for batch in loader)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _network() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)

    def stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()

    return nn.Sequential(
        *stage(3, 16),
        *stage(16, 32),
        *stage(32, 64),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(CLASSES)),
    )


class _Training:
    """A network on its way, and the clock."""

    def __init__(self, name: str, feed: Callable[[], Batches], steps: int) -> None:
        self.name = name
        self._feed = feed
        self._network = _network()
        self._optimizer = torch.optim.AdamW(self._network.parameters())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, max_lr=0.01, total_steps=steps)
        self._seconds = self._waited_s = 0.0
        self._images = 0

    def epoch(self, advance: Callable[[int], None]) -> None:
        """From asking for the first batch, workers not yet started, to hearing that there is no more."""
        started = asked = time.perf_counter()
        for image, label in self._feed():
            self._waited_s += time.perf_counter() - asked
            self._step(image, label)
            self._images += len(label)
            advance(len(label))
            asked = time.perf_counter()
        self._waited_s += time.perf_counter() - asked
        self._seconds += time.perf_counter() - started

    def _step(self, image: Tensor, label: Tensor) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._network(_scaled(image)), label).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()

    def outcome(self, held_out: Batches) -> Outcome:
        """What came of it."""
        loss, accuracy = _measure(self._network, held_out)
        return Outcome(self.name, self._images, self._seconds, self._waited_s, loss, accuracy)


@torch.no_grad()
def _measure(network: nn.Module, held_out: Batches) -> tuple[float, float]:
    """Mean loss and share of right answers on the validation images."""
    network.eval()
    loss, right, seen = 0.0, 0, 0
    for image, label in held_out:
        scores = network(_scaled(image))
        loss += nn.functional.cross_entropy(scores, label, reduction="sum").item()
        right += int((scores.argmax(1) == label).sum())
        seen += len(label)
    return loss / seen, right / seen


def _scaled(image: Tensor) -> Tensor:
    """In one layout, whoever delivered it: channels last computes faster, and only Penstock's batches come so."""
    return image.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1.0


def report(comparison: Comparison) -> str:
    """Both side by side, and what was compared."""
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        ("", lambda outcome: outcome.name),
        ("images/s", lambda outcome: f"{outcome.images / outcome.seconds:,.0f}"),
        ("time waited for data", lambda outcome: f"{outcome.waited_s / outcome.seconds:.0%}"),
        ("training took", lambda outcome: f"{outcome.seconds:.1f} s"),
        ("loss, validation", lambda outcome: f"{outcome.loss:.3f}"),
        ("accuracy, validation", lambda outcome: f"{outcome.accuracy:.1%}"),
    ]
    lines = [f"{head:<22}" + "".join(f"{cell(one):>14}" for one in comparison.outcomes) for head, cell in rows]
    return "\n".join(["", *lines, "", *_terms(comparison)])


def _terms(comparison: Comparison) -> Iterator[str]:
    images, epochs = f"{comparison.images:,}", comparison.epochs
    workers, threads = comparison.workers, comparison.threads
    yield f"Both trained the same network from the same weights ({images} images, epochs: {epochs}), an epoch of each"
    yield f"in turn, with as many worker processes ({workers}) and threads for the network ({threads}); starting the"
    yield f"workers counts. Work per image: read, decode, random crop resized to {SIDE}x{SIDE} (antialiased), flip; the"
    yield "DataLoader's data set does it with Pillow. Crops and order are each loader's own, so loss and accuracy"
    yield "agree only roughly."
