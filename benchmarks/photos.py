"""The data set: photographs repeated to so many samples, as files in class folders, every one a file of its own.

The copies are real ones: hard links would let the processor's cache hold the whole data set.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness import scratch

__all__ = ["class_folders", "made", "warm"]

CLASSES = 50
GENERATED = 160


def class_folders(photos: Path | None, samples: int) -> Path:
    """The data set's folder; written on first use. Without a folder of photographs, images like them are generated."""
    folder = photos or made(scratch() / f"generated-{GENERATED}", _generate)
    sources = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not sources:
        raise SystemExit(f"expected JPEG files in {folder}, found none; name another folder with --photos")
    key = hashlib.blake2b(repr([(p.name, p.stat().st_size) for p in sources]).encode(), digest_size=4).hexdigest()
    return made(scratch() / f"photos-{samples}-{key}", lambda target: _repeat(sources, samples, target))


def made(target: Path, write: Callable[[Path], None]) -> Path:
    """The folder, written by `write` if it is not there; it appears complete or not at all."""
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder, "fresh")
            fresh.mkdir()
            write(fresh)
            fresh.rename(target)
    return target


def warm(folder: Path) -> int:
    """Read every file once, so that the page cache holds it; returns the bytes."""
    return sum(len(path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def _repeat(sources: list[Path], samples: int, target: Path) -> None:
    for number in range(samples):
        folder = target / f"class_{number % CLASSES:02}"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(sources[number % len(sources)], folder / f"{number:06}.jpg")


def _generate(target: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(GENERATED):
        width, height = rng.integers(380, 600), rng.integers(300, 480)
        Image.fromarray(_picture(rng, int(height), int(width))).save(target / f"{number:04}.jpg", quality=90)


def _picture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Noise with the spectrum of natural images (amplitude 1/f); at quality 90 about 100 KB for 500x375."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    amplitude = 1 / np.maximum(np.hypot(down, across), 1 / max(height, width))
    grey, red, blue = (np.fft.irfft2(amplitude * _phases(rng, amplitude.shape), (height, width)) for _ in range(3))
    planes = np.stack([grey + 0.3 * red, grey, grey + 0.3 * blue], axis=-1)
    picture: NDArray[np.uint8] = np.clip(127 + 55 * planes / planes.std(), 0, 255).astype(np.uint8)
    return picture


def _phases(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.complex128]:
    phases: NDArray[np.complex128] = np.exp(2j * np.pi * rng.random(shape))
    return phases
