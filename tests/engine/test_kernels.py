"""Triton kernels against their references: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from nanoengine.kernels.paged_decode import paged_decode, paged_decode_reference  # noqa: E402

# The interpreter multiplies bfloat16 wrongly, so there only the others are compared.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


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
    torch.manual_seed(0)
    width = -(-max(lens) // block_size)
    num_blocks = width * len(lens) + 3
    keys, values = (torch.randn(num_blocks, block_size, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    table = torch.randperm(num_blocks, device=DEVICE)[: width * len(lens)].view(len(lens), width).int()
    lengths = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lens), heads, dim, dtype=dtype, device=DEVICE)
    found = paged_decode(q, keys, values, table, lengths, scale=dim**-0.5, window=window, longest=max(lens))
    expected = paged_decode_reference(q, keys, values, table, lengths, scale=dim**-0.5, window=window)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
