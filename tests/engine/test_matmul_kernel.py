"""The batch-invariant matrix product against torch's, and a row of it against itself in other company."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from nanoengine.kernels.matmul import matmul  # noqa: E402

# The interpreter multiplies bfloat16 wrongly, so there only the others are compared.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(1, 256, 128), (64, 128, 64), (3, 257, 72), (130, 33, 65), (700, 70, 1), (5, 7, 200)],
)
def test_matmul(dtype: torch.dtype, rows: int, columns: int, inner: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = normal(rows, inner, dtype=dtype), normal(columns, inner, dtype=dtype) * inner**-0.5
    added = normal(columns, dtype=dtype) if bias else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double()).to(dtype)
    torch.testing.assert_close(matmul(x, weight, added), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = normal(200, 136, dtype=dtype), normal(150, 136, dtype=dtype)
    together = matmul(x, weight, None)
    pieces = [(0, 1), (64, 1), (128, 72), (0, 199)]
    if DEVICE == "cuda":  # the interpreter's products are a CPU library's: there a row's place in its tile matters
        pieces += [(77, 1), (199, 1), (3, 64), (60, 65), (1, 199)]
    for first, count in pieces:
        rows = slice(first, first + count)
        assert torch.equal(matmul(x[rows].clone(), weight, None), together[rows])
    others = torch.cat((x[64:65], 100 * normal(70, 136, dtype=dtype)))
    assert torch.equal(matmul(others, weight, None)[0], together[64])
