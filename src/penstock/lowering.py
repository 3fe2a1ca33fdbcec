"""Runs torchvision's `ImageFolder` and the transforms it is given on native operators.

    pipe = ps.lower(ImageFolder(root, transform=Compose([...])))
    loader = ps.DataLoader(ImageFolder(root, transform=...), lower=True)

Transforms are recognised by their class, so torchvision is never imported here. The longest known beginning of the
chain becomes operators; what follows is called as it is, with what it would have got. Pixels are those of torchvision
on Pillow images, bit for bit; random parameters have the same distribution, but are other draws.

How ToTensor, Normalize and their like treat a level is not worked out: they are shown a picture of all levels, and
what they make of it is the table that the kernel looks up.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from PIL import Image

from penstock.augment import AutoAugment, ColorJitter, RandAugment, TrivialAugment
from penstock.augment.policies import POLICIES
from penstock.crop import CenterCrop, Flip, RandomCrop, RandomResizedCrop, Resize
from penstock.errors import GraphError, SampleError
from penstock.folder import (
    AutoAugmentV2,
    DecodeAsPillow,
    Levels,
    RandAugmentV2,
    TrivialAugmentV2,
    fuse_as_pillow,
)
from penstock.graph import Field, Graph, Operator, Reader, Sample, Source, Spec
from penstock.kernels import native
from penstock.kernels.levels import look_up
from penstock.pipe import Pipe
from penstock.read import Dataset, Files
from penstock.read.storage import read_file

__all__ = ["LoweredFolder", "Lowering", "lower", "lowered"]

_FOLDER = "torchvision.datasets.folder"


@dataclass(frozen=True)
class Lowering:
    """A dataset on native operators as far as it is understood, and what was and was not."""

    dataset: Any
    """Map-style; yields what the original yields. The original itself where nothing was lowered."""
    explanation: tuple[str, ...]

    @property
    def pipe(self) -> Pipe:
        """The same as a pipe."""
        graph = self.dataset.graph() if isinstance(self.dataset, LoweredFolder) else Graph(Dataset(self.dataset))
        return Pipe(graph, notes=self.explanation)


def lower(dataset: Any) -> Pipe:
    """A pipe that yields what a torchvision `ImageFolder` yields, on native operators as far as they are known.

    The fields are `image` and `label`. `Loader.explain()` says what was lowered and what was not. Another dataset is
    taken as it is, as by `ps.dataset`.
    """
    return lowered(dataset).pipe


def lowered(dataset: Any) -> Lowering:
    """The dataset on native operators. Its transforms are read now: setting others later changes nothing."""
    problem = _problem(dataset)
    if problem is not None:
        return Lowering(dataset, (f"not lowered: {problem}",))
    chain = _read(_flat(dataset.transform))
    return Lowering(LoweredFolder(dataset, chain), tuple(_explained(dataset, chain)))


def _problem(dataset: Any) -> str | None:
    """Why this is no ImageFolder whose items are known to be made as torchvision makes them; None if it is one."""
    kind = type(dataset)
    bases = {base.__name__: base for base in kind.__mro__ if base.__module__ == _FOLDER}
    if "ImageFolder" not in bases:
        return f"it is a {kind.__qualname__}, not torchvision's ImageFolder"
    for method in ("__getitem__", "__getitems__", "__len__"):
        if getattr(kind, method, None) is not getattr(bases["DatasetFolder"], method, None):
            return f"{kind.__qualname__} has a {method} of its own"
    module: Any = sys.modules[_FOLDER]
    if dataset.loader not in (module.default_loader, module.pil_loader):
        return f"its loader is {getattr(dataset.loader, '__qualname__', dataset.loader)}, not torchvision's own"
    backend = sys.modules["torchvision"].get_image_backend()
    if dataset.loader is module.default_loader and backend != "PIL":
        return f"torchvision's image backend is {backend}, not PIL"
    return None


@dataclass(frozen=True)
class Chain:
    """What transforms became: native operators, a conversion, and the rest."""

    operators: tuple[Operator, ...]
    tensor: type | None
    """The class of tensor that the levels are converted to; None where they stay a Pillow image."""
    table: bytes | None
    """Their values, 3 x 256 float32; None where they stay uint8."""
    known: tuple[Any, ...]
    """The transforms that the above stand for."""
    rest: tuple[Any, ...]
    reason: str = ""
    """Why the first of the rest is not known."""


def _flat(transform: Any) -> list[Any]:
    if transform is None:
        return []
    if _version(transform) and type(transform).__name__ == "Compose":
        return [inner for outer in transform.transforms for inner in _flat(outer)]
    return [transform]


def _version(transform: Any) -> int:
    """1 or 2 for torchvision's own transforms, 0 for others and those with hooks."""
    module = type(transform).__module__
    if getattr(transform, "_forward_hooks", None) or getattr(transform, "_forward_pre_hooks", None):
        return 0
    if module.startswith("torchvision.transforms.v2."):
        return 2
    return int(module in ("torchvision.transforms.transforms", "torchvision.transforms.autoaugment"))


def _read(transforms: list[Any]) -> Chain:
    operators: list[Operator] = []
    reason = ""
    for transform in transforms:
        try:
            operators.append(_operator(transform))
        except GraphError as error:
            reason = str(error)
            break
    moved = len(operators)
    tensor, table, used, problem = _conversion(transforms[moved:])
    known = moved + used
    return Chain(
        tuple(operators), tensor, table, tuple(transforms[:known]), tuple(transforms[known:]), problem or reason
    )


# Transforms of Pillow images, to operators


def _operator(transform: Any) -> Operator:
    make = _OPERATORS.get(type(transform).__name__)
    version = _version(transform)
    if make is None or not version:
        raise GraphError("not among the transforms that are known")
    try:
        return make(transform, version)
    except (AttributeError, TypeError, ValueError) as error:  # another torchvision's, or senseless
        raise GraphError(f"its arguments are not understood: {error}") from error


def _resize(transform: Any, version: int) -> Operator:
    size = transform.size
    if isinstance(size, Sequence):
        size = index(size[0]) if len(size) == 1 else _pair(size)
    return Resize(size, _filter(transform), transform.max_size)


def _center_crop(transform: Any, version: int) -> Operator:
    return CenterCrop(_pair(transform.size))


def _random_crop(transform: Any, version: int) -> Operator:
    padding = transform.padding
    if isinstance(padding, Sequence):
        padding = tuple(padding)
        if version == 2:  # it keeps left, right, top, bottom
            padding = (padding[0], padding[2], padding[1], padding[3])
    if version == 1 and padding and transform.pad_if_needed and transform.padding_mode != "constant":
        raise GraphError("pads twice, and reflects the first padding in the second")
    fill = _fill(transform)
    return RandomCrop(
        _pair(transform.size), padding, transform.pad_if_needed, 0 if fill is None else fill, transform.padding_mode
    )


def _random_resized_crop(transform: Any, version: int) -> Operator:
    return RandomResizedCrop(_pair(transform.size), tuple(transform.scale), tuple(transform.ratio), _filter(transform))


def _color_jitter(transform: Any, version: int) -> Operator:
    ranges = (transform.brightness, transform.contrast, transform.saturation, transform.hue)
    return ColorJitter(*(0.0 if pair is None else pair for pair in ranges))


def _rand_augment(transform: Any, version: int) -> Operator:
    kind = RandAugmentV2 if version == 2 else RandAugment
    return kind(
        transform.num_ops,
        transform.magnitude,
        transform.num_magnitude_bins,
        interpolation=_filter(transform),  # type: ignore[arg-type]  # what it may be is checked there
        fill=_fill(transform),
    )


def _trivial_augment(transform: Any, version: int) -> Operator:
    kind = TrivialAugmentV2 if version == 2 else TrivialAugment
    return kind(transform.num_magnitude_bins, interpolation=_filter(transform), fill=_fill(transform))  # type: ignore[arg-type]


def _auto_augment(transform: Any, version: int) -> Operator:
    policy = transform.policy.value
    pairs = transform._policies if version == 2 else transform.policies
    if tuple(tuple((name, chance, bin or 0) for name, chance, bin in pair) for pair in pairs) != POLICIES.get(policy):
        raise GraphError(f"its pairs of operators are not those of the policy {policy}")
    kind = AutoAugmentV2 if version == 2 else AutoAugment
    return kind(policy, interpolation=_filter(transform), fill=_fill(transform))  # type: ignore[arg-type]


_OPERATORS: dict[str, Callable[[Any, int], Operator]] = {
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "RandomCrop": _random_crop,
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": lambda transform, version: Flip(transform.p),
    "RandomVerticalFlip": lambda transform, version: Flip(transform.p, "vertical"),
    "ColorJitter": _color_jitter,
    "RandAugment": _rand_augment,
    "TrivialAugmentWide": _trivial_augment,
    "AutoAugment": _auto_augment,
}
_PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def _pair(size: Any) -> tuple[int, int]:
    if not isinstance(size, Sequence):
        return index(size), index(size)
    height, width = map(index, size if len(size) == 2 else (*size, *size))
    return height, width


def _filter(transform: Any) -> str:
    """The name of an interpolation; `antialias` says nothing about Pillow images, which always are antialiased."""
    value = getattr(transform.interpolation, "value", transform.interpolation)
    name = str(_PILLOW_FILTERS[value] if isinstance(value, int) else value)
    return "nearest" if name == "nearest-exact" else name


def _fill(transform: Any) -> Any:
    if isinstance(transform.fill, dict):
        raise GraphError("its fill differs by type")
    return tuple(transform.fill) if isinstance(transform.fill, Sequence) else transform.fill


# Transforms of single levels, to a table

_POINTWISE = ("ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ConvertImageDtype", "ToDtype", "Normalize")


def _conversion(transforms: list[Any]) -> tuple[type | None, bytes | None, int, str]:
    """The class and table that the first transforms convert to, how many these are, and why no more."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    value: Any = Image.fromarray(ramp)
    found: torch.Tensor | None = None
    for used, transform in enumerate(transforms):
        name = type(transform).__name__
        if name not in _POINTWISE or not _version(transform):
            on_tensors = found is not None and name in _OPERATORS and _version(transform)
            why = "works on tensors here, whose pixels differ from those on Pillow images; convert after it instead"
            return *_outcome(found), used, why if on_tensors else ""
        try:
            value = transform(value.clone() if isinstance(value, torch.Tensor) else value)
        except Exception as error:  # the same will be raised by every sample, then in the user's sight
            return *_outcome(found), used, f"raises {type(error).__name__}: {error}"
        if not _tabular(value, ramp):
            return *_outcome(found), used, "does not give a tensor of float32 or unchanged uint8"
        found = value
    return *_outcome(found), len(transforms), ""


def _tabular(value: Any, ramp: NDArray[np.uint8]) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != (3, 1, 256):
        return False
    if value.dtype is torch.uint8:
        return bool(np.array_equal(value.numpy(), ramp.transpose(2, 0, 1)))
    return value.dtype is torch.float32


def _outcome(value: torch.Tensor | None) -> tuple[type | None, bytes | None]:
    if value is None:
        return None, None
    return type(value), None if value.dtype is torch.uint8 else value.reshape(3, 256).contiguous().numpy().tobytes()


# The dataset


class LoweredFolder(torch.utils.data.Dataset[tuple[Any, Any]]):
    """An ImageFolder whose images come from native operators. Other attributes are the original's."""

    def __init__(self, original: Any, chain: Chain) -> None:
        self._original = original
        self._chain = chain
        self._table = None if chain.table is None else Levels(chain.table).entries
        self._steps: list[tuple[Operator, int, int]] = []
        self._units = 0
        for step in self._graph(Files(["one of them"])).operators:
            self._steps.append((step, self._units, self._units + step.units))
            self._units += step.units

    def _graph(self, source: Files) -> Graph:
        return fuse_as_pillow(Graph(source, (DecodeAsPillow(), *self._chain.operators)))

    def graph(self) -> Graph:
        """The same as a pipeline, native throughout if no function of the user's takes part."""
        original, chain = self._original, self._chain
        targets = [target for _, target in original.samples]
        if chain.rest or original.target_transform is not None or not all(type(target) is int for target in targets):
            return Graph(_Items(self))
        source = Files([path for path, _ in original.samples], targets)
        source.classes = list(original.classes)
        return self.native(source)

    def native(self, source: Files) -> Graph:
        """What is known of the chain, as a pipeline."""
        graph = self._graph(source)
        return graph if self._chain.table is None else graph.then(Levels(self._chain.table))

    @property
    def opaque(self) -> list[str]:
        """The names of what is called as it is."""
        return [_name(one) for one in (*self._chain.rest, self._original.target_transform) if one is not None]

    def __len__(self) -> int:
        return len(self._original.samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._original, name)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        path, target = self._original.samples[index]
        image = self._image(index, path)
        try:
            for transform in self._chain.rest:
                image = transform(image)
            if self._original.target_transform is not None:
                target = self._original.target_transform(target)
        except Exception as error:
            error.add_note(f"The sample is {path}")
            raise
        return image, target

    def _image(self, index: Any, path: str) -> Any:
        units = native.units(random.getrandbits(64), 0, 0, [0], self._units)[0] if self._units else []
        name = "read"
        try:
            data = read_file(path)
            sample = {"image": data}
            for step, start, end in self._steps:
                name = step.name
                sample = step.apply(sample, units[start:end])
            return self._converted(sample["image"], data)
        except Exception as error:  # operators do not know which file they work on
            raise SampleError(f"{type(error).__name__}: {error}", id=int(index), place=path, operator=name) from error

    def _converted(self, pixels: Any, data: bytes) -> Any:
        kind = self._chain.tensor
        if kind is None:
            return _pillow(pixels, data)
        if self._table is not None:
            tensor = torch.from_numpy(look_up(pixels, self._table, planar=True))
        else:
            tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return tensor if kind is torch.Tensor else tensor.as_subclass(kind)


def _pillow(pixels: NDArray[np.uint8], data: bytes) -> Image.Image:
    """A Pillow image that also has what the file says beside pixels, where its Exif orientation is."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    with Image.open(io.BytesIO(data)) as file:
        image.info = dict(file.info)
    return image


class _Items(Source):
    """The items of a lowered dataset that runs functions of the user's."""

    clean = False
    opaque = True

    def __init__(self, dataset: LoweredFolder) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def spec(self) -> Spec:
        return {"image": Field("any"), "label": Field("any")}

    def open(self) -> Reader:
        return _ItemsReader(self.dataset)

    def place(self, id: int) -> str:
        return str(self.dataset.samples[id][0])

    def fingerprint(self) -> str:
        """Of the files, the operators and the names of functions; more cannot be seen from outside."""
        native = self.dataset.native(Files([path for path, _ in self.dataset.samples]))
        return "-".join((native.fingerprint(), *self.dataset.opaque))


class _ItemsReader(Reader):
    def __init__(self, dataset: LoweredFolder) -> None:
        self._dataset = dataset

    def read(self, id: int) -> Sample:
        image, label = self._dataset[id]
        return {"image": np.asarray(image.convert("RGB")) if isinstance(image, Image.Image) else image, "label": label}


# What users read


def _explained(dataset: Any, chain: Chain) -> list[str]:
    lines = [f"lowered: {type(dataset).__name__} of {len(dataset):,} samples"]
    lines.append(f"  native: {_names(('decode', *map(_name, chain.known)))}")
    if chain.table is not None:
        pointwise = [_name(transform) for transform in chain.known[len(chain.operators) :]]
        lines.append(f"  {_names(pointwise)}: one table of levels")
    if chain.rest:
        lines.append(f"  as they are: {_names(map(_name, chain.rest))}")
        lines.append(f"  {_name(chain.rest[0])}: {chain.reason}")
    if dataset.target_transform is not None:
        lines.append(f"  target_transform: {_name(dataset.target_transform)}, as it is")
    return lines


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _name(transform: Any) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))
