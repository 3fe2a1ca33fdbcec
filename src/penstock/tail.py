"""The tail of a pipeline: its last operators, where a device can apply them to whole batches.

    head, tail = split(graph)                 # CPU lanes run the head, so that the bus carries small data
    opened = tail.open("cuda", rows=256)      # once: constants, scratch, compiled kernels
    batch = opened.apply(batch, tail.draw(seed, epoch, positions))

The following is how a tail is meant to work. If the implementation differs, it is a bug.

- Head and tail together give the batches of the whole pipeline, from the same draws: `normalize` bit for bit, noise
  within 1e-6 of its deviation, spectra and mel bands within 1e-6 of each value that is more than 1e-12 of the largest,
  logarithms within 4e-6.
- A sample that an operator of the tail would refuse is refused in the head, under that operator's name.
- Nothing waits for the device.

Workers load this module for the head, and do without torch: it is imported where a tail is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.audio import AddNoise, AudioOperator, Mel, Spectrogram
from penstock.augment import Normalize
from penstock.errors import MissingExtraError
from penstock.graph import Field, Graph, Operator, Sample, Spec, Units
from penstock.kernels.native import lib

if TYPE_CHECKING:
    import torch

__all__ = ["Gate", "OpenTail", "Tail", "split"]

_FIELDS: dict[type[Operator], str] = {AddNoise: "audio", Spectrogram: "audio", Mel: "audio", Normalize: "image"}
"""What a device can apply to batches, and the field (also its kind) that it works on. Derived classes may differ."""
_MASK = 0xFFFFFFFFFFFFFFFF


def split(graph: Graph) -> tuple[Graph, Tail | None]:
    """What CPU lanes run, and the longest run of last operators that a device can apply to whole batches.

    These need samples of a shape that is known beforehand. None where there are no such operators.
    """
    cut = len(graph.operators)
    while cut and _fits(graph.operators[cut - 1], graph.specs[cut - 1]):
        cut -= 1
    if cut == len(graph.operators):
        return graph, None
    steps = zip(graph.operators[cut:], graph.specs[cut:], strict=False)
    gates = tuple(Gate(operator, spec[_FIELDS[type(operator)]]) for operator, spec in steps)
    head = replace(graph, operators=(*graph.operators[:cut], *gates))
    return head, Tail(gates, head.units)


def _fits(operator: Operator, spec: Spec) -> bool:
    name = _FIELDS.get(type(operator), "")
    return name in spec and spec[name].kind == name and spec[name].fixed


@dataclass(frozen=True)
class Gate(Operator):
    """Stands in the head for an operator of the tail: refuses what that would refuse, and changes nothing."""

    operator: Operator
    before: Field
    """What the operator works on."""

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def field(self) -> str:
        """The field that the operator changes."""
        return _FIELDS[type(self.operator)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(map(int, self.before.shape or ()))  # type: ignore[arg-type]  # the field is fixed

    def check(self, spec: Spec) -> Spec:
        """The fields as they are."""
        return spec

    def apply(self, sample: Sample, units: Units) -> Sample:
        """The sample as it is. ValueError where it is not what the pipeline promised, or has the wrong rate."""
        value = sample[self.field]
        if not isinstance(value, np.ndarray) or value.shape != self.shape or value.dtype != self.before.dtype:
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            wanted = f"{self.before.dtype}{list(self.shape)}"
            raise ValueError(f"{self.name} expects {self.field} as the pipeline says, {wanted}, not {found}")
        if isinstance(self.operator, AudioOperator):
            self.operator.decide((0.0,) * self.operator.units, value.shape[1], sample.get("rate"))
        return sample


@dataclass(frozen=True)
class Tail:
    """The operators behind the cut, by their gates; a description only, as the graph is."""

    gates: tuple[Gate, ...]
    first_unit: int
    """Draws that the head takes: those of the tail follow them."""

    @property
    def units(self) -> int:
        """Uniform draws per sample."""
        return sum(gate.operator.units for gate in self.gates)

    def draw(self, seed: int, epoch: int, positions: Sequence[int]) -> NDArray[np.float64]:
        """[rows, units] for the samples at these positions: the same numbers as in the whole pipeline."""
        if not self.units:
            return np.empty((len(positions), 0))
        places = np.array(positions, np.int64)
        width = self.first_unit + self.units
        out = np.empty((len(places), width))
        # 22 microseconds for 256 rows of 12 draws; through the lists of native.units it would be 830.
        lib.ps_units(seed & _MASK, epoch, 0, places.ctypes.data, len(places), width, out.ctypes.data)
        return out[:, self.first_unit :]

    def open(self, device: str | torch.device, rows: int) -> OpenTail:
        """The tail made ready for batches of `rows` samples, or fewer: constants, scratch, compiled kernels."""
        return OpenTail(self, device, rows)


class OpenTail:
    """A tail on its device. Works on the current stream, one batch at a time."""

    def __init__(self, tail: Tail, device: str | torch.device, rows: int) -> None:
        import torch

        self._device = torch.empty(0, device=device).device  # with its index
        on_gpu = self._device.type == "cuda"
        self._current: Any = torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()
        """Triton launches on the current device."""
        self._gates = tail.gates
        self._units = tail.units
        self._stages = [_stage(gate, rows, self._device) for gate in tail.gates]
        self._first = {gate.field: gate for gate in reversed(tail.gates)}
        """Of each field the gate that it enters by."""
        self.apply({name: self._zeros(gate) for name, gate in self._first.items()}, np.zeros((1, tail.units)))
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()  # batches may come on another stream

    def apply(self, batch: Mapping[str, Any], units: NDArray[np.float64]) -> dict[str, Any]:
        """The batch after the tail, in tensors of its own; `units` are the draws of the rows that are there."""
        out = dict(batch)
        for name, gate in self._first.items():
            self._check(name, gate, out[name], units)
        start = 0
        with self._current:
            for gate, stage in zip(self._gates, self._stages, strict=True):
                end = start + gate.operator.units
                out[gate.field] = stage(out[gate.field], units[:, start:end])
                start = end
        return out

    def _check(self, name: str, gate: Gate, value: torch.Tensor, units: NDArray[np.float64]) -> None:
        shape, dtype = _shown(gate), str(value.dtype).removeprefix("torch.")
        if tuple(value.shape[1:]) != shape or dtype != gate.before.dtype or value.device != self._device:
            wanted = f"{gate.before.dtype}{['rows', *shape]} on {self._device}"
            found = f"{dtype}{list(value.shape)} on {value.device}"
            raise ValueError(f"the tail was opened for {name} as {wanted}, not {found}")
        if units.shape != (len(value), self._units):
            raise ValueError(
                f"{name} of {len(value)} rows needs draws of shape {(len(value), self._units)}, not {units.shape}"
            )

    def _zeros(self, gate: Gate) -> torch.Tensor:
        import torch

        zeros = torch.zeros((1, *gate.shape), dtype=getattr(torch, str(gate.before.dtype)), device=self._device)
        return zeros.movedim(-1, 1) if gate.field == "image" else zeros


def _shown(gate: Gate) -> tuple[int, ...]:
    """The shape of a row in the batch: images are shown as CHW."""
    return (gate.shape[-1], *gate.shape[:-1]) if gate.field == "image" else gate.shape


def _stage(gate: Gate, rows: int, device: torch.device) -> Any:
    """What applies an operator to a batch: called with a tensor and the rows' draws."""
    operator = gate.operator
    if isinstance(operator, Normalize):
        if device.type == "cuda" and gate.shape[-1] == 3:
            with contextlib.suppress(ImportError):  # without triton it takes a launch more, and thrice the traffic
                return _Tables(operator, rows, device)
        return _Levels(operator, device)
    try:
        from penstock.kernels.sound_device import Noise, Spectra
    except ImportError as error:
        raise MissingExtraError(
            f"{operator.name} on {device} needs triton, which torch's builds for CUDA bring; it did not import: {error}"
        ) from error
    if isinstance(operator, AddNoise):
        return Noise(*operator.snr_db)
    assert isinstance(operator, Spectrogram | Mel)
    channels, length = gate.shape
    bank, log = (operator.bank, operator.log) if isinstance(operator, Mel) else (None, False)
    return Spectra(operator.stft, operator.power, (channels, length), rows, device, bank, log)


class _Tables:
    """`normalize` for batches of three channels, in one launch: every level through a table."""

    def __init__(self, operator: Normalize, rows: int, device: torch.device) -> None:
        import torch

        from penstock.kernels.triton.finish import finish, level_table

        self._finish = finish
        self._levels = level_table(*operator.scale_and_bias, torch.float32).to(device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)

    def __call__(self, images: torch.Tensor, units: NDArray[np.float64]) -> torch.Tensor:
        levels = images.movedim(1, -1).contiguous()
        out = levels.new_empty(levels.shape, dtype=self._levels.dtype)
        if len(levels):
            rows = self._rows[: len(levels)]
            self._finish(levels, rows, rows, out, self._levels)
        return out.movedim(-1, 1)


class _Levels:
    """`normalize` for batches."""

    def __init__(self, operator: Normalize, device: torch.device) -> None:
        import torch

        self._scale, self._bias = (torch.from_numpy(part).to(device).view(-1, 1, 1) for part in operator.scale_and_bias)

    def __call__(self, images: torch.Tensor, units: NDArray[np.float64]) -> torch.Tensor:
        """Multiplied, then added to: in one step the device would round once, and differ from the CPU."""
        return (images * self._scale).add_(self._bias)
