"""Matrix product whose every row is the same, bit for bit, whatever the other rows are and however many.

Libraries choose tile shapes and splits of the inner dimension by the number of rows, so that a token's result depends
on its batch. Here tiles are fixed by the dtype and the weight's shape, an element is one sum over the inner dimension
in one order, and no two programs share one ("Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025).

The reference is ``torch.nn.functional.linear``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])  # one kernel for any number of rows
def _matmul(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of rows that share columns of the weight while these are in the L2 cache
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = program // (GROUP * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = program % (GROUP * tiles_n)
    row = (group * GROUP + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        in_x = (row < rows)[:, None]
        in_weight = (column < N)[None, :]
        if K % BLOCK_K != 0:
            in_x = in_x & (start + k < K)[None, :]
            in_weight = in_weight & (start + k < K)[:, None]
        x = tl.load(x_ptrs, mask=in_x, other=0.0)
        weight = tl.load(weight_ptrs, mask=in_weight, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < N)[None, :])


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out] -> [rows, out], summed in float32; into ``out``
    if it is given.

    All contiguous and of one dtype: float32 (multiplied as such, not as tf32), bfloat16 or float16.
    """
    rows, inner = x.shape
    columns = len(weight)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    block_m, block_k = (64, 32) if wide else (64, 64)
    block_n = 64 if wide or columns <= 2048 else 128  # a narrow weight has few tiles to spread a decode step over
    if rows:
        _matmul[(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)](
            x,
            weight,
            out if bias is None else bias,
            out,
            rows,
            N=columns,
            K=inner,
            BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=8,
            STAGES=2 if wide else 4,
            num_warps=4,
        )
    return out
