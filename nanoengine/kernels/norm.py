"""Addition and RMSNorm (arXiv 1910.07467) in one pass over memory.

The reference is ``TorchOps.add_rms_norm``, and the rounding steps are its: the sum is rounded to x's dtype before it is
normalised, the normalised value before it meets the weight. Only the order of the sum of squares differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.dependent import options, start_next, wait


@triton.jit(do_not_specialize=["rows"])  # one kernel for any number of rows: a row's result never depends on it
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    dtype = x_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = (x + delta).to(dtype).to(tl.float32)
        tl.store(x_ptr + at, x.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + EPS)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (normed * weight[None, :]).to(dtype), mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x += delta in place (None: nothing to add); returns the RMSNorm of the sum.

    x and delta are [rows, size], contiguous, of one dtype: float32, bfloat16 or float16; weight is [size].
    """
    rows, size = x.shape
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    group = max(1, 1024 // block)  # rows of a few hundred share a program
    if rows:
        _add_rms_norm[(triton.cdiv(rows, group),)](
            x,
            x if delta is None else delta,
            weight,
            out,
            rows,
            SIZE=size,
            BLOCK=block,
            ROWS=group,
            EPS=eps,
            ADD=delta is not None,
            num_warps=min(8, max(4, block // 256)),  # 256: one load of 16 bytes a thread
            **options(x.device),
        )
    return out
