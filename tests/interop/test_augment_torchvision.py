"""The augmentation operators against torchvision's own, on Pillow images."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from penstock.augment import AutoAugment, ColorJitter, Normalize, RandAugment, TrivialAugment
from penstock.augment.policies import POLICIES
from penstock.augment.steps import AUTO, RAND, TRIVIAL, Frame, Space, magnitude, step
from penstock.kernels.pixels import Op, apply

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
transforms = pytest.importorskip("torchvision.transforms")

SIZES = [(1, 1), (1, 9), (7, 5), (64, 48), (224, 224)]
FILL = (10, 200, 30)
SAMPLERS = {"nearest": Op.AFFINE, "bilinear": Op.AFFINE_BILINEAR, "bicubic": Op.AFFINE_BICUBIC}


def image_of(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.linspace(20, 200, height), np.linspace(0, 40, width))[..., None]
    return (ramp + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)


def spaces(height: int, width: int) -> list[tuple[Space, dict[str, Any], int]]:
    rand, auto, wide = transforms.RandAugment(), transforms.AutoAugment(), transforms.TrivialAugmentWide()
    return [
        (RAND, rand._augmentation_space(31, (height, width)), 31),
        (AUTO, auto._augmentation_space(10, (height, width)), 10),
        (TRIVIAL, wide._augmentation_space(31), 31),
    ]


def test_operators_signs_and_magnitudes_are_torchvisions() -> None:
    for ours, theirs, bins in spaces(224, 375):
        assert list(ours) == list(theirs)
        for name, (magnitudes, signed) in theirs.items():
            span = ours[name]
            assert signed == (span is not None and span.signed), name
            values = magnitudes.tolist() if magnitudes.ndim else [magnitudes.item()] * bins
            assert [magnitude(span, b, bins, 224, 375) for b in range(bins)] == values, name


@pytest.mark.parametrize("policy", list(transforms.AutoAugmentPolicy), ids=lambda policy: policy.value)
def test_the_learned_policies_are_torchvisions(policy: Any) -> None:
    theirs = transforms.AutoAugment(policy).policies
    assert POLICIES[policy.value] == tuple(
        tuple((name, chance, bin or 0) for name, chance, bin in pair) for pair in theirs
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("interpolation", SAMPLERS)
def test_every_operator_at_every_magnitude_gives_torchvisions_pixels(size: tuple[int, int], interpolation: str) -> None:
    from torchvision.transforms.autoaugment import _apply_op

    mode = transforms.InterpolationMode(interpolation)
    image = image_of(*size)
    frame = Frame(*size, SAMPLERS[interpolation], tuple(map(float, FILL)))
    for ours, _, bins in spaces(*size):
        for name, span in ours.items():
            if interpolation != "nearest" and not name.startswith(("Shear", "Translate", "Rotate")):
                continue
            for b in range(0, bins, 3):
                for sign in (1.0, -1.0) if span is not None and span.signed else (1.0,):
                    value = sign * magnitude(span, b, bins, *size)
                    expected = np.asarray(_apply_op(Image.fromarray(image), name, value, mode, list(FILL)))
                    one = step(name, value, frame)
                    found = apply(image, [one] if one else [])
                    np.testing.assert_array_equal(found, expected, err_msg=f"{name} {value}")


@pytest.mark.parametrize("turn", [-0.5, -0.37, -0.001, 0.0, 0.1, 0.4999, 0.5])
def test_color_jitter_gives_torchvisions_pixels(turn: float) -> None:
    functional = transforms.functional
    image = image_of(33, 29)
    for factor in (0.0, 0.6, 1.0, 1.7):
        expected = functional.adjust_brightness(Image.fromarray(image), factor)
        expected = functional.adjust_contrast(expected, factor)
        expected = functional.adjust_saturation(expected, factor)
        expected = functional.adjust_hue(expected, turn) if turn else expected
        pair = (factor, factor)
        jitter = ColorJitter(pair, pair, pair, (turn, turn))
        found = jitter.apply({"image": image}, [0.0, 0.3, 0.5, 0.7, 0.9])["image"]
        np.testing.assert_array_equal(found, np.asarray(expected))


def test_color_jitter_reads_its_arguments_as_torchvision() -> None:
    for arguments in ((0.4, 0.4, 0.4, 0.1), (2, 0, 0, 0.5), ((0.5, 0.9), 0.2, (1, 1), (-0.1, 0.3))):
        theirs = transforms.ColorJitter(*arguments)
        ours = ColorJitter(*arguments)
        for argument in ("brightness", "contrast", "saturation", "hue"):
            expected = getattr(theirs, argument)
            low, high = ours._range(argument)
            if expected is None:
                assert low == high == (0 if argument == "hue" else 1)
            else:
                assert (low, high) == tuple(expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RandAugment(1), transforms.RandAugment(1)),
        (TrivialAugment(4), transforms.TrivialAugmentWide(4)),
        (AutoAugment(), transforms.AutoAugment()),
        (AutoAugment("svhn"), transforms.AutoAugment(transforms.AutoAugmentPolicy.SVHN)),
    ],
    ids=["rand", "trivial", "imagenet", "svhn"],
)
def test_outcomes_are_distributed_as_torchvisions(ours: Any, theirs: Any) -> None:
    """Every image that comes out comes from both, and as often."""
    image = image_of(24, 24)
    whole = Image.fromarray(image)
    torch.manual_seed(0)
    units = np.random.default_rng(0).random((6000, ours.units)).tolist()
    mine = Counter(ours.apply({"image": image}, row)["image"].tobytes() for row in units)
    other = Counter(np.asarray(theirs(whole)).tobytes() for _ in range(6000))
    common = [key for key in mine | other if mine[key] + other[key] >= 20]
    assert len(common) > 20
    chi = sum((mine[key] - other[key]) ** 2 / (mine[key] + other[key]) for key in common)
    assert abs(chi - len(common)) < 5 * (2 * len(common)) ** 0.5


def test_normalize_gives_torchvisions_values() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = image_of(64, 48)
    expected = transforms.Normalize(mean, std)(transforms.functional.to_tensor(Image.fromarray(image)))
    found = Normalize(mean, std).apply({"image": image}, [])["image"]
    np.testing.assert_allclose(found, expected.permute(1, 2, 0).numpy(), rtol=0, atol=1e-6)
