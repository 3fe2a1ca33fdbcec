"""Triton's steps give the bytes that the native kernels give, which are Pillow's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from triton_device import DEVICE, MARKS

# isort: split

from triton.runtime import interpreter

from penstock.augment import (
    AutoAugment,
    ColorJitter,
    Cutout,
    DeepAutoAugment,
    RandAugment,
    TrivialAugment,
    uniform_policy,
)
from penstock.augment.base import StepOperator
from penstock.kernels.pixels import FLAT, Op, Step, apply
from penstock.kernels.triton.steps import apply_steps, scratch_bytes

pytestmark = MARKS


@pytest.fixture(autouse=True, scope="module")
def _numbers_bound_loops() -> Iterator[None]:
    """The interpreter of Triton 3.6 converts arrays of one element to numbers as numpy 2.4 no longer does."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


Array = NDArray[np.uint8]
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (3, 3), (17, 31)]
"""None a multiple of anything. The last has more pixels than a block of the steps that go by pixels."""
FILL = (10.0, 200.0, 30.0)
POISON, GUARD = 0xA5, 64


def noise(height: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int, seed: int = 0) -> Array:
    """Few levels and flat parts, as photographs have and noise has not."""
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.linspace(40, 190, height), np.linspace(0, 30, width))[..., None]
    return (ramp + rng.normal(0, 3, (height, width, 3))).clip(0, 255).astype(np.uint8)


def flat(height: int, width: int, seed: int = 0) -> Array:
    return np.full((height, width, 3), (seed % 256, 255 - seed % 256, 77), np.uint8)


def guarded(size: int) -> torch.Tensor:
    return torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=DEVICE)


def flattened(chains: Sequence[Sequence[Step]]) -> torch.Tensor:
    numbers = np.zeros((len(chains), max(map(len, chains)), FLAT))
    numbers[..., 0] = -1
    for row, chain in zip(numbers, chains, strict=True):
        for flat, (op, parameters) in zip(row, chain, strict=False):
            flat[: 1 + len(parameters)] = (op, *parameters)
    return torch.from_numpy(numbers).to(DEVICE)


def applied(images: Array, chains: Sequence[Sequence[Step]]) -> Array:
    """Through buffers full of poison; nothing may be written beside them."""
    memory = [guarded(images.size), guarded(images.size), guarded(scratch_bytes(len(images)))]
    ours, spare, scratch = (one[GUARD:-GUARD] for one in memory)
    ours, spare = ours.view(images.shape), spare.view(images.shape)
    ours.copy_(torch.from_numpy(images))
    steps = flattened(chains)
    result = apply_steps(ours, spare, steps, scratch)
    assert result is (spare if steps.shape[1] % 2 else ours)
    for one in memory:
        assert (one[:GUARD] == POISON).all()
        assert (one[-GUARD:] == POISON).all()
    return result.cpu().numpy()


def check(images: Array, chains: Sequence[Sequence[Step]]) -> None:
    for index, (ours, image, chain) in enumerate(zip(applied(images, chains), images, chains, strict=True)):
        np.testing.assert_array_equal(ours, apply(image, chain), err_msg=f"sample {index}: {chain} on {image.shape}")


FACTORS = [(0.0,), (0.1,), (0.73,), (1.0,), (1.27,), (1.9,), (6.0,), (-0.5,), (-7.9e6,), (7.9e6,)]
MATRICES = {
    "still": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    "sheared": (1.0, 0.3, 0.0, 0.0, 1.0, 0.0),
    "sheared down": (1.0, 0.0, 0.0, -0.3, 1.0, 0.0),
    "moved": (1.0, 0.0, 3.0, 0.0, 1.0, -2.0),
    "moved by parts": (1.0, 0.0, 2.3, 0.0, 1.0, 0.49),
    "mirrored": (-1.0, 0.0, 7.0, 0.0, 1.0, 0.0),
    "scaled": (0.5, 0.0, 1.0, 0.0, 2.0, -1.0),
    "scaled by thirds": (2 / 3, 0.0, 0.0, 0.0, 1 / 3, 0.0),
    "scaled by tenths": (-0.1, 0.0, 4.9, 0.0, 0.7, 0.05),
    "turned": (0.866, -0.5, 2.0, 0.5, 0.866, -1.0),
    "turned a quarter": (0.0, 1.0, 0.0, -1.0, 0.0, 7.0),
    "turned by half": (-1.0, 0.0, 9.0, 0.0, -1.0, 33.0),
    "one pixel": (0.0, 0.0, 1.0, 0.0, 0.0, 1.0),
    "turned about the middle": (0.1, 1.9, -3.3, -1.7, 0.3, 41.0),
    "turned to borders of pixels": (1.0, 1 / 3, 0.0, -1 / 3, 1.0, 0.0),
}
BEYOND = {
    "left": (1.0, 0.0, -60.0, 0.0, 1.0, 0.0),
    "wholly": (1.0, 0.2, 40000.0, 0.0, 1.0, 0.0),
    "as far as 16.16 goes": (1.0, 0.5, 32700.0, 0.5, 1.0, -32700.0),
    "but for one corner": (5000.5, 1.0, -2500.0, 1.0, 4000.3, -2000.0),
    "at the last corner": (734.0, 925.4, -819.7, 0.0, 0.0, 3.0),
    "both ways": (7.9e6, -7.9e6, 2.0, -7.9e6, 7.9e6, 2.0),
}
AFFINE = [(*matrix, *FILL) for matrix in (*MATRICES.values(), *BEYOND.values())]
PARAMETERS: dict[Op, list[tuple[float, ...]]] = {
    Op.BRIGHTNESS: FACTORS,
    Op.CONTRAST: FACTORS,
    Op.SATURATION: FACTORS,
    Op.SHARPNESS: FACTORS,
    Op.HUE: [(0.0,), (1.0,), (100.0,), (128.0,), (255.0,), (-3.0,), (1000.0,)],
    Op.POSTERIZE: [(float(bits),) for bits in range(9)] + [(-1.0,), (9.0,), (4.9,)],
    Op.SOLARIZE: [(0.0,), (-1.0,), (100.5,), (128.0,), (255.0,), (256.0,)],
    Op.AUTOCONTRAST: [()],
    Op.EQUALIZE: [()],
    Op.INVERT: [()],
    Op.AFFINE: AFFINE,
    Op.AFFINE_BILINEAR: AFFINE,
    Op.AFFINE_BICUBIC: AFFINE,
    Op.ERASE: [
        (0.0, 0.0, 2.0, 1.0, *FILL),
        (1.0, 2.0, 1.0, 3.0, *FILL),
        (-4.0, -4.0, 99.0, 99.0, *FILL),
        (3.0, 3.0, 1.0, 1.0, *FILL),
        (9.0, 9.0, 99.0, 99.0, *FILL),
        (0.9, 1.9, 3.2, 4.8, -5.0, 255.9, 300.0),
    ],
}


def test_every_op_has_parameters() -> None:
    assert set(PARAMETERS) == set(Op)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.name)
def test_every_op_on_every_size(op: Op) -> None:
    for height, width in SIZES:
        images = [noise(height, width, seed) for seed in range(len(PARAMETERS[op]))]
        check(np.stack(images), [[(op, parameters)] for parameters in PARAMETERS[op]])


@pytest.mark.parametrize("op", [Op.AUTOCONTRAST, Op.EQUALIZE, Op.CONTRAST], ids=lambda op: op.name)
def test_what_looks_at_the_whole_image(op: Op) -> None:
    """One level, two, all; more pixels than are looked at together; a mean half-way between two levels."""
    height, width = 64, 75
    few = noise(height, width) // 129 * 200 + 7
    halves = np.zeros((height, width, 3), np.uint8)
    halves[: height // 2] = 1
    last = flat(height, width, 9)
    last[-1, -1] = (0, 255, 76)
    images = np.stack([few, halves, last, flat(height, width), flat(height, width, 255), smooth(height, width)])
    check(images, [[(op, (0.4,) if op is Op.CONTRAST else ())]] * len(images))


def test_hue_on_colours_from_all_over() -> None:
    """On a GPU on all of every fifth red; the interpreter takes a minute for a million."""
    levels = np.arange(0, 256, 1 if DEVICE == "cuda" else 15, np.uint8)
    green, blue = np.meshgrid(levels, levels, indexing="ij")
    reds = range(0, 256, 5 if DEVICE == "cuda" else 17)
    images = [np.stack([np.full_like(green, red), green, blue], axis=-1) for red in reds]
    check(np.stack(images), [[(Op.HUE, (red * 7.0 % 256,))] for red in reds])


@pytest.mark.parametrize("op", Op, ids=lambda op: op.name)
def test_images_of_several_tiles(op: Op) -> None:
    check(np.stack([smooth(41, 53), noise(41, 53)]), [[(op, PARAMETERS[op][1 % len(PARAMETERS[op])])]] * 2)


def test_neighbours_in_a_tiny_batch_have_steps_of_their_own() -> None:
    """Every op once, the sample without steps between them, and a second layer that reverses their order."""
    first: list[Step] = [(op, PARAMETERS[op][-1]) for op in Op]
    chains: list[list[Step]] = [[one, other] for one, other in zip(first, reversed(first), strict=True)]
    chains[5:5] = [[]]
    check(np.stack([smooth(19, 23, seed) for seed in range(len(chains))]), chains)


def test_one_sample_and_many_layers() -> None:
    chain: list[Step] = [(op, PARAMETERS[op][1 % len(PARAMETERS[op])]) for op in Op]
    for layers in (1, 2, 5, len(chain)):
        check(noise(11, 13)[None], [chain[:layers]])


def test_no_layers_leave_the_images() -> None:
    check(noise(4, 5)[None], [[]])


POLICIES: dict[str, StepOperator] = {
    "rand": RandAugment(3),
    "rand bilinear": RandAugment(2, 20, interpolation="bilinear", fill=(1, 2, 3)),
    "auto": AutoAugment(fill=128),
    "auto svhn": AutoAugment("svhn"),
    "auto cifar10": AutoAugment("cifar10", interpolation="bicubic"),
    "trivial": TrivialAugment(),
    "trivial bicubic": TrivialAugment(interpolation="bicubic", fill=(250, 0, 9)),
    "deep": DeepAutoAugment(uniform_policy(3)),
    "deep crops": DeepAutoAugment(((("RandResizeCrop_imagenet", 0.5, 1.0),), (("RandCutout60", 0.5, 1.0),))),
    "jitter": ColorJitter(0.4, 0.4, 0.4, 0.1),
    "cutout": Cutout(16, n=2, fill=(1, 2, 3)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_the_augmentations_decide(name: str) -> None:
    operator, count = POLICIES[name], 10
    for height, width in ((23, 29), (8, 31)):
        draws = np.random.default_rng(len(name)).random((count, operator.units)).tolist()
        chains = [operator.decide(units, height, width) for units in draws]
        images = [(noise, smooth)[seed % 2](height, width, seed) for seed in range(count)]
        check(np.stack(images), chains)


factor = st.floats(-1.0, 4.0, width=32)
near_one = st.one_of(st.floats(-1.5, 1.5), st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.2, 1 / 3]))
offset = st.one_of(st.floats(-30.0, 30.0), st.integers(-9, 9).map(float))
affine = st.tuples(near_one, near_one, offset, near_one, near_one, offset).map(lambda matrix: (*matrix, *FILL))
scaled = affine.map(lambda numbers: (numbers[0], 0.0, numbers[2], 0.0, *numbers[4:]))
edge = st.floats(-3.0, 25.0)
steps = st.one_of(
    st.tuples(st.sampled_from([Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.SHARPNESS]), st.tuples(factor)),
    st.tuples(st.just(Op.HUE), st.tuples(st.integers(0, 255).map(float))),
    st.tuples(st.just(Op.POSTERIZE), st.tuples(st.integers(0, 8).map(float))),
    st.tuples(st.just(Op.SOLARIZE), st.tuples(st.floats(0.0, 256.0))),
    st.tuples(st.sampled_from([Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT]), st.just(())),
    st.tuples(st.sampled_from([Op.AFFINE, Op.AFFINE_BILINEAR, Op.AFFINE_BICUBIC]), st.one_of(affine, scaled)),
    st.tuples(st.just(Op.ERASE), st.tuples(edge, edge, edge, edge, *(st.floats(0.0, 255.0),) * 3)),
)


@settings(max_examples=30, deadline=None)
@given(
    chains=st.lists(st.lists(steps, max_size=3), min_size=1, max_size=4),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    make=st.sampled_from([noise, smooth, flat]),
    seed=st.integers(0, 1000),
)
def test_any_chains(chains: list[list[Step]], size: tuple[int, int], make: Callable[..., Array], seed: int) -> None:
    check(np.stack([make(*size, seed + k) for k in range(len(chains))]), chains)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30, 1e300])
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_senseless_numbers_harm_no_neighbour(bad: float) -> None:
    images = np.stack([noise(9, 10, seed) for seed in range(2 * len(Op))])
    wrong: Step
    chains: list[list[Step]] = []
    for op in Op:
        wrong = (op, (bad, bad, -bad, bad, -bad, bad, bad, -bad, bad))
        chains += [[wrong], [(Op.INVERT, ())]]
    np.testing.assert_array_equal(applied(images, chains)[1::2], 255 - images[1::2])


def test_what_does_not_fit_is_refused() -> None:
    images, spare = torch.zeros((2, 2, 5, 6, 3), dtype=torch.uint8, device=DEVICE)
    steps = torch.zeros((2, 1, FLAT), dtype=torch.float64, device=DEVICE)
    scratch = torch.zeros(scratch_bytes(2), dtype=torch.uint8, device=DEVICE)
    wrong = [
        (images[..., :1], images[..., :1], steps, scratch),
        (images, images[:1], steps, scratch),
        (images, images.transpose(1, 2).contiguous().transpose(1, 2), steps, scratch),
        (images, images, steps, scratch),
        (images, spare, steps[:1], scratch),
        (images, spare, steps[..., :9], scratch),
        (images, spare, steps.float(), scratch),
        (images, spare, steps, scratch[:-1]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="expected two dense uint8 batches"):
            apply_steps(*arguments)


# ---- the real compiler ----

_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.kernels.triton import steps

TYPES = {"images": "*u8", "out": "*u8", "tables": "*u8", "steps": "*fp64", "tile": "constexpr", "block": "constexpr"}
for kernel, options in ((steps.fill_tables, steps._TABLES), (steps._apply, steps._STEPS)):
    names = kernel.arg_names
    places = {(names.index(name),): options[name] for name in options if name in names}
    pointers = {name for name, kind in TYPES.items() if kind.startswith("*")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in {*pointers, "size"}}
    source = ASTSource(kernel, {name: TYPES.get(name, "i32") for name in names}, places, aligned)
    options = {name: options[name] for name in options if name not in names}
    built = compile(source, GPUTarget("cuda", 90, 32), options)
    print(kernel.__name__, built.asm["ptx"].count("fma."), built.metadata.shared)
"""


def test_the_compiler_keeps_products_and_sums_apart_and_pixels_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables need shared memory for their histograms and sums."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["fill_tables 0 1024", "_apply 0 0"]
