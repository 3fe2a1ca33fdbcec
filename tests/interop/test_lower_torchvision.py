"""`lower` gives what torchvision's ImageFolder gives: the same pixels where nothing is random, else equal chances."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

import penstock as ps
from penstock.augment.steps import AUTO, RAND, TRIVIAL, Frame, magnitude, step
from penstock.errors import SampleError
from penstock.folder import AutoAugmentV2, RandAugmentV2, TrivialAugmentV2
from penstock.kernels.pixels import apply
from penstock.lowering import LoweredFolder, lower, lowered

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
datasets = pytest.importorskip("torchvision.datasets", exc_type=ImportError)
v1 = pytest.importorskip("torchvision.transforms", exc_type=ImportError)
v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
tv_tensors = pytest.importorskip("torchvision.tv_tensors", exc_type=ImportError)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOAT = v2.ToDtype(torch.float32, scale=True)


def photo(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(height) * 1.5, np.arange(width))[..., None] + np.array([0, 30, 60])
    return (ramp + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)


def damage(path: Path) -> None:
    """Zeros for the last quarter, up to the end marker: Pillow still gives an image."""
    data = path.read_bytes()
    start = len(data) * 3 // 4
    path.write_bytes(data[:start] + bytes(len(data) - start - 2) + data[-2:])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file: sizes, modes, formats, Exif, damage."""
    root = tmp_path_factory.mktemp("images")
    for folder in ("cat", "dog"):
        (root / folder).mkdir()
    wide, tall = Image.fromarray(photo(75, 101)), Image.fromarray(photo(120, 64, 1))
    turned = Image.Exif()
    turned[0x0112] = 6
    wide.save(root / "cat/a.jpg")
    tall.save(root / "cat/b.jpeg", quality=60, progressive=True)
    wide.save(root / "cat/turned.jpg", exif=turned)
    wide.convert("L").save(root / "cat/gray.jpg")
    tall.convert("CMYK").save(root / "dog/cmyk.jpg")
    tall.save(root / "dog/damaged.jpg")
    damage(root / "dog/damaged.jpg")
    wide.convert("RGBA").save(root / "dog/alpha.png")
    wide.quantize(16).save(root / "dog/palette.png", transparency=3)
    Image.fromarray(np.arange(0, 70000, 7, dtype=np.uint32).astype(np.uint16).reshape(100, 100)).save(
        root / "dog/sixteen.png"
    )
    tall.save(root / "dog/x.webp", lossless=True)
    return root


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One lossless image, a pixel of which tells its place."""
    root = tmp_path_factory.mktemp("square")
    (root / "one").mkdir()
    Image.fromarray(photo(24, 24)).save(root / "one/a.png")
    return root


def array(image: Any) -> NDArray[Any]:
    return image.numpy() if isinstance(image, torch.Tensor) else np.asarray(image)  # type: ignore[no-any-return]


def folder(root: Path, *transforms: Any, **options: Any) -> Any:
    composed = transforms[0] if len(transforms) == 1 else v1.Compose(transforms) if transforms else None
    return datasets.ImageFolder(root, composed, **options)


def assert_same(root: Path, *transforms: Any) -> LoweredFolder:
    """Both datasets give the same, types included."""
    theirs = folder(root, *transforms)
    ours = lowered(theirs).dataset
    assert isinstance(ours, LoweredFolder)
    for i in range(len(theirs)):
        torch.manual_seed(i)
        (image, target), path = theirs[i], theirs.samples[i][0]
        torch.manual_seed(i)
        mine, label = ours[i]
        assert (type(mine), label) == (type(image), target), path
        assert array(mine).dtype == array(image).dtype, path
        np.testing.assert_array_equal(array(mine), array(image), err_msg=path)
    return ours


def known(ours: LoweredFolder) -> list[str]:
    return [type(transform).__name__ for transform in ours._chain.known]


# What is not random is the same


CERTAIN: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "ToTensor alone": (v1.ToTensor(),),
    "validation": (v1.Resize(48), v1.CenterCrop(40), v1.ToTensor(), v1.Normalize(MEAN, STD)),
    "Pillow image": (v1.Resize(48, v1.InterpolationMode.BICUBIC), v1.CenterCrop((40, 30))),
    "padded": (v1.CenterCrop(110), v1.PILToTensor()),
    "two sizes": (v1.Resize([40, 51], antialias=None), v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)),
    "max_size": (v1.Resize([30], v1.InterpolationMode.LANCZOS, max_size=40), v1.ToTensor()),
    "nearest": (v1.Resize(33, v1.InterpolationMode.NEAREST), v1.ToTensor()),
    "one mean": (v1.Resize(33), v1.ToTensor(), v1.Normalize([0.5], [0.25], inplace=True)),
    "whole crop": (v1.CenterCrop(60), v1.RandomResizedCrop(32, (1, 1), (1, 1)), v1.ToTensor()),
    "exact crop": (v1.CenterCrop(20), v1.RandomCrop(28, padding=4, fill=(9, 8, 7)), v1.ToTensor()),
    "reflected": (v1.CenterCrop(20), v1.RandomCrop((22, 26), (3, 1), padding_mode="reflect"), v1.ToTensor()),
    "flips": (v1.RandomHorizontalFlip(1.0), v1.RandomVerticalFlip(1.0), v1.RandomHorizontalFlip(0.0), v1.ToTensor()),
    "brightness": (v1.Resize((31, 32)), v1.ColorJitter(brightness=(1.5, 1.5)), v1.ToTensor()),
    "contrast": (v1.Resize((31, 32)), v1.ColorJitter(contrast=(0.3, 0.3)), v1.ToTensor()),
    "saturation": (v1.Resize((31, 32)), v1.ColorJitter(saturation=(1.9, 1.9)), v1.ToTensor()),
    "hue": (v1.Resize((31, 32)), v1.ColorJitter(hue=(0.2, 0.2)), v1.ToTensor()),
    "nested": (v1.Compose([v1.Resize(40), v1.Compose([v1.CenterCrop(30)])]), v1.ToTensor()),
    "v2": (
        v2.Compose([v2.Resize(48), v2.CenterCrop(40), v2.ToImage(), FLOAT, v2.Normalize(MEAN, STD), v2.ToPureTensor()]),
    ),
    "v2 image": (v2.Compose([v2.Resize(size=48, interpolation="bicubic"), v2.ToImage(), FLOAT]),),
    "v2 levels": (v2.Compose([v2.Resize((33, 22), interpolation=2), v2.PILToTensor()]),),
    "v2 dtype": (v2.Compose([v2.PILToTensor(), v2.ConvertImageDtype(torch.float32)]),),
    "v2 crop": (v2.CenterCrop(20), v2.RandomCrop(28, padding=[1, 2, 7, 6], padding_mode="edge"), v2.PILToTensor()),
    "v2 jitter": (v2.ColorJitter(hue=(-0.1, -0.1)), v2.RandomHorizontalFlip(1), v2.RandomVerticalFlip(1), v2.ToImage()),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_certain_chains_are_lowered_whole_and_give_torchvisions_bits(root: Path, name: str) -> None:
    ours = assert_same(root, *CERTAIN[name])
    assert not ours._chain.rest


@pytest.mark.filterwarnings("ignore:The transform .ToTensor:UserWarning")
def test_the_deprecated_to_tensor_is_known(root: Path) -> None:
    assert known(assert_same(root, v2.Resize(40), v2.ToTensor(), v2.Normalize(MEAN, STD))) == [
        *("Resize", "ToTensor", "Normalize")
    ]


# What is random has the same outcomes


def outcomes(dataset: Any, count: int) -> Counter[bytes]:
    torch.manual_seed(0)
    random.seed(0)
    return Counter(array(dataset[0][0]).tobytes() for _ in range(count))


@pytest.mark.parametrize(
    ("transform", "count"),
    [
        (v1.RandomHorizontalFlip(0.3), 600),
        (v1.RandomVerticalFlip(0.6), 600),
        (v1.RandomCrop(22), 900),
        (v1.RandomCrop(26, padding=2, pad_if_needed=True), 900),
        (v2.RandomCrop(26, padding=1, pad_if_needed=True, padding_mode="reflect"), 100),
        (v1.RandomCrop((27, 24), pad_if_needed=True, padding_mode="symmetric"), 600),
        (v1.ColorJitter((0.5, 0.5), (2, 2), (0.1, 0.1)), 900),
        (v1.RandAugment(1, 9, fill=[1, 2, 3]), 1500),
        (v2.RandAugment(1, 3, 5, interpolation=v2.InterpolationMode.BILINEAR, fill=7), 1500),
        (v1.TrivialAugmentWide(2), 2000),
        (v2.TrivialAugmentWide(2, fill=[1.5, 2.0, 3.0]), 2000),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else None,
)
def test_random_transforms_have_torchvisions_outcomes_equally_often(square: Path, transform: Any, count: int) -> None:
    theirs = folder(square, transform)
    ours = lowered(theirs).dataset
    assert known(ours) == [type(transform).__name__]
    expected, found = outcomes(theirs, count), outcomes(ours, count)
    assert found.keys() == expected.keys()
    for outcome, times in expected.items():
        spread = (2 * times * (1 - times / count)) ** 0.5
        assert abs(found[outcome] - times) <= 4.5 * spread + 3


@pytest.mark.parametrize("policy", v1.AutoAugmentPolicy, ids=lambda policy: policy.value)
@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_auto_augment_has_torchvisions_outcomes(square: Path, policy: Any, module: Any) -> None:
    theirs = folder(square, v1.CenterCrop(8), module.AutoAugment(policy))
    ours = lowered(theirs).dataset
    assert known(ours) == ["CenterCrop", "AutoAugment"]
    expected, found = outcomes(theirs, 4000), outcomes(ours, 4000)
    unseen = sum(times for outcome, times in found.items() if outcome not in expected)
    assert unseen <= 40  # the rarest of some hundred outcomes


@pytest.mark.parametrize(
    ("theirs", "ours", "space", "bins"),
    [
        (v2.RandAugment(), RandAugmentV2(), RAND, 31),
        (v2.TrivialAugmentWide(), TrivialAugmentV2(), TRIVIAL, 31),
        (v2.AutoAugment(), AutoAugmentV2(), AUTO, 10),
    ],
    ids=["rand", "trivial", "auto"],
)
def test_every_operator_of_v2_gives_torchvisions_pixels(theirs: Any, ours: Any, space: Any, bins: int) -> None:
    from penstock.folder import _thresholds_of_v2

    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    frame = Frame(16, 16)
    for name, span in space.items():
        magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
        values = magnitudes(bins, 16, 16)
        for bin in range(bins if values is not None else 1):
            for sign in (1, -1) if signed else (1,):
                value = 0.0 if values is None else sign * float(values[bin])
                expected = theirs._apply_image_or_video_transform(
                    Image.fromarray(image), name, value, interpolation=theirs.interpolation, fill=theirs._fill
                )
                one = step(name, sign * magnitude(span, bin, bins, 16, 16), frame)
                steps = _thresholds_of_v2(() if one is None else (one,), bins)
                np.testing.assert_array_equal(apply(image, steps), np.asarray(expected), err_msg=f"{name} {value}")


def test_crops_cover_torchvisions_range_of_sizes(root: Path) -> None:
    """The area that RandomResizedCrop keeps, seen through a picture of its columns and rows."""
    theirs = folder(root, v1.RandomResizedCrop(16, (0.2, 0.6)), v1.ToTensor())
    ours = lowered(theirs).dataset
    torch.manual_seed(0)
    random.seed(0)
    means = [np.array([float(dataset[0][0].mean()) for _ in range(400)]) for dataset in (theirs, ours)]
    assert abs(means[0].mean() - means[1].mean()) < 4 * means[0].std() * (2 / 400) ** 0.5
    assert 0.8 < means[0].std() / means[1].std() < 1.25


def test_draws_come_from_the_generator_that_loaders_seed(root: Path) -> None:
    dataset = lowered(folder(root, v1.RandomResizedCrop(16), v1.RandAugment(), v1.ToTensor())).dataset
    random.seed(5)
    first = [dataset[0][0], dataset[0][0]]
    random.seed(5)
    assert torch.equal(dataset[0][0], first[0])
    assert not torch.equal(*first)


# What is not known is called as it is


class TensorsUpsideDown:
    """A user's transform of what it is given: notes its type and layout."""

    def __call__(self, image: Any) -> Any:
        assert type(image) is torch.Tensor
        assert image.is_contiguous()
        return image.flip(1)


class BrighterResize(v1.Resize):  # type: ignore[misc, name-defined]
    """A user's subclass of a known transform."""

    def forward(self, image: Any) -> Any:
        return super().forward(image).point(lambda level: min(255, level + 40))


MIXED: dict[str, tuple[tuple[Any, ...], int]] = {
    "after the tensor": ((v1.Resize((30, 30)), v1.ToTensor(), TensorsUpsideDown(), v1.Normalize(MEAN, STD)), 2),
    "RandomErasing": ((v1.Resize((30, 30)), v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing(p=1.0)), 3),
    "before the tensor": ((v1.Resize((30, 30)), v1.GaussianBlur(3), v1.ToTensor()), 1),
    "first": ((v1.Lambda(ImageOps.exif_transpose), v1.Resize(30), v1.ToTensor()), 0),
    "Exif later": ((v1.CenterCrop(60), v1.Lambda(ImageOps.exif_transpose), v1.ToTensor()), 1),
    "subclass": ((v1.CenterCrop(40), BrighterResize(30), v1.ToTensor()), 1),
    "tensors first": ((v2.ToImage(), v2.Resize(30), FLOAT), 1),
    "tensors later": ((v1.Resize((30, 30)), v1.ToTensor(), v1.CenterCrop(20)), 2),
    "other dtype": ((v2.CenterCrop(20), v2.ToImage(), v2.ToDtype(torch.float64, scale=True)), 2),
    "fill by type": ((v2.CenterCrop(20), v2.RandomCrop(24, 2, fill={Image.Image: 3, "others": 0}), v2.ToImage()), 1),
    "pads twice": (
        (v1.CenterCrop(20), v1.RandomCrop(30, 2, pad_if_needed=True, padding_mode="reflect"), v1.ToTensor()),
        1,
    ),
    "RandomApply": ((v1.Resize(20), v1.RandomApply([v1.Grayscale(3)], p=1.0), v1.ToTensor()), 1),
}


@pytest.mark.parametrize("name", MIXED)
def test_the_longest_known_beginning_is_lowered_and_the_rest_gets_what_it_would_have_got(root: Path, name: str) -> None:
    transforms, count = MIXED[name]
    ours = assert_same(root, *transforms)
    assert ours._chain.known == transforms[:count]
    assert ours._chain.rest == transforms[count:]


def test_a_hook_makes_a_transform_the_users(root: Path) -> None:
    resize = v1.Resize(30)
    resize.register_forward_hook(lambda module, args, image: ImageOps.invert(image))
    assert known(assert_same(root, v1.CenterCrop(50), resize, v1.ToTensor())) == ["CenterCrop"]


def test_a_changed_policy_makes_a_transform_the_users(root: Path) -> None:
    augment = v1.AutoAugment()
    augment.policies = [(("Invert", 1.0, None), ("Invert", 1.0, None))]
    assert known(assert_same(root, v1.CenterCrop(50), augment, v1.ToTensor())) == ["CenterCrop"]


def test_labels_go_through_the_target_transform(root: Path) -> None:
    theirs = folder(root, v1.ToTensor(), target_transform=lambda target: f"class {target}")
    lowering = lowered(theirs)
    assert [lowering.dataset[i][1] for i in (0, -1)] == ["class 0", "class 1"]
    assert lowering.explanation[-1] == "  target_transform: <lambda>, as it is"


def test_the_explanation_names_what_was_lowered_and_why_it_ends(root: Path) -> None:
    dataset = folder(root, v1.RandomResizedCrop(24), v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing())
    assert lowered(dataset).explanation == (
        "lowered: ImageFolder of 10 samples",
        "  native: decode, RandomResizedCrop, ToTensor, Normalize",
        "  ToTensor, Normalize: one table of levels",
        "  as they are: RandomErasing",
        "  RandomErasing: not among the transforms that are known",
    )
    first = lowered(folder(root, v2.ToImage(), v2.Resize(30))).explanation[-1]
    assert first.startswith("  Resize: works on tensors here")
    filled = lowered(folder(root, v1.RandAugment(interpolation=v1.InterpolationMode.LANCZOS))).explanation[-1]
    assert filled.startswith("  RandAugment: rand_augment: interpolation must be one of")
    raising = lowered(folder(root, v1.Normalize(MEAN, STD))).explanation[-1]
    assert raising.startswith("  Normalize: raises TypeError")


class OwnItems(datasets.ImageFolder):  # type: ignore[misc, name-defined]
    """A subclass that gives something else."""

    def __getitem__(self, index: int) -> Any:
        return index


class OwnClasses(datasets.ImageFolder):  # type: ignore[misc, name-defined]
    """A subclass that gives the same, of other folders."""

    def find_classes(self, directory: Any) -> Any:
        return ["dog"], {"dog": 7}


def test_subclasses_are_lowered_unless_items_are_their_own(root: Path) -> None:
    dataset = OwnItems(root)
    assert lowered(dataset).dataset is dataset
    assert lowered(dataset).explanation == ("not lowered: OwnItems has a __getitem__ of its own",)
    image, target = lowered(OwnClasses(root, v1.ToTensor())).dataset[0]
    assert (type(image), target) == (torch.Tensor, 7)


def test_another_loader_or_dataset_is_left_as_it_is(root: Path) -> None:
    dataset = datasets.ImageFolder(root, loader=Image.open)
    assert lowered(dataset).explanation == ("not lowered: its loader is open, not torchvision's own",)
    subset = torch.utils.data.Subset(folder(root), [0])
    assert lowered(subset).explanation == ("not lowered: it is a Subset, not torchvision's ImageFolder",)


# As a dataset and in loaders


TRAIN = (v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.RandAugment(), v1.ToTensor(), v1.Normalize(MEAN, STD))


def test_attributes_are_the_originals(root: Path) -> None:
    theirs = folder(root, *TRAIN)
    ours = lowered(theirs).dataset
    assert len(ours) == len(theirs)
    for name in ("classes", "class_to_idx", "samples", "targets", "imgs", "root", "transform"):
        assert getattr(ours, name) is getattr(theirs, name)
    with pytest.raises(AttributeError):
        ours.nothing  # noqa: B018


@pytest.mark.parametrize("transforms", [TRAIN, (v2.CenterCrop(20), v2.ToImage()), (v1.CenterCrop(20), v1.Grayscale())])
def test_pickling_changes_nothing(root: Path, transforms: tuple[Any, ...]) -> None:
    ours = lowered(folder(root, *transforms)).dataset
    copy = pickle.loads(pickle.dumps(ours))
    random.seed(1)
    image, target = ours[0]
    random.seed(1)
    other, label = copy[0]
    assert (type(other), label, len(copy)) == (type(image), target, len(ours))
    assert np.array_equal(array(image), array(other))


def test_errors_name_the_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, data in {"bad.jpg": b"no image", "empty.jpg": b"", "gone.jpg": b"x"}.items():
        (tmp_path / "a" / name).write_bytes(data)
    dataset = lowered(folder(tmp_path, *TRAIN)).dataset
    (tmp_path / "a/gone.jpg").unlink()
    for index, name in enumerate(("bad.jpg", "empty.jpg", "gone.jpg")):
        with pytest.raises(SampleError, match=name):
            dataset[index]

    def fail(image: Any) -> Any:
        raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError) as caught:
        lowered(folder(root, v1.Lambda(fail))).dataset[0]
    assert caught.value.__notes__ == [f"The sample is {root}/cat/a.jpg"]


@pytest.fixture
def train(root: Path) -> Any:
    return folder(root, *TRAIN)


def batches(loader: Any) -> Iterator[Any]:
    torch.manual_seed(3)
    return iter(loader)


@pytest.mark.parametrize("tail", [(), (v1.RandomErasing(),)], ids=["native", "mixed"])
def test_data_loader_batches_do_not_depend_on_workers(root: Path, tail: tuple[Any, ...]) -> None:
    dataset = folder(root, *TRAIN, *tail)
    made = []
    for workers in (0, 2):
        loader = ps.DataLoader(dataset, batch_size=4, shuffle=True, lower=True, num_workers=workers)
        assert loader.explain().startswith("lowered: ImageFolder of 10 samples")
        made.append(list(batches(loader)))
    assert [len(labels) for _, labels in made[0]] == [4, 4, 2]
    for (images, labels), (others, targets) in zip(*made, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, targets)


@pytest.mark.parametrize(
    "tail", [(), (v1.RandomErasing(),), (v1.ToPILImage(),)], ids=["native", "mixed", "mixed to Pillow"]
)
def test_loader_batches_do_not_depend_on_workers(root: Path, tail: tuple[Any, ...]) -> None:
    pipe = lower(folder(root, *TRAIN, *tail))
    made = []
    for workers in (0, 2):
        with ps.Loader(pipe.batch(8), workers=workers) as loader:
            assert loader.explain().startswith(
                "lowered: ImageFolder of 10 samples\n  native: decode, RandomResizedCrop"
            )
            made.append(list(loader))
    assert [len(batch["label"]) for batch in made[0]] == [8, 2]
    for batch, other in zip(*made, strict=True):
        assert batch["image"].shape[1:] == (3, 24, 24)
        assert all(torch.equal(batch[name], other[name]) for name in ("id", "image", "label"))


def test_a_mixed_pipe_knows_its_files_and_functions(root: Path) -> None:
    plain, erased = (lower(folder(root, *TRAIN, *tail)).graph for tail in ((), (v1.RandomErasing(),)))
    assert erased.source.place(1) == plain.source.place(1) == str(root / "cat/b.jpeg")
    other = lower(folder(root, v1.RandomResizedCrop(25), *TRAIN[1:], v1.RandomErasing())).graph
    renamed = lower(folder(root, *TRAIN, v1.RandomErasing(), target_transform=str)).graph
    assert len({graph.fingerprint() for graph in (plain, erased, other, renamed)}) == 4


@pytest.mark.parametrize("name", ["validation", "padded", "v2", "two sizes"])
def test_the_pipe_gives_what_the_dataset_gives(root: Path, name: str) -> None:
    transforms = (v1.CenterCrop(60), *CERTAIN[name])
    dataset = folder(root, *transforms)
    pipe = lower(dataset)
    assert pipe.graph.clean
    with ps.Loader(pipe.batch(5), workers=0, shuffle=False) as loader:
        for batch in loader:
            for id, image, label in zip(batch["id"], batch["image"], batch["label"], strict=True):
                expected, target = dataset[int(id)]
                assert torch.equal(image, expected)
                assert int(label) == target
