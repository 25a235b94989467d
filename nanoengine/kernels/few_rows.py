"""Products of a few rows with a weight, at the speed of memory: with the norm before them, or the activation after.

At one to four rows only the weight's bytes count. Library kernels are made for larger products: at one row they take 6
to 13 us for matrices of 4 to 12 MB, which memory gives in 1 to 3. Here a program takes a few of the weight's rows over
their whole length, without tensor cores, and begins to read them before the kernels before it are done
(``dependent.py``). What comes before, the addition and the RMSNorm, is so little at few rows that every program does it
for itself, which saves a kernel; so does SwiGLU where the program holds the rows of gate and up that belong together.

Rounding is that of the kernels apart: the sum, the normalised rows, the product and silu are each rounded to the
model's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.dependent import options, start_next, wait

FEW = 4
"""Most rows that this is for. From 5 on tensor cores win: at 8 rows cuBLAS is as fast."""

_BLOCK_K = 4096
_ELEMENTS = 16384  # of the weight in a program's registers: 64 a thread
_PROGRAMS = 256


@triton.jit
def _added(x_ptr, delta_ptr, at, in_k, dtype: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + at, mask=in_k, other=0.0).to(tl.float32)
    if ADD:
        x = (x + tl.load(delta_ptr + at, mask=in_k, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return x


@triton.jit
def _few_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    delta_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    eps,
    rows,
    N,
    K,
    ROWS: tl.constexpr,  # a power of two, at least rows; those beyond are computed from the last and not stored
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SWIGLU: tl.constexpr,  # the weight has 2 N rows: gate, then up
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    k = tl.arange(0, BLOCK_K)
    lane = tl.arange(0, ROWS)
    first_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    second_ptr = first_ptr + N.to(tl.int64) * K
    # Before the wait: weights do not change.
    in_k = k < K
    inside = in_n[:, None] & in_k[None, :]
    w_1 = tl.load(first_ptr + k[None, :], mask=inside, other=0.0)
    if SWIGLU:
        w_2 = tl.load(second_ptr + k[None, :], mask=inside, other=0.0)
    wait(PDL)

    scale = tl.zeros((ROWS,), tl.float32)
    if NORM:
        for start in range(0, K, BLOCK_K):
            in_k = start + k < K
            for r in tl.static_range(ROWS):
                at = tl.minimum(r, rows - 1) * K + start + k
                x = _added(x_ptr, delta_ptr, at, in_k, dtype, ADD)
                scale += tl.where(lane == r, tl.sum(x * x), 0.0)
                if ADD:
                    tl.store(sum_ptr + at, x.to(dtype), mask=in_k & (tl.program_id(0) == 0))
        scale = tl.rsqrt(scale / K + eps)

    out_1 = tl.zeros((ROWS, BLOCK_N), tl.float32)
    out_2 = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_k = start + k < K
        if start > 0:
            inside = in_n[:, None] & in_k[None, :]
            w_1 = tl.load(first_ptr + start + k[None, :], mask=inside, other=0.0)
            if SWIGLU:
                w_2 = tl.load(second_ptr + start + k[None, :], mask=inside, other=0.0)
        for r in tl.static_range(ROWS):
            x = _added(x_ptr, delta_ptr, tl.minimum(r, rows - 1) * K + start + k, in_k, dtype, ADD)
            if NORM:
                weight = tl.load(norm_ptr + start + k, mask=in_k, other=0.0).to(tl.float32)
                x *= tl.sum(tl.where(lane == r, scale, 0.0))
                x = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
            mine = lane[:, None] == r
            out_1 += tl.where(mine, tl.sum(x[None, :] * w_1.to(tl.float32), axis=1)[None, :], 0.0)
            if SWIGLU:
                out_2 += tl.where(mine, tl.sum(x[None, :] * w_2.to(tl.float32), axis=1)[None, :], 0.0)

    if BIAS:
        out_1 += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        if BIAS:
            out_2 += tl.load(bias_ptr + N + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        gate = out_1.to(dtype).to(tl.float32)
        up = out_2.to(dtype).to(tl.float32)
        out_1 = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    mask = (lane < rows)[:, None] & in_n[None, :]
    tl.store(out_ptr + lane[:, None] * N + n[None, :], out_1.to(dtype), mask=mask)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    delta: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, product), for x [rows, K] of 1 to ``FEW`` rows and weight [N, K], or [2 N, K] with ``swiglu``.

    With ``norm`` (weight [K] and eps) the RMSNorm of x + delta is multiplied; without it there is no ``delta``. The
    product, plus bias, is [rows, N], into ``out`` if that is given; ``swiglu`` makes silu of its first half times the
    second. All contiguous, of one dtype: float32, bfloat16 or float16.
    """
    rows, inner = x.shape
    columns = len(weight) // 2 if swiglu else len(weight)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    block_k = min(_BLOCK_K, triton.next_power_of_2(inner))
    # All that a program reads, or at least its first part, is under way before it waits. So programs are as large as
    # registers allow, but for that there are some for each processor.
    block_n = _ELEMENTS // block_k // (2 if swiglu else 1)
    while block_n > 1 and columns < block_n * _PROGRAMS:
        block_n //= 2
    _few_rows[(triton.cdiv(columns, block_n),)](
        x,
        x if delta is None else delta,
        norm_weight,
        weight,
        x if bias is None else bias,
        total,
        out,
        eps,
        rows,
        columns,
        inner,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        ADD=delta is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        num_warps=8,
        **options(x.device),
    )
    return total, out
