"""What decode kernels share: attention of a few lanes to one stretch of a row's pages, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
"""The kernels take powers of 2, which the hardware has; scores are scaled by this."""


@triton.jit
def attend_span(  # type: ignore[no-untyped-def]
    q,
    best,
    total,
    out,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    head,
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of q [lanes, DIM_PAD] to positions [begin, end) of the row whose block table is at ``table_ptr``.

    It goes on from a state: the largest score so far, the sum of weights relative to it, and the weighted values (-inf,
    0, 0 before any). Returns its output, normalised, and the log2 of the sum of its weights; 0 and -inf of an empty
    span.
    """
    dims = tl.arange(0, DIM_PAD)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        seen = at < end
        block = tl.load(table_ptr + at // BLOCK, mask=seen, other=0)
        # 64 bits: a pool of few layers on a large card has more than 2^31 elements in one layer.
        where = block.to(tl.int64) * kv_block_stride + (at % BLOCK) * kv_token_stride + head * DIM
        in_kv = seen[:, None] & (dims[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0).to(q.dtype)
        out = out * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best
    lse = best + tl.log2(total)
    return out / tl.where(total > 0, total, 1.0)[:, None], lse
