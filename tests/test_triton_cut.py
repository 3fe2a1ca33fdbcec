"""The GPU lane's cut gives the CPU's pixels: planes become libjpeg-turbo's RGB, boxes are resized as by resample.c."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from triton_device import DEVICE, MARKS

# isort: split

from triton.runtime import interpreter

import jpegs
from penstock.crop import CenterCrop, Flip, RandomResizedCrop, Resize, View, Viewing
from penstock.decode import Decode, oriented
from penstock.fuse import DecodeCrop
from penstock.kernels import resample
from penstock.kernels.native import lib
from penstock.kernels.resample import FILTERS, resize
from penstock.kernels.table import COLUMNS, Column, Kind, place
from penstock.kernels.triton import cut as cut_module
from penstock.kernels.triton import planes as planes_module
from penstock.kernels.triton.axes import weigh
from penstock.kernels.triton.cut import cut
from penstock.kernels.triton.planes import convert

TALL_FIRST = int(resample.PIL.__version__.split(".")[0]) >= 13
"""The order of passes of the Pillow that is installed."""

pytestmark = MARKS

GUARD, POISON = 0xA5, 0x5A
SUBSAMPLED = ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "4:1:0", "gray")


@pytest.fixture(autouse=True)
def numbers_bound_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 converts arrays of one element to numbers as numpy 2.4 no longer does."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, programs: int) -> None:
    """In the interpreter, which takes as long for a large tile as for a small one, and as for an idle program."""
    if DEVICE == "cpu":
        for module in (planes_module, cut_module):
            monkeypatch.setattr(module, "programs", lambda n: programs)
            monkeypatch.setattr(module, "TILE", (columns, rows))


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 64, 64, 1)


class Stored(NamedTuple):
    """A decoded image."""

    kind: Kind
    planes: tuple[np.ndarray, ...]
    sub: tuple[int, int]
    rgb: np.ndarray
    """what a CPU makes of the planes"""
    orientation: int = 1

    @property
    def upright(self) -> np.ndarray:
        return oriented(self.rgb, self.orientation)


class Sample(NamedTuple):
    image: Stored
    view: View

    @property
    def expected(self) -> np.ndarray:
        left, top, right, bottom = self.view.box
        box = self.image.upright[top:bottom, left:right]
        v = self.view
        return resize(box, v.height, v.width, v.filter, window=v.window, flip=v.flip)


# ---- a tiny-batch in memory


class Area:
    """Memory given away piece by piece, with gaps that must not be written to."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.gaps: list[int] = []

    def gap(self, after: int) -> None:
        self.bytes += bytes((GUARD,)) * (-(-after // 128) * 128 - len(self.bytes))
        self.gaps.append(len(self.bytes))
        self.bytes += bytes((GUARD,)) * 128

    def plane(self, pixels: np.ndarray, pitch: int) -> int:
        """Rows of at least the plane's width, with other bytes between them."""
        start = len(self.bytes)
        rows = np.full((pixels.shape[0], pitch), GUARD, np.uint8)
        rows[:, : pixels.shape[1]] = pixels
        self.bytes += rows.tobytes()
        self.gap(len(self.bytes))
        return start


def row_of(sample: Sample, area: Area, index: int, tall_first: bool) -> list[int]:
    image, view, row = sample.image, sample.view, [-1] * COLUMNS
    row[Column.KIND], row[Column.ORIENTATION] = image.kind, image.orientation
    row[Column.HEIGHT], row[Column.WIDTH] = image.rgb.shape[:2]
    row[Column.SUB_X], row[Column.SUB_Y] = image.sub
    for i, plane in enumerate(image.planes):
        pitch = Column.PITCH1 if i else Column.PITCH0
        row[pitch] = image.planes[min(i, 1)].shape[1] + 3 * index
        row[Column.PLANE0 + i] = area.plane(plane, row[pitch])
    row[Column.LEFT], row[Column.TOP], row[Column.RIGHT], row[Column.BOTTOM] = view.box
    row[Column.RESIZED_HEIGHT], row[Column.RESIZED_WIDTH] = view.height, view.width
    row[Column.WINDOW_LEFT], row[Column.WINDOW_TOP] = view.window[:2]
    row[Column.FLIP], row[Column.FILTER] = int(view.flip), FILTERS.index(view.filter)
    area.gap(place(row, len(area.bytes), *view.size, tall_first))
    return row


def gpu(samples: list[Sample], tall_first: bool = TALL_FIRST) -> np.ndarray:
    """The results of the kernels; asserts that they write nowhere else."""
    area = Area()
    table = [row_of(sample, area, i, tall_first) for i, sample in enumerate(samples)]
    height, width = samples[0].view.size
    n = len(samples)
    memory = torch.tensor(area.bytes, dtype=torch.uint8, device=DEVICE)
    rows = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    out = torch.full((n + 1, height, width, 3), POISON, dtype=torch.uint8, device=DEVICE)
    weigh(memory, rows, n, height, width)
    convert(memory, rows, n, height, width)
    cut(memory, rows, n, out)
    after = memory.cpu().numpy()
    assert all((after[gap : gap + 128] == GUARD).all() for gap in area.gaps)
    assert rows.tolist() == table
    result = out.cpu().numpy()
    assert (result[n] == POISON).all()
    return result[:n]


def check(samples: list[Sample], tall_first: bool = TALL_FIRST) -> None:
    """Equal to the CPU's, but that a GPU's sin and cos may differ in the last place."""
    for sample, found in zip(samples, gpu(samples, tall_first), strict=True):
        difference = np.abs(found.astype(int) - sample.expected).max()
        near = DEVICE != "cpu" and sample.view.filter in ("hamming", "lanczos")
        assert difference <= near, sample.view


# ---- images


def noise(height: int, width: int, orientation: int = 1) -> Stored:
    pixels = np.random.default_rng((height, width)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Stored(Kind.RGB, (pixels.reshape(height, -1),), (1, 1), pixels, orientation)


def planes_of(data: bytes) -> tuple[np.ndarray, ...]:
    """The planes of a file with a scan for each component: each scan, as a gray file, decoded by Pillow."""
    shared, scans, frame, at = b"", [], b"", 2
    while data[at + 1] != 0xD9:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xDA:
            scan = at = end
            while data[at] != 0xFF or data[at + 1] == 0 or 0xD0 <= data[at + 1] <= 0xD7:
                at += 1
            scans.append(data[scan:at])
            continue
        if marker == 0xC0:
            frame = data[at + 4 : end]
        else:
            shared += data[at:end]
        at = end
    factors = [divmod(f, 16) for f in frame[7::3]]
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    most_x, most_y = (max(f) for f in zip(*factors, strict=True))
    planes = []
    for (h, v), scan in zip(factors, scans, strict=True):
        size = (-(-height * v // most_y)).to_bytes(2, "big") + (-(-width * h // most_x)).to_bytes(2, "big")
        head = b"\xff\xd8" + shared + b"\xff\xc0\0\x0b\x08" + size + b"\x01\x01\x11\0"
        gray = head + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + scan + b"\xff\xd9"
        planes.append(jpegs.by_pillow(gray, "L", exif=False)[:, :, 0])
    return tuple(planes)


def of_jpeg(data: bytes, sampling: str, orientation: int = 1) -> Stored:
    factors = jpegs.SAMPLINGS[sampling]
    kind = Kind.YCC if len(factors) == 3 else Kind.GRAY
    return Stored(kind, planes_of(data), factors[0], jpegs.by_pillow(data, exif=False), orientation)


def coefficients(height: int, width: int, sampling: str, orientation: int = 1) -> Stored:
    data = jpegs.coefficients(width, height, jpegs.SAMPLINGS[sampling], height * 100 + width, split=True)
    return of_jpeg(data, sampling, orientation)


def random_box(rng: random.Random, height: int, width: int) -> tuple[int, int, int, int]:
    left, top = rng.randrange(width), rng.randrange(height)
    return left, top, rng.randint(left + 1, width), rng.randint(top + 1, height)


def random_view(rng: random.Random, image: Stored, height: int, width: int, spare: int = 20) -> View:
    box = random_box(rng, *image.upright.shape[:2])
    resized = height + rng.choice((0, rng.randrange(spare))), width + rng.choice((0, rng.randrange(spare)))
    left, top = rng.randint(0, resized[1] - width), rng.randint(0, resized[0] - height)
    window = (left, top, left + width, top + height)
    return View(box, *resized, rng.choice(FILTERS), window, rng.random() < 0.5)


# ---- planes to RGB


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 2), (2, 1), (2, 4), (3, 5), (4, 6), (8, 3), (17, 33), (34, 50), (5, 71)]
)
def test_planes_become_the_pixels_of_libjpeg_turbo(height: int, width: int) -> None:
    images = [coefficients(height, width, sampling) for sampling in SUBSAMPLED]
    check([Sample(image, View.whole(height, width)) for image in [*images, noise(height, width)]])


def test_a_box_has_the_chroma_of_the_whole_image() -> None:
    rng = random.Random(1)
    samples = []
    for sampling in SUBSAMPLED:
        image = coefficients(37, 45, sampling)
        left, top = rng.randint(0, 45 - 20), rng.randint(0, 37 - 13)
        samples.append(Sample(image, View.whole(37, 45).crop(top, left, 13, 20)))
    check(samples)


@pytest.mark.parametrize("sampling", ["4:2:0", "4:4:0", "4:2:2"])
def test_images_are_turned_as_exif_says(sampling: str) -> None:
    rng = random.Random(2)
    images = [coefficients(22, 35, sampling, orientation) for orientation in range(1, 9)]
    check([Sample(image, random_view(rng, image, 9, 11)) for image in images])


# ---- the cut


@pytest.mark.parametrize("seed", range(6))
def test_cuts_are_the_cpus(seed: int) -> None:
    rng = random.Random(seed)
    height, width = rng.choice(((1, 1), (7, 9), (16, 32), (33, 40), (40, 3)))
    samples = []
    for i in range(8):
        size, orientation = (rng.randint(1, 90), rng.randint(1, 90)), rng.randint(1, 8)
        image = noise(*size, orientation) if i else coefficients(*size, rng.choice(SUBSAMPLED), orientation)
        samples.append(Sample(image, random_view(rng, image, height, width)))
    check(samples)


def test_samples_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 16, 32, 3)
    rng = random.Random(9)
    images = [noise(70, 90), coefficients(40, 70, "4:2:0", 7)]
    check([Sample(image, random_view(rng, image, 20, 40)) for image in images])


@pytest.mark.parametrize("filter", FILTERS)
def test_every_filter_up_and_down(filter: str) -> None:
    samples = []
    for size in ((1, 1), (3, 70), (70, 3), (31, 37), (90, 90), (20, 20)):
        image = noise(*size)
        samples.append(Sample(image, View((0, 0, size[1], size[0]), 20, 23, filter, (0, 0, 23, 20), False)))
    check(samples)


def test_large_reductions() -> None:
    image = noise(400, 5)
    views = [View((0, 0, 5, 400), 3, 4, filter, (0, 0, 4, 3), False) for filter in ("box", "bilinear", "nearest")]
    check([Sample(image, view) for view in views])


@pytest.mark.parametrize("flip", [False, True])
def test_the_smallest_batch(flip: bool) -> None:
    check([Sample(noise(1, 1), View.whole(1, 1)._replace(flip=flip))])
    check([Sample(noise(5, 7), View.whole(5, 7)._replace(flip=flip))])


def test_extreme_pixels_are_clipped() -> None:
    image = noise(40, 40)
    image.rgb[:] = 0
    image.rgb[::2, 10:30] = 255
    views = [View((0, 0, 40, 40), 57, 61, filter, (0, 0, 61, 57), False) for filter in ("bicubic", "lanczos")]
    check([Sample(image, view) for view in views])


@pytest.fixture
def any_pillow() -> Iterator[None]:
    yield
    lib.ps_resize_tall_first(TALL_FIRST)


def tall() -> list[Sample]:
    """Noise in which the order of the passes can be seen."""
    image = noise(90, 60)
    views = [View((0, 0, 60, 90), 12, 50, filter, (3, 1, 43, 12), True) for filter in ("bicubic", "lanczos")]
    return [Sample(image, view) for view in views]


@pytest.mark.parametrize("tall_first", [True, False])
def test_the_order_of_passes_is_that_of_pillow_13_or_of_older_ones(tall_first: bool, any_pillow: None) -> None:
    lib.ps_resize_tall_first(not tall_first)
    other = [sample.expected for sample in tall()]
    lib.ps_resize_tall_first(tall_first)
    assert not np.array_equal([sample.expected for sample in tall()], other)
    check(tall(), tall_first)


# ---- the operators


@pytest.mark.parametrize(
    "crops",
    [
        (RandomResizedCrop(24), Flip()),
        (RandomResizedCrop((20, 28), interpolation="bicubic"), Flip()),
        (Resize(30), CenterCrop(24)),
        (CenterCrop(16), Flip(1)),
    ],
)
def test_operators_give_the_same_on_both_lanes(crops: tuple[Viewing, ...]) -> None:
    rng = random.Random(3)
    samples, expected = [], []
    for i, sampling in enumerate(SUBSAMPLED):
        height, width = rng.randint(17, 80), rng.randint(17, 80)
        plain = jpegs.coefficients(width, height, jpegs.SAMPLINGS[sampling], i, split=True)
        orientation = i % 8 + 1
        exif = jpegs.with_orientation(orientation).tobytes()
        data = plain[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + plain[2:]
        units = [rng.random() for crop in crops for _ in range(crop.units)]
        expected.append(DecodeCrop(Decode(), crops).apply({"image": data}, units)["image"])
        image = of_jpeg(data, sampling, orientation)
        samples.append(Sample(image, view_of(crops, units, *image.upright.shape[:2])))
    assert np.array_equal(gpu(samples), expected)


def view_of(crops: tuple[Viewing, ...], units: list[float], height: int, width: int) -> View:
    view: View | None = View.whole(height, width)
    for crop in crops:
        assert view is not None
        height, width = view.size
        view = crop.view(view, crop.decide(units[: crop.units], height, width))
        units = units[crop.units :]
    assert view is not None
    return view


# ---- the real compiler

_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.kernels.triton import axes, cut, planes

TYPES = {"area": "*u8", "table": "*i32", "out": "*u8", "height": "i32", "width": "i32"}
TILE = dict(zip(("tile_columns", "tile_rows"), planes.TILE))
for kernel, constants, options in (
    (axes._weigh, {"block": 32}, {"num_warps": 1, "enable_fp_fusion": False}),
    (planes._convert, TILE, {"num_warps": 4}),
    (cut._pass, {"is_last": False, **TILE}, {"num_warps": 4}),
    (cut._pass, {"is_last": True, **TILE}, {"num_warps": 4}),
):
    names = kernel.arg_names
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: TYPES.get(name, "constexpr") for name in names}, places)
    print(kernel.__name__, compile(source, GPUTarget("cuda", 90, 32), options).metadata.shared)
"""


def test_the_compiler_takes_the_kernels_and_leaves_each_pixel_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would move pixels through shared memory if it read along rows and wrote along columns, or the like."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_weigh", "0", "_convert", "0", "_pass", "0", "_pass", "0"]
