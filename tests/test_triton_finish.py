"""Images arrive in their rows of the batch: as they are, or as `normalize` makes floats of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triton_device import DEVICE, MARKS

# isort: split

from penstock.kernels.pixels import normalize
from penstock.kernels.triton.finish import finish, level_table

pytestmark = MARKS

SCALE = np.array([0.0171, 0.0175, 0.0174], np.float32)
BIAS = np.array([-2.117, -2.035, -1.804], np.float32)
SIZES = [(1, 1), (1, 7), (5, 3), (33, 47), (40, 64)]
POISON = 99


def images(count: int, height: int, width: int) -> torch.Tensor:
    pixels = np.random.default_rng(height).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return torch.from_numpy(pixels)


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def poisoned(rows: int, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, *size, 3), POISON, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("size", SIZES)
def test_levels_are_copied_to_their_rows_and_no_others(size: tuple[int, int]) -> None:
    source, batch = images(4, *size), poisoned(6, size, torch.uint8)
    finish(source.to(DEVICE), int32([3, 0, 2]), int32([5, 4, 1]), batch)
    expected = torch.full_like(batch.cpu(), POISON)
    expected[[5, 4, 1]] = source[[3, 0, 2]]
    assert torch.equal(batch.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_floats_are_those_of_normalize_rounded_once(size: tuple[int, int], dtype: torch.dtype) -> None:
    source, batch = images(2, *size), poisoned(3, size, dtype)
    finish(source.to(DEVICE), int32([0, 1]), int32([2, 0]), batch, level_table(SCALE, BIAS, dtype).to(DEVICE))
    for index, row in ((0, 2), (1, 0)):
        exact = torch.from_numpy(normalize(source[index].numpy(), SCALE, BIAS))
        assert torch.equal(batch[row].cpu(), exact.to(dtype))
    assert (batch[1] == POISON).all()


def test_a_table_holds_every_level_of_every_channel() -> None:
    levels = np.arange(256, dtype=np.float32)
    expected = np.stack([levels * scale + bias for scale, bias in zip(SCALE, BIAS, strict=True)])
    np.testing.assert_array_equal(level_table(SCALE, BIAS, torch.float32).numpy(), expected)


def test_rows_may_be_columns_of_a_table() -> None:
    source, batch = images(3, 5, 6), poisoned(9, (5, 6), torch.uint8)
    table = int32([2, 7, -1, 0, 8, -1, 1, 0, -1]).view(3, 3)
    finish(source.to(DEVICE), table[:, 0], table[:, 1], batch)
    assert torch.equal(batch.cpu()[[7, 8, 0]], source[[2, 0, 1]])


@pytest.mark.parametrize("offset", [0, 16, 48])
def test_an_address_is_as_good_as_a_tensor(offset: int) -> None:
    """Of pinned memory, on a GPU."""
    source, batch = images(3, 6, 8), poisoned(2, (6, 8), torch.uint8)
    memory = torch.zeros(source.numel() + offset, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    memory[offset:] = source.flatten()
    finish(memory.data_ptr() + offset, int32([2, 0]), int32([0, 1]), batch)
    assert torch.equal(batch.cpu(), source[[2, 0]])


def test_the_user_sees_channels_last() -> None:
    source, batch = images(2, 4, 5), poisoned(2, (4, 5), torch.float32)
    finish(source.to(DEVICE), int32([0, 1]), int32([0, 1]), batch, level_table(SCALE, BIAS, torch.float32).to(DEVICE))
    seen = batch.permute(0, 3, 1, 2)
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert seen.shape == (2, 3, 4, 5)


def test_what_does_not_fit_is_refused() -> None:
    source, rows = images(2, 4, 5).to(DEVICE), int32([0, 1])
    batch, table = poisoned(2, (4, 5), torch.uint8), level_table(SCALE, BIAS, torch.float32).to(DEVICE)
    wrong = [
        (source.float(), rows, rows, batch, None),
        (source[:, :3], rows, rows, batch, None),
        (source, rows[:1], rows, batch, None),
        (source, rows.long(), rows.long(), batch, None),
        (source, rows, rows, batch.float(), None),
        (source, rows, rows, batch, table),
        (source, rows, rows, batch.half(), table),
        (source, rows, rows, batch.float(), table[:, :255]),
        (source, rows, rows, batch.permute(0, 3, 1, 2), None),
        (source.data_ptr() + 1, rows, rows, batch, None),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="expected dense uint8 images"):
            finish(*arguments)
