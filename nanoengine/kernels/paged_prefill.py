"""Paged prefill attention in Triton: causal attention of many queries a row over pages of any size.

A program takes a tile of lanes of one row and one key-value head, a lane being one query token under one query head:
the heads that share keys and values share the reading of them, whatever their number. It reads the row's keys in tiles
counted from position 0, those that all its lanes see without a mask, and keeps a running softmax (FlashAttention-2,
Dao, 2023).

The grid follows from the number of tokens and rows alone: row i's tiles begin at ``query_start[i] * group // LANES +
i`` of it, which leaves room for all of them, and a program finds its row by bisection on the device. Nothing about the
lengths needs to be known on the host.

Bits: what a lane adds up, and in which order, depends on its own position only. Tiles of keys lie at multiples of their
size; a tile that a lane must not see leaves its numbers as they are (its weights are 0, its decay is 1); masked and
unmasked tiles go through the same instructions. So a token's output is the same whether its prompt came whole, in
chunks, or one token at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.attend_span import LOG2E


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    q,
    best,
    total,
    out,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,  # of these tiles
    stop,  # no position from here on is read
    position,
    head,
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the tiles of keys and values in [begin, end) into a running softmax: its new maximum, total and output."""
    dims = tl.arange(0, DIM_PAD)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        if MASKED:
            block = tl.load(table_ptr + at // BLOCK, mask=at < stop, other=0)
        else:
            block = tl.load(table_ptr + at // BLOCK)
        where = block.to(tl.int64) * kv_block_stride + (at % BLOCK) * kv_token_stride + head * DIM
        if MASKED:
            in_kv = (at < stop)[:, None] & (dims[None, :] < DIM)
            k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0)
            v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0)
        elif DIM < DIM_PAD:
            k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=dims[None, :] < DIM, other=0.0)
            v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=dims[None, :] < DIM, other=0.0)
        else:
            k = tl.load(k_ptr + where[:, None] + dims[None, :])
            v = tl.load(v_ptr + where[:, None] + dims[None, :])
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
        # A lane that has seen nothing yet has the maximum -inf, and -inf - -inf is no number.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        # The multiply-add is written out: left to the compiler, it might be fused in one of the two loops only.
        weights = tl.exp2(tl.fma(scores, scale_log2, -shift[:, None]))
        decay = tl.exp2(best - shift)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        out = tl.dot(weights.to(q.dtype), v.to(q.dtype), out * decay[:, None], input_precision="ieee")
        best = new_best
    return best, total, out


@triton.jit(do_not_specialize=["table_stride", "first_row", "rows"])
def _prefill(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    first_row,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    WINDOW: tl.constexpr,  # 0: full attention
    LANES: tl.constexpr,
    TILE: tl.constexpr,  # tokens of one turn of the loop
    STAGES: tl.constexpr,
):
    # Backwards: the last tiles of a row see most, and what takes longest should start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    starts_ptr += first_row
    base = tl.load(starts_ptr)
    low = first_row * 0
    high = low + rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(starts_ptr + middle) - base) * GROUP // LANES + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    start = tl.load(starts_ptr + low) - base
    queries = tl.load(starts_ptr + low + 1) - base - start
    first_lane = (tile - start * GROUP // LANES - low) * LANES
    if first_lane >= queries * GROUP:
        return

    row = (first_row + low).to(tl.int64)
    past = tl.load(lens_ptr + row) - queries
    lane = first_lane + tl.arange(0, LANES)
    position = past + lane // GROUP
    first = past + first_lane // GROUP
    last = past + tl.minimum((first_lane + LANES - 1) // GROUP, queries - 1)
    dims = tl.arange(0, DIM_PAD)
    token_head = (start + lane // GROUP).to(tl.int64) * KV_HEADS * GROUP + head * GROUP + lane % GROUP
    in_q = (lane < queries * GROUP)[:, None] & (dims[None, :] < DIM)
    q_at = token_head[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)

    best = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    out = tl.zeros((LANES, DIM_PAD), tl.float32)
    table_ptr += row * table_stride
    full = (first + 1) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
        inside = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), TILE) * TILE, last + 1)
        best, total, out = _take(
            q,
            best,
            total,
            out,
            k_ptr,
            v_ptr,
            table_ptr,
            begin,
            inside,
            last + 1,
            position,
            head,
            scale_log2,
            kv_block_stride,
            kv_token_stride,
            DIM,
            DIM_PAD,
            BLOCK,
            WINDOW,
            TILE,
            STAGES,
            True,
        )
        # One tile may hold both ends of the window.
        begin = tl.cdiv(inside, TILE) * TILE
        full = tl.maximum(full, begin)
    else:
        begin = first * 0
    best, total, out = _take(
        q,
        best,
        total,
        out,
        k_ptr,
        v_ptr,
        table_ptr,
        begin,
        full,
        full,
        position,
        head,
        scale_log2,
        kv_block_stride,
        kv_token_stride,
        DIM,
        DIM_PAD,
        BLOCK,
        WINDOW,
        TILE,
        STAGES,
        False,
    )
    best, total, out = _take(
        q,
        best,
        total,
        out,
        k_ptr,
        v_ptr,
        table_ptr,
        full,
        last + 1,
        last + 1,
        position,
        head,
        scale_log2,
        kv_block_stride,
        kv_token_stride,
        DIM,
        DIM_PAD,
        BLOCK,
        WINDOW,
        TILE,
        STAGES,
        True,
    )
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)


def _tiles(element_size: int, dim_pad: int) -> tuple[int, int, int, int]:
    """Lanes, tokens of a tile, stages, warps: the largest that the registers of a Hopper processor hold."""
    if element_size == 4:  # no tensor core multiplies float32 as it is
        return (32, 32, 2, 4) if dim_pad <= 64 else (16, 16, 2, 4 if dim_pad <= 128 else 8)
    if dim_pad <= 64:
        return 128, 128, 3, 8
    # In TFLOP/s for 4 x 8192 tokens on an H200: 396 so, 362 with (128, 64, 5), 320 with (128, 64, 3): the table too is
    # loaded, so that two tiles are under way only where the compiler looks ahead twice as far.
    return (128, 128, 5, 8) if dim_pad <= 128 else (128, 32, 2, 8)


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    query_start: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None,
    first_row: int = 0,
    rows: int,
) -> Tensor:
    """Attention of rows [first_row, first_row + rows) over pages [blocks, block_size, kv_heads, dim].

    ``q`` is [tokens of these rows, heads, dim], the tokens of each row being its last; ``query_start`` int32 [all rows
    + 1] says where they are, counted from wherever the first of all rows begins. ``table`` is int32 [all rows, width],
    ``lens`` int32 [all rows] (this step's tokens included, already stored; a row of length 0 gives zeros). float32,
    bfloat16 or float16; pages are of q's dtype or float8_e4m3fn (without a scale). Returns q's shape and dtype.
    """
    tokens, heads, dim = q.shape
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    q = q.contiguous()
    out = torch.empty_like(q)
    dim_pad = max(16, triton.next_power_of_2(dim))
    lanes, tile, stages, warps = _tiles(q.element_size(), dim_pad)
    _prefill[(tokens * group // lanes + rows, kv_heads)](
        q,
        keys,
        values,
        table,
        query_start,
        lens,
        out,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        first_row,
        rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        WINDOW=window or 0,
        LANES=lanes,
        TILE=tile,
        STAGES=stages,
        num_warps=warps,
    )
    return out
