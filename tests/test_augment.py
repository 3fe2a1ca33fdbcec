"""What the augmentation operators decide: torchvision's ranges and frequencies, from unit draws alone."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.augment import (
    AutoAugment,
    ColorJitter,
    Cutout,
    DeepAutoAugment,
    Normalize,
    RandAugment,
    TrivialAugment,
    load_deep_policy,
    uniform_policy,
)
from penstock.augment.policies import POLICIES
from penstock.augment.steps import RAND, TRIVIAL, magnitude
from penstock.errors import GraphError
from penstock.graph import Field
from penstock.image import ImageOperator
from penstock.kernels.pixels import Op, Step

IMAGE = {"image": Field("image", (32, 48, 3), "uint8")}
EVERY: list[ImageOperator] = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandAugment(),
    AutoAugment(),
    AutoAugment("svhn", interpolation="bilinear", fill=(1, 2, 3)),
    TrivialAugment(interpolation="bicubic", fill=128),
    DeepAutoAugment(uniform_policy()),
    Cutout(16),
    Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
MOVING = [RandAugment(), AutoAugment(), TrivialAugment(), DeepAutoAugment(uniform_policy())]


def draws(operator: ImageOperator, count: int, seed: int = 0) -> list[list[float]]:
    rows: list[list[float]] = np.random.default_rng(seed).random((count, operator.units)).tolist()
    return rows


def decided(operator: ImageOperator, count: int, height: int = 224, width: int = 200) -> list[tuple[Step, ...]]:
    return [operator.decide(units, height, width) for units in draws(operator, count)]


def near(counted: int, expected: float) -> bool:
    """Within five standard deviations of a Poisson count."""
    return abs(counted - expected) <= 5 * expected**0.5


@pytest.mark.parametrize("operator", EVERY, ids=lambda operator: operator.name)
@pytest.mark.parametrize("shape", [(1, 1, 3), (31, 17, 3), (64, 64, 3)])
def test_same_units_same_pixels_and_the_input_stays(operator: ImageOperator, shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    kept = image.copy()
    for units in [*draws(operator, 20), [0.0] * operator.units, [1 - 2**-53] * operator.units]:
        first = operator.apply({"image": image}, units)["image"]
        again = pickle.loads(pickle.dumps(operator)).apply({"image": image}, units)["image"]
        assert first.shape == shape
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(image, kept)


@pytest.mark.parametrize("operator", EVERY, ids=lambda operator: operator.name)
def test_a_decision_is_plain_numbers(operator: ImageOperator) -> None:
    for units in draws(operator, 50):
        decision = operator.decide(units, 20, 30)
        for op, parameters in decision or ():
            assert isinstance(op, Op)
            assert all(type(number) is float for number in parameters)


@pytest.mark.parametrize("bins", [2, 3, 9, 10, 30, 31, 64])
@pytest.mark.parametrize("side", [1, 7, 224, 375])
def test_magnitudes_are_those_of_linspace_but_for_its_last_bit(bins: int, side: int) -> None:
    for space, bits, shift in ((RAND, 4, 150.0 / 331.0 * side), (TRIVIAL, 6, 32.0)):
        ours = {name: [magnitude(span, b, bins, side, side) for b in range(bins)] for name, span in space.items()}
        for name, span in space.items():
            if span is None or span.bits:
                continue
            last = shift if name.startswith("Translate") else span.last
            theirs = torch.linspace(span.first, last, bins).tolist()
            assert ours[name] == pytest.approx(theirs, rel=0, abs=3e-7 * max(span.first, last)), name
        assert ours["Posterize"] == (8 - (torch.arange(bins) / ((bins - 1) / bits)).round().int()).tolist()


def test_rand_augment_draws_every_operator_and_sign_alike() -> None:
    steps = Counter(step for chain in decided(RandAugment(1, 9), 28_000) for step in chain)
    by_op = Counter[Op]()
    for (op, _), count in steps.items():
        by_op[op] += count
    plain = {Op.POSTERIZE, Op.SOLARIZE, Op.AUTOCONTRAST, Op.EQUALIZE}
    for op in plain:
        assert near(by_op[op], 2_000), op
    for op in (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.SHARPNESS):
        factors = sorted(parameters[0] for (found, parameters) in steps if found is op)
        assert factors == pytest.approx([0.73, 1.27])
        assert all(near(steps[op, (factor,)], 1_000) for factor in factors)
    moves = {parameters: count for (op, parameters), count in steps.items() if op is Op.AFFINE}
    assert len(moves) == 10, "five geometric operators, two signs"
    assert all(near(count, 1_000) for count in moves.values())
    assert near(28_000 - sum(by_op.values()), 2_000), "Identity gives no step"


def test_rand_augment_draws_n_independently() -> None:
    lengths = Counter(len(chain) for chain in decided(RandAugment(2, 9), 19_600))
    assert near(lengths[0], 100)
    assert near(lengths[1], 2_600)


def test_trivial_augment_draws_every_magnitude() -> None:
    steps = Counter(step for chain in decided(TrivialAugment(), 62_000) for step in chain)
    thresholds = {parameters[0]: count for (op, parameters), count in steps.items() if op is Op.SOLARIZE}
    assert sorted(thresholds) == [8.5 * k for k in range(31)]
    assert all(near(count, 62_000 / 14 / 31) for count in thresholds.values())
    assert {parameters[0] for op, parameters in steps if op is Op.POSTERIZE} == {2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_auto_augment_applies_its_pairs_with_their_probabilities(policy: Any) -> None:
    count = 25_000
    inverted = sum(op is Op.INVERT for chain in decided(AutoAugment(policy), count) for op, _ in chain)
    expected = sum(chance for pair in POLICIES[policy] for name, chance, _ in pair if name == "Invert")
    assert near(inverted, expected * count / 25)
    assert all(len(chain) <= 2 for chain in decided(AutoAugment(policy), 100))


def test_color_jitter_takes_every_order_and_the_whole_range() -> None:
    chains = decided(ColorJitter(0.4, (0.5, 0.9), 2, 0.25), 24_000)
    orders = Counter(tuple(op for op, _ in chain) for chain in chains)
    assert len(orders) == 24
    assert all(near(count, 1_000) for count in orders.values())
    found = {op: [dict(chain)[op][0] for chain in chains] for op in orders.most_common(1)[0][0]}
    for op, low, high in ((Op.BRIGHTNESS, 0.6, 1.4), (Op.CONTRAST, 0.5, 0.9), (Op.SATURATION, 0.0, 3.0)):
        assert low <= min(found[op]) < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < max(found[op]) <= high
    turns = set(found[Op.HUE])
    assert {0.0, 1.0, 63.0, 193.0, 255.0} <= turns
    assert not turns & set(range(64, 193))


def test_color_jitter_skips_what_it_would_not_change() -> None:
    assert decided(ColorJitter(), 1) == [()]
    assert [len(chain) for chain in decided(ColorJitter(contrast=0.1, saturation=(1, 1)), 3)] == [1, 1, 1]


@pytest.mark.parametrize("length", [1, 4, 5, 100])
def test_cutout_cuts_squares_that_may_hang_over(length: int) -> None:
    image = np.full((20, 30, 3), 9, np.uint8)
    areas = set()
    for units in draws(Cutout(length, fill=(1, 2, 3)), 300):
        out = Cutout(length, fill=(1, 2, 3)).apply({"image": image}, units)["image"]
        rows, columns = np.nonzero((out != 9).any(axis=2))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert height * width == len(rows), "one rectangle"
        assert (out[rows, columns] == (1, 2, 3)).all()
        areas.add((int(height), int(width)))
    assert max(areas) == (min(length, 20), min(length, 30))
    assert len(areas) > 1 or length not in (4, 5)


def test_cutout_cuts_n() -> None:
    image = np.full((200, 200, 1), 9, np.uint8)
    out = Cutout(2, n=3).apply({"image": image}, [0.1, 0.1, 0.5, 0.5, 0.9, 0.9])["image"]
    assert (out == 0).sum() == 12


def test_normalize_gives_float32_as_its_formula() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    levels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)
    operator = Normalize(mean, std)
    out = operator.apply({"image": levels}, [])["image"]
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, (levels / 255.0 - mean) / std, rtol=0, atol=1e-6)
    assert operator.check(IMAGE)["image"] == Field("image", (32, 48, 3), "float32")


def policy_file(path: Path) -> Path:
    """A file as the authors' search writes it: two layers over shear at 2 of 3 magnitudes, inversion and crops."""
    np.savez(
        path,
        policy_probs=np.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0]], np.float32),
        l_ops=3,
        l_mags=3,
        ops=np.array([[0], [0], [1], [2]], np.int32),
        mags=np.array([[0], [2], [1], [1]], np.int32),
        op_names=["ShearX:0.3", "Invert:1.0", "RandCrop:1.0"],
    )
    return path


def test_a_published_deep_policy_is_read_and_followed(tmp_path: Path) -> None:
    policy = load_deep_policy(policy_file(tmp_path / "policy.npz"))
    assert policy[0] == (("ShearX", 0.0, 0.5), ("ShearX", 1.0, 0.25), ("Invert", 0.5, 0.25), ("RandCrop", 0.5, 0.0))
    chains = decided(DeepAutoAugment(policy), 8_000)
    assert all(chain[1][0] is Op.AFFINE and chain[1][1][6:] == (125.0, 123.0, 114.0) for chain in chains)
    assert near(sum(chain[0][0] is Op.INVERT for chain in chains), 2_000)
    shears = Counter(round(chain[0][1][1], 6) for chain in chains if chain[0][0] is Op.AFFINE)
    assert set(shears) == {-0.3, 0.3}
    assert near(shears[0.3], 3_000)
    assert {chain[1][1][2] for chain in chains} == set(range(-4, 5)), "a crop shifts by up to four pixels"


def test_every_deep_operator_can_be_applied() -> None:
    image = np.random.default_rng(2).integers(20, 200, (90, 70, 3), dtype=np.uint8)
    names = {name for name, _, _ in uniform_policy(1)[0]} | {"RandCutout60", "RandResizeCrop_imagenet"}
    assert len(names) == 21
    for name in names:
        operator = DeepAutoAugment((((name, 0.4, 1.0),),))
        outs = [operator.apply({"image": image}, units)["image"] for units in draws(operator, 8)]
        changed = [not np.array_equal(out, image) for out in outs]
        assert any(changed) == (name != "Identity"), name


def test_an_enlarged_crop_shows_a_part_of_the_image() -> None:
    ramp = np.broadcast_to(np.arange(100, dtype=np.uint8)[:, None, None], (100, 100, 3))
    operator = DeepAutoAugment(((("RandResizeCrop_imagenet", 0.5, 1.0),),))
    for units in draws(operator, 50):
        rows = operator.apply({"image": ramp}, units)["image"][:, 50, 0].astype(int)
        assert (np.diff(rows) >= 0).all()
        assert 20 < rows[-1] - rows[0] + 1 <= 100


@pytest.mark.parametrize("operator", MOVING, ids=lambda operator: operator.name)
def test_boxes_are_refused_rather_than_left_behind(operator: ImageOperator) -> None:
    with pytest.raises(GraphError, match="cannot move boxes"):
        operator.check({**IMAGE, "boxes": Field("boxes", (None, 4), "float32")})
    sample = {"image": np.zeros((8, 8, 3), np.uint8), "boxes": np.zeros((1, 4), np.float32)}
    with pytest.raises(ValueError, match="cannot move boxes"):
        operator.apply(sample, [0.5] * operator.units)


def test_boxes_stay_under_colour_and_cutout() -> None:
    boxes = np.array([[1, 2, 3, 4]], np.float32)
    for operator in (ColorJitter(0.5), Cutout(3), Normalize((0.5,) * 3, (0.5,) * 3)):
        sample = operator.apply({"image": np.zeros((8, 8, 3), np.uint8), "boxes": boxes}, [0.5] * operator.units)
        np.testing.assert_array_equal(sample["boxes"], boxes)


def test_grey_images_pass() -> None:
    image = np.random.default_rng(3).integers(0, 256, (16, 16, 1), dtype=np.uint8)
    for operator in (*MOVING, ColorJitter(0.4, 0.4, 0.4, 0.4), Cutout(4), Normalize((0.5,), (0.5,))):
        for units in draws(operator, 20):
            assert operator.apply({"image": image}, units)["image"].shape == (16, 16, 1)
    with pytest.raises(ValueError, match="one channel"):
        RandAugment(fill=(1, 2, 3)).apply({"image": image}, [0.1] * 4)


def test_normalize_comes_last() -> None:
    after = Normalize((0.5,) * 3, (0.5,) * 3).check(IMAGE)
    with pytest.raises(GraphError, match=r"put it before \.normalize"):
        RandAugment().check(after)


def test_a_fifth_channel_is_refused() -> None:
    five = {"image": Field("image", (None, None, 5), "uint8")}
    for operator in (ColorJitter(0.1), Normalize((0.5,) * 3, (0.5,) * 3)):
        with pytest.raises(GraphError, match="channels"):
            operator.check(five)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (ColorJitter, {"brightness": -0.1}, "brightness"),
    (ColorJitter, {"hue": 0.6}, "hue"),
    (ColorJitter, {"contrast": (1.2, 0.8)}, "low before high"),
    (ColorJitter, {"saturation": "much"}, "saturation"),
    (RandAugment, {"n": 0}, "n must be"),
    (RandAugment, {"m": 31}, "less than bins"),
    (RandAugment, {"m": 3.5}, "m must be"),
    (RandAugment, {"bins": 1}, "bins"),
    (RandAugment, {"interpolation": "lanczos"}, "nearest, bilinear, bicubic"),
    (RandAugment, {"fill": (1, 2)}, "fill"),
    (RandAugment, {"fill": 256}, "fill"),
    (AutoAugment, {"policy": "mnist"}, "imagenet, cifar10, svhn"),
    (TrivialAugment, {"bins": True}, "bins"),
    (Cutout, {"length": 0}, "length"),
    (Cutout, {"length": 3, "n": -1}, "n must be"),
    (Normalize, {"mean": 0.5, "std": (1.0,)}, "mean"),
    (Normalize, {"mean": (0.5,), "std": (1.0, 1.0, 1.0)}, "as many"),
    (Normalize, {"mean": (0.5,), "std": (0.0,)}, "greater than 0"),
    (DeepAutoAugment, {"policy": ()}, "load_deep_policy"),
    (DeepAutoAugment, {"policy": (1, 2)}, "load_deep_policy"),
    (DeepAutoAugment, {"policy": ((1, 2),)}, "a choice is"),
    (DeepAutoAugment, {"policy": ((("Blur", 0.5, 1.0),),)}, "unknown operator 'Blur'"),
    (DeepAutoAugment, {"policy": ((("Invert", 1.5, 1.0),),)}, "magnitude from 0 to 1"),
    (DeepAutoAugment, {"policy": ((("Invert", 0.5, 0.0),),)}, "all be 0"),
    (DeepAutoAugment, {"policy": ((("Invert", 0.5),),)}, "Invert"),
]


@pytest.mark.parametrize(("operator", "arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_senseless_arguments_are_errors_that_name_them(operator: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        operator(**arguments)


def test_lists_are_as_good_as_tuples() -> None:
    pairs: Sequence[tuple[Any, Any]] = [
        (ColorJitter([0.5, 1.5]), ColorJitter((0.5, 1.5))),
        (RandAugment(fill=[1, 2, 3]), RandAugment(fill=(1, 2, 3))),
        (Normalize([0.5], [0.5]), Normalize((0.5,), (0.5,))),
        (DeepAutoAugment([[["Invert", 0.5, 1]]]), DeepAutoAugment(((("Invert", 0.5, 1.0),),))),
    ]
    for listed, tupled in pairs:
        assert listed == tupled
        assert hash(listed) == hash(tupled)
