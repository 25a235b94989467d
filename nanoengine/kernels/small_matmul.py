"""A matrix product of a few rows with a weight: reading the weight once, at the speed of memory.

With so few rows nothing but the weight's bytes counts, and library kernels, made for larger products, read them at a
third of the bandwidth. A program takes a few of the weight's rows over their whole length. Up to four rows of x are
multiplied without tensor cores, straight from registers; more go through ``tl.dot``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _few(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    k = tl.arange(0, BLOCK_K)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    row = tl.arange(0, ROWS)
    out = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = inside[:, None] & (start + k < K)[None, :]
        w = tl.load(weight_ptr + at + start, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * K + start + k[None, :], mask=(start + k < K)[None, :], other=0.0)
        out += tl.sum(x.to(tl.float32)[:, None, :] * w[None, :, :], axis=2)
    if BIAS:
        out += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _several(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    there = row < rows
    out = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        in_k = start + k < K
        w = tl.load(
            weight_ptr + n.to(tl.int64)[:, None] * K + start + k[None, :],
            mask=inside[:, None] & in_k[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row[:, None] * K + start + k[None, :], mask=there[:, None] & in_k[None, :], other=0.0)
        out = tl.dot(x, tl.trans(w), out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    mask = there[:, None] & inside[None, :]
    tl.store(out_ptr + row[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
