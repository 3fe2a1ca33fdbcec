"""JPEG files for tests: of random coefficients, in samplings and layouts that Pillow's encoder does not write."""

from __future__ import annotations

import io
import random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Sampling = tuple[tuple[int, int], ...]
"""Horizontal and vertical factor of each component."""

SAMPLINGS: dict[str, Sampling] = {
    "4:4:4": ((1, 1), (1, 1), (1, 1)),
    "4:2:2": ((2, 1), (1, 1), (1, 1)),
    "4:2:0": ((2, 2), (1, 1), (1, 1)),
    "4:4:0": ((1, 2), (1, 1), (1, 1)),
    "4:1:1": ((4, 1), (1, 1), (1, 1)),
    "4:1:0": ((4, 2), (1, 1), (1, 1)),
    "chroma finer across": ((2, 2), (2, 1), (1, 2)),
    "gray": ((1, 1),),
    "gray with factors": ((2, 2),),
}

# Code lengths from 2 to 16 bits, so that short and long codes all occur.
_LENGTHS = {2: 1, 3: 1, 4: 2, 5: 3, 6: 4, 8: 8, 10: 16, 12: 32, 14: 60, 16: 129}


def _segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body


def _table(symbols: list[int]) -> tuple[bytes, dict[int, str]]:
    """A Huffman table as DHT stores it, and each symbol's code."""
    codes: dict[int, str] = {}
    counts, code, rest = [], 0, list(symbols)
    for length in range(1, 17):
        taken, rest = rest[: _LENGTHS.get(length, 0)], rest[_LENGTHS.get(length, 0) :]
        for symbol in taken:
            codes[symbol] = format(code, f"0{length}b")
            code += 1
        code <<= 1
        counts.append(len(taken))
    return bytes(counts) + bytes(symbols), codes


def _value(value: int) -> tuple[int, str]:
    """A coefficient's size and bits."""
    size = abs(value).bit_length()
    return size, format(value if value > 0 else value + (1 << size) - 1, f"0{size}b") if size else ""


def _block(rng: random.Random, dc: dict[int, str], ac: dict[int, str]) -> str:
    size, bits = _value(rng.choice((0, 0, rng.randint(-40, 40), rng.randint(-300, 300))))
    text, run = [dc[size], bits], 0
    density = rng.choice((0.0, 0.1, 0.5, 1.0))
    last = rng.choice((1, 5, 20, 63))
    for k in range(1, 64):
        value = rng.choice((1, -1, 2, -3, 17, -200)) if k <= last and rng.random() < density else 0
        if not value:
            run += 1
            continue
        while run > 15:
            text.append(ac[0xF0])
            run -= 16
        size, bits = _value(value)
        text += [ac[run << 4 | size], bits]
        run = 0
    return "".join([*text, ac[0]] if run else text)


def _up(value: int, by: int) -> int:
    return -(-value // by)


def _packed(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:].replace(b"\xff", b"\xff\x00")


def coefficients(
    width: int, height: int, sampling: Sampling, seed: int, *, restart: int = 0, split: bool = False
) -> bytes:
    """A baseline JPEG of random coefficients; `restart` is an interval in MCUs, `split` gives each component a scan."""
    rng = random.Random(seed)
    dc_table, dc = _table(rng.sample(range(12), 12))
    ac_table, ac = _table(rng.sample(range(256), 256))
    most = (max(h for h, _ in sampling), max(v for _, v in sampling))
    frame = b"".join(bytes((i + 1, h << 4 | v, 0)) for i, (h, v) in enumerate(sampling))
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    parts = [
        b"\xff\xd8",
        _segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
        _segment(0xDB, b"\0" + bytes(rng.randint(1, 6) for _ in range(64))),
        _segment(0xC0, b"\x08" + size + bytes((len(sampling),)) + frame),
        _segment(0xC4, b"\x00" + dc_table),
        _segment(0xC4, b"\x10" + ac_table),
        _segment(0xDD, restart.to_bytes(2, "big")),
    ]
    for scan in [[i] for i in range(len(sampling))] if split else [list(range(len(sampling)))]:
        parts.append(_segment(0xDA, bytes((len(scan),)) + b"".join(bytes((i + 1, 0)) for i in scan) + b"\0\x3f\0"))
        if len(scan) == 1:  # blocks of one component stand in rows, as many as the component needs
            h, v = sampling[scan[0]]
            blocks = 1
            across, down = _up(_up(width * h, most[0]), 8), _up(_up(height * v, most[1]), 8)
        else:
            blocks = sum(h * v for h, v in sampling)
            across, down = _up(width, 8 * most[0]), _up(height, 8 * most[1])
        mcus = ["".join(_block(rng, dc, ac) for _ in range(blocks)) for _ in range(across * down)]
        step = restart or len(mcus)
        for start in range(0, len(mcus), step):
            if start:
                parts.append(bytes((0xFF, 0xD0 + (start // step - 1) % 8)))
            parts.append(_packed("".join(mcus[start : start + step])))
    return b"".join([*parts, b"\xff\xd9"])


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Something smooth with edges and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    channels = [127 + 100 * np.sin(x / (7 + i) + seed) * np.cos(y / (11 - i)) for i in range(3)]
    array = np.stack(channels, axis=2) + rng.normal(0, 12, (height, width, 3)) + 60 * ((x + y) % 40 > 20)[..., None]
    return Image.fromarray(array.clip(0, 255).astype(np.uint8)).convert(mode)


def saved(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    """The image as a file of that format."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def by_pillow(data: bytes, mode: str = "RGB", exif: bool = True) -> NDArray[np.uint8]:
    """HWC, as Pillow decodes the file."""
    with Image.open(io.BytesIO(data)) as image:
        array = np.asarray((ImageOps.exif_transpose(image) if exif else image).convert(mode))
    return array.reshape(*array.shape[:2], -1)


def with_orientation(orientation: int) -> Image.Exif:
    """An Exif block that says so."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif
