"""Products of a few rows, with what is fused around them, against torch's operations one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.engine.triton_device import DEVICE, DTYPES  # isort: skip
from nanoengine.kernels.few_rows import few_rows
from nanoengine.layers.ops import Norm, TorchOps

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 6e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "bias"),
    [(1, 72, 5, True), (2, 5000, 3, False), (3, 2048, 7, True), (4, 576, 9, False)],
)
@pytest.mark.parametrize("fused", ["plain", "norm", "add", "swiglu"])
def test_few_rows(dtype: torch.dtype, rows: int, inner: int, columns: int, bias: bool, fused: str) -> None:
    torch.manual_seed(rows + inner)
    swiglu = fused == "swiglu"
    options = {"dtype": dtype, "device": DEVICE}
    x, delta = torch.randn(2, rows, inner, **options).unbind()
    weight = torch.randn(columns * (1 + swiglu), inner, **options) / inner**0.5
    b = torch.randn(len(weight), **options) if bias else None
    norm = Norm(torch.rand(inner, **options) + 0.5, 1e-5)
    before = x.clone()
    if fused == "plain":
        total, found = few_rows(x, weight, b)
        wanted_total, wanted = before, TorchOps().linear(x, weight, b)
    else:
        added = None if fused == "norm" else delta
        total, found = few_rows(x, weight, b, delta=added, norm=(norm.weight, norm.eps), swiglu=swiglu)
        compute = TorchOps().norm_swiglu if swiglu else TorchOps().norm_linear
        wanted_total, wanted = compute(before, added, norm, weight, b)
    assert torch.equal(total, wanted_total)
    assert torch.equal(x, before), "the argument was changed"
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_into_a_tensor_that_is_given() -> None:
    x, weight = torch.randn(2, 64, device=DEVICE), torch.randn(9, 64, device=DEVICE)
    out = torch.full((5, 9), 7.0, device=DEVICE)
    few_rows(x, weight, None, out=out[:2])
    torch.testing.assert_close(out[:2], x @ weight.T, atol=1e-4, rtol=1e-4)
    assert (out[2:] == 7).all()
