"""Noise, spectra and mel bands of whole batches on a device; kernels/sound.py is the same for one clip on a CPU.

Constants are made once; a call waits for nothing, compiles nothing that the first one did not, and takes memory of
sizes that do not change. Spectra are computed in double precision, as on the CPU, since a logarithm magnifies what is
lost in quiet bands: beside a loud tone, those of torch.stft in single precision were 0.12 off. The arithmetic is small
beside the memory it moves, also where double precision is slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels import sound
from penstock.kernels.triton import noise

__all__ = ["LOG_FLOOR", "WORKSPACE_BYTES", "Noise", "Spectra"]

WORKSPACE_BYTES = 64 << 20
"""What frames that are transformed together may take. Their arrays then pass through the GPU's cache, mostly."""
_FRAME_BYTES = 32
"""Per sample of a frame: 8 windowed, 8 of the half spectrum, 8 for the transform's own use, 4 and 2 of powers."""
LOG_FLOOR = 1e-10
"""The least value that `mel` takes the logarithm of."""


class Noise:
    """White noise at a ratio to each clip's power, as `audio.AddNoise`."""

    def __init__(self, low_db: float, high_db: float) -> None:
        self._low, self._high = low_db, high_db

    def decide(self, units: NDArray[np.float64]) -> NDArray[np.int64]:
        """[2, rows] from draws [rows, 2]: the noises' keys, and the bits of what a clip's root mean square is
        multiplied with."""
        numbers = np.empty((2, len(units)), np.int64)
        numbers[0] = units[:, 1] * 2.0**53
        numbers[1].view(np.float64)[:] = 10.0 ** (-(self._low + (self._high - self._low) * units[:, 0]) / 20)
        return numbers

    def __call__(self, waves: torch.Tensor, units: NDArray[np.float64]) -> torch.Tensor:
        """[rows, channels, time] with noise, from the rows' draws [rows, 2]."""
        waves = waves.contiguous()
        numbers = _sent(self.decide(units), waves.device)
        sums = torch.empty((len(waves), noise.PARTS), dtype=torch.float64, device=waves.device)
        out = torch.empty_like(waves)
        noise.add_noise(waves, numbers[0], numbers[1].view(torch.float64), sums, out)
        return out


def _sent(numbers: NDArray[Any], device: torch.device) -> torch.Tensor:
    """On the device without waiting; torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Spectra:
    """|short-time Fourier transform|^power of clips of `shape` [channels, length], in batches of about `rows`.

    With a bank through its filters, then with `log` the natural logarithm.
    """

    def __init__(
        self,
        stft: sound.Stft,
        power: float,
        shape: tuple[int, int],
        rows: int,
        device: torch.device,
        bank: sound.MelBank | None = None,
        log: bool = False,
    ) -> None:
        channels, self._length = shape
        self._stft, self._power = stft, power
        self._floor = LOG_FLOOR if log else None
        self._bins, self._frames = stft.n_fft // 2 + 1, stft.frames(self._length)
        self._bank = None if bank is None else _bank(bank, device)
        self._bands = self._bins if bank is None else len(bank.weights)
        self._window = torch.from_numpy(sound.window(stft)).to(device)
        self._places = _places(stft, self._length, device)
        fitting = max(1, WORKSPACE_BYTES // (_FRAME_BYTES * stft.n_fft))
        self._block = min(fitting, self._frames)
        together = max(1, min(fitting // self._frames, rows * channels))
        self._padded = torch.zeros((together, self._length + 2 * stft.padding), dtype=torch.float32, device=device)

    def __call__(self, waves: torch.Tensor, units: NDArray[np.float64]) -> torch.Tensor:
        """[rows, channels, bands, frames] of waveforms [rows, channels, time]."""
        rows, channels, _ = waves.shape
        flat = waves.reshape(rows * channels, self._length)
        out = flat.new_empty((rows * channels, self._bands, self._frames))
        for start in range(0, len(flat), len(self._padded)):
            stop = start + len(self._padded)
            self._transform(flat[start:stop], out[start:stop])
        return out.view(rows, channels, self._bands, self._frames)

    def _transform(self, waves: torch.Tensor, out: torch.Tensor) -> None:
        """All of the padded rows are transformed, however many waveforms there are: plans of other sizes would be
        made while the pipeline runs."""
        padded = self._padded[: len(waves)]
        if self._places is None:
            padded[:, self._stft.padding :][:, : self._length].copy_(waves)
        else:
            torch.index_select(waves, 1, self._places, out=padded)
        framed = self._padded.unfold(1, self._stft.n_fft, self._stft.hop_length)
        for start in range(0, self._frames, self._block):
            stop = min(start + self._block, self._frames)
            powers = self._powers(framed[:, start:stop])[: len(waves)].transpose(1, 2)
            self._finish(powers, out[:, :, start:stop])

    def _powers(self, framed: torch.Tensor) -> torch.Tensor:
        """[rows, frames, bins] in double precision."""
        spectrum: torch.Tensor = torch.fft.rfft(framed * self._window)
        real, imaginary = spectrum.real, spectrum.imag
        powers = real.square().addcmul_(imaginary, imaginary)
        if self._power == 1:
            powers.sqrt_()
        elif self._power != 2:
            powers.pow_(self._power / 2)
        return powers

    def _finish(self, powers: torch.Tensor, out: torch.Tensor) -> None:
        if self._bank is None:
            out.copy_(powers)
            return
        spectra = powers.to(torch.float32, memory_format=torch.contiguous_format)
        noise.filter_bank(spectra, *self._bank, out, self._floor)


def _bank(bank: sound.MelBank, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, first, counts = (torch.from_numpy(part).to(device) for part in bank)
    return weights, first, counts


def _places(stft: sound.Stft, length: int, device: torch.device) -> torch.Tensor | None:
    """Which sample stands at each place of a padded clip; None where zeros pad, or nothing does."""
    if stft.pad_mode in (None, "constant"):
        return None
    return torch.from_numpy(np.pad(np.arange(length), stft.padding, mode=stft.pad_mode)).to(device)
