"""The shared part of paged decode attention: rows with a common prefix of blocks attend to it together.

A program takes one key-value head, up to 64 pairs of a row and a query head, and one stretch of the prefix, as the plan
of attention/shared_prefix.py says; the plan lies on the device, so a CUDA graph captured with room for any plan takes
whatever is in its buffers. The program that is the last of its rows to be done merges their stretches by log-sum-exp,
so ``paged_decode`` finds one state for each row, from which it goes on with the row's own tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.attention.base import SharedPrefixes
from nanoengine.attention.shared_prefix import rows_together
from nanoengine.kernels.attend_span import LOG2E, attend_span
from nanoengine.kernels.dependent import options, start_next, wait


@triton.jit(do_not_specialize=["table_stride", "parts", "max_rows"])
def _attend_prefixes(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,  # int32 [items, 5] and
    rows_ptr,  # int32 [5, max_rows], as of PrefixPlan
    done_ptr,  # int32 [rows, KV_HEADS]: stretches of a group that are done, at its first row; 0 before and after
    parts_ptr,  # float32: outputs [parts, heads, dim], then log2 of the sums of weights [parts, heads]
    out_ptr,  # float32: the same, of rows in place of parts
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    parts,
    max_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    LANES: tl.constexpr,
    TILE: tl.constexpr,  # tokens of one turn of the loop
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0)
    # Before the wait: the plan was there before the step began.
    items_ptr += tl.program_id(1) * 5
    members_ptr = rows_ptr + tl.load(items_ptr)
    members = tl.load(items_ptr + 1)
    begin = tl.load(items_ptr + 2)
    end = tl.load(items_ptr + 3)
    piece = tl.load(items_ptr + 4)
    first_row = tl.load(members_ptr)
    pieces = tl.load(rows_ptr + 3 * max_rows + first_row)
    wait(PDL)
    if members == 0:
        return

    lane = tl.arange(0, LANES)
    member = lane // GROUP
    in_item = member < members
    row = tl.load(members_ptr + member, mask=in_item, other=0).to(tl.int64)
    heads = head * GROUP + lane % GROUP
    dims = tl.arange(0, DIM_PAD)
    in_q = in_item[:, None] & (dims[None, :] < DIM)
    own = row * HEADS + heads
    q = tl.load(q_ptr + own[:, None] * DIM + dims[None, :], mask=in_q, other=0.0)
    nothing = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.float32)
    out, lse = attend_span(
        q,
        nothing[0],
        nothing[1],
        tl.zeros((LANES, DIM_PAD), tl.float32),
        k_ptr,
        v_ptr,
        table_ptr + first_row.to(tl.int64) * table_stride,
        begin,
        end,
        head,
        scale_log2,
        kv_block_stride,
        kv_token_stride,
        DIM,
        DIM_PAD,
        BLOCK,
        TILE,
        STAGES,
    )
    out_lse_ptr = out_ptr + max_rows.to(tl.int64) * HEADS * DIM
    if pieces == 1:
        tl.store(out_ptr + own[:, None] * DIM + dims[None, :], out, mask=in_q)
        tl.store(out_lse_ptr + own, lse, mask=in_item)
        return

    lse_ptr = parts_ptr + parts.to(tl.int64) * HEADS * DIM
    part = (piece + member).to(tl.int64) * HEADS + heads
    tl.store(parts_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
    tl.store(lse_ptr + part, lse, mask=in_item)
    done_ptr += first_row.to(tl.int64) * KV_HEADS + head
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == pieces - 1:
        tl.store(done_ptr, 0)
        part = (tl.load(rows_ptr + 2 * max_rows + first_row) + member).to(tl.int64) * HEADS + heads
        step = tl.load(rows_ptr + 4 * max_rows + first_row).to(tl.int64) * HEADS
        best, total = nothing
        out = tl.zeros((LANES, DIM_PAD), tl.float32)
        for _ in range(pieces):
            # Past the first-level cache, which may hold what was there before another processor wrote it.
            lse = tl.load(lse_ptr + part, mask=in_item, other=0.0, cache_modifier=".cg")
            at = parts_ptr + part[:, None] * DIM + dims[None, :]
            new_best = tl.maximum(best, lse)
            decay = tl.exp2(best - new_best)
            weight = tl.exp2(lse - new_best)
            total = total * decay + weight
            out = out * decay[:, None] + weight[:, None] * tl.load(at, mask=in_q, other=0.0, cache_modifier=".cg")
            best = new_best
            part += step
        tl.store(out_ptr + own[:, None] * DIM + dims[None, :], out / total[:, None], mask=in_q)
        tl.store(out_lse_ptr + own, best + tl.log2(total), mask=in_item)


def attend_prefixes(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, shared: SharedPrefixes, done: Tensor, *, scale: float
) -> Tensor:
    """What each row that is in a group has found in its prefix, float32: first the outputs, [max_rows, heads, dim] of
    the plan's rows, normalised, then the log2 of the sums of their weights, [max_rows, heads]. Other rows' are unset.

    ``done`` as of ``DecodeWork``, other arguments as of ``paged_decode``.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    group, max_rows = heads // kv_heads, shared.rows.shape[1]
    dim_pad = max(16, triton.next_power_of_2(dim))
    parts, out = (
        torch.empty(entries * heads * (dim + 1), dtype=torch.float32, device=q.device)
        for entries in (shared.parts, max_rows)
    )
    tile = 64 if q.element_size() == 2 and dim_pad <= 128 else 32 if q.element_size() == 2 else 16
    _attend_prefixes[(kv_heads, len(shared.items))](
        q,
        keys,
        values,
        table,
        shared.items,
        shared.rows,
        done,
        parts,
        out,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        shared.parts,
        max_rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        LANES=max(16, triton.next_power_of_2(rows_together(group) * group)),
        TILE=tile,
        STAGES=5,
        num_warps=4 if dim_pad <= 128 else 8,
        **options(q.device),
    )
    return out
