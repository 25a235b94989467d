"""Triton kernels against their references: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.engine.triton_device import DEVICE, DTYPES, TOLERANCE  # isort: skip  # before any kernel is defined

from nanoengine.kernels.paged_decode import num_splits, paged_decode, paged_decode_reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "dim", "block_size", "window"),
    [
        ([1], 2, 2, 64, 16, None),
        ([1, 17, 300, 64], 16, 8, 128, 16, None),
        ([700, 5, 33], 9, 3, 64, 4, None),
        ([129, 600], 4, 1, 96, 32, None),
        ([40, 3], 8, 2, 256, 1, None),
        ([1, 17, 300, 64], 6, 3, 24, 16, 11),
        ([900, 256, 257], 4, 2, 64, 64, 300),
    ],
)
def test_paged_decode(
    dtype: torch.dtype, lens: list[int], heads: int, kv_heads: int, dim: int, block_size: int, window: int | None
) -> None:
    check_decode(lens, heads, kv_heads, dim, block_size, window, dtype)


@pytest.mark.parametrize(
    ("lens", "window", "longest"),
    [
        ([1, 700, 300, 0], None, 4096),  # as under a graph: the grid is for the longest context, one row is padding
        ([300, 0, 2], 50, 4096),
        ([2000], None, 2000),  # more than one split
    ],
)
def test_the_grid_of_a_graph(lens: list[int], window: int | None, longest: int) -> None:
    check_decode(lens, 4, 2, 32, 16, window, torch.float32, longest=longest)


def test_a_split_is_longer_where_the_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.kernels.paged_decode._MAX_SPLITS", 2)
    check_decode([1500, 40], 4, 2, 32, 16, None, torch.float32)


def test_fp8_pages() -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    check_decode([1, 40, 300], 4, 2, 64, 16, None, dtype, kv_dtype=torch.float8_e4m3fn)


def test_the_number_of_splits() -> None:
    """A launch has enough programs for one row to reach every processor, and a bounded number of empty ones."""
    assert num_splits(1, 8, 40_960, 256) == 64
    assert num_splits(1, 8, 2048, 256) == 8
    assert num_splits(256, 8, 1400, 512) == 3
    assert num_splits(64, 8, 8192, 512) == 16
    assert num_splits(1024, 8, 192, 512) == num_splits(1024, 8, 2048, 512) == 1
    assert num_splits(1024, 8, 40_960, 512) == 2  # or a long row among many would be alone at the end
    for rows in range(1, 2000, 7):
        for longest in (1, 512, 10_240, 131_072):
            assert rows * 8 * num_splits(rows, 8, longest, 512) <= max(16_384, rows * 8)


def check_decode(
    lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    longest: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Random rows whose blocks lie shuffled among blocks of NaN, which nobody may read."""
    torch.manual_seed(0)
    needed = [-(-n // block_size) for n in lens]
    num_blocks, width = sum(needed) + 3, max(needed)
    blocks = torch.randperm(num_blocks, device=DEVICE)
    table = torch.full((len(lens), width), int(blocks[-1]), dtype=torch.int32, device=DEVICE)
    keys, values = (torch.randn(num_blocks, block_size, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    used = 0
    for row, n in enumerate(needed):
        table[row, :n] = blocks[used : used + n]
        used += n
    if kv_dtype is None:
        keys[blocks[-3:]] = values[blocks[-3:]] = float("nan")
    else:
        keys, values = keys.to(kv_dtype), values.to(kv_dtype)
    lengths = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lens), heads, dim, dtype=dtype, device=DEVICE)
    found = paged_decode(q, keys, values, table, lengths, scale=dim**-0.5, window=window, longest=longest or max(lens))
    expected = paged_decode_reference(q, keys, values, table, lengths, scale=dim**-0.5, window=window)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
