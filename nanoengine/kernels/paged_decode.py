"""Paged decode attention in Triton, and its reference in torch.

One query token a row. A program takes one piece of a row's context, as the plan of attention/decode_plan.py says, and
one key-value head; the query heads that share it are packed into one tile, so that keys and values are read once for
all of them. The program that is the last of a row to be done merges its pieces by their log-sum-exp (Flash-Decoding,
Dao et al., 2023): a kernel of its own for that took 15 to 20 us a layer at 256 rows, of which few are divided. What a
row has in a prefix that rows have read together (kernels/shared_prefix_decode.py) is the state that its first piece
begins with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.attention.base import DecodeWork
from nanoengine.kernels.attend_span import LOG2E, attend_span
from nanoengine.kernels.dependent import options, start_next, wait
from nanoengine.kernels.shared_prefix_decode import attend_prefixes

_TILE, _STAGES, _WARPS = 64, 5, 2
"""Tokens of a turn of the loop, stages, warps. Two tiles are under way while one is computed, as addresses come from
the block table, which is loaded too; with two warps little is exchanged between them.

TB/s on an H200 for (tile, stages, warps) of (64, 5, 2), (32, 7, 1), (64, 5, 4), (128, 2, 4): 256 rows of 200 to 1,400
tokens 4.22, 4.23, 4.03, 3.99; 64 of 8k 4.37, 4.42, 4.27, 4.32; 64 of 620 2.98, 2.93, 2.59, 2.68; us for one row of 600:
7.2, 8.3, 9.0, 9.3."""

_CHUNK = 16  # pieces merged at a time


@triton.jit(do_not_specialize=["table_stride", "entries", "size", "max_rows"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,  # int32 [items, 4] and
    rows_ptr,  # int32 [2, size], as of DecodePlanner
    done_ptr,  # int32 [rows, KV_HEADS]: pieces of a row that are done; 0 before and after
    shared_ptr,  # int32 [5, max_rows], as of PrefixPlan.rows
    prefix_ptr,  # float32, as of attend_prefixes
    out_ptr,
    parts_ptr,  # float32: outputs [entries, heads, dim], then log2 of the sums of weights [entries, heads]
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    entries,
    size,
    max_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    SHARED: tl.constexpr,  # whether rows may share a prefix
    TILE: tl.constexpr,  # tokens of one turn of the loop
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0)
    # Before the wait: the plan was there before the step began.
    items_ptr += tl.program_id(1) * 4
    row = tl.load(items_ptr).to(tl.int64)
    begin = tl.load(items_ptr + 1)
    end = tl.load(items_ptr + 2)
    piece = tl.load(items_ptr + 3)
    if SHARED:
        prefix = tl.load(shared_ptr + max_rows + row)
    wait(PDL)
    if begin >= end:
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_group = group < GROUP
    in_q = in_group[:, None] & (dims[None, :] < DIM)
    heads = row * HEADS + head * GROUP + group
    q_at = heads[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    out = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    if SHARED:
        continues = (prefix > 0) & (begin == prefix)
        lse_ptr = prefix_ptr + max_rows.to(tl.int64) * HEADS * DIM
        best = tl.load(lse_ptr + heads, mask=in_group & continues, other=float("-inf"))
        total = tl.where(in_group & continues, 1.0, 0.0)
        out = tl.load(prefix_ptr + q_at, mask=in_q & continues, other=0.0)
    out, lse = attend_span(
        q,
        best,
        total,
        out,
        k_ptr,
        v_ptr,
        table_ptr + row * table_stride,
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
    if piece < 0:
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)
        return

    lse_ptr = parts_ptr + entries.to(tl.int64) * HEADS * DIM
    part = piece.to(tl.int64) * HEADS + head * GROUP + group
    tl.store(parts_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
    tl.store(lse_ptr + part, lse, mask=in_group)
    pieces = tl.load(rows_ptr + size + row)
    done_ptr += row * KV_HEADS + head
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == pieces - 1:
        # The last of its row, whichever that is, merges; always in the same order.
        tl.store(done_ptr, 0)
        first = tl.load(rows_ptr + row).to(tl.int64)
        for member in tl.static_range(GROUP):
            mine = head * GROUP + member
            most = tl.max(tl.full((CHUNK,), float("-inf"), tl.float32), 0)
            weight = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
            merged = tl.zeros((DIM_PAD,), tl.float32)
            for start in range(0, pieces, CHUNK):
                number = start + tl.arange(0, CHUNK)
                entry = (first + number) * HEADS + mine
                # Past the first-level cache, which may hold what was there before another processor wrote it.
                sums = tl.load(lse_ptr + entry, mask=number < pieces, other=float("-inf"), cache_modifier=".cg")
                outs = tl.load(
                    parts_ptr + entry[:, None] * DIM + dims[None, :],
                    mask=(number[:, None] < pieces) & (dims[None, :] < DIM),
                    other=0.0,
                    cache_modifier=".cg",
                )
                new_most = tl.maximum(most, tl.max(sums, 0))
                decay = tl.exp2(most - new_most)
                weights = tl.exp2(sums - new_most)
                weight = weight * decay + tl.sum(weights, 0)
                merged = merged * decay + tl.sum(outs * weights[:, None], 0)
                most = new_most
            at = (row * HEADS + mine) * DIM + dims
            tl.store(out_ptr + at, (merged / weight).to(out_ptr.dtype.element_ty), mask=dims < DIM)


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, work: DecodeWork, *, scale: float) -> Tensor:
    """Attention of one token a row: q [rows, heads, dim] over pages [blocks, block_size, kv_heads, dim].

    ``table`` is int32 [rows, width]; ``work`` says who reads what of it (each row's own token included, already
    stored); rows without an item come out as they may. float32, bfloat16 or float16; pages are of q's dtype or
    float8_e4m3fn (as they are, without a scale). Returns q's shape and dtype.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    q = q.contiguous()
    out = torch.empty_like(q)
    entries = len(work.items)  # no piece has more than one part
    parts = torch.empty(entries * heads * (dim + 1), dtype=torch.float32, device=q.device)
    shared, rows, prefix, max_rows = work.shared, work.rows, parts, 0
    if shared is not None:
        prefix = attend_prefixes(q, keys, values, table, shared, work.done, scale=scale)
        rows, max_rows = shared.rows, shared.rows.shape[1]
    dim_pad = max(16, triton.next_power_of_2(dim))  # 16: the least that a tensor core multiplies, in rows and columns
    # float32, which no tensor core multiplies as it is, goes through registers, which hold less.
    tile = max(16, min(_TILE, (_TILE * 128 if q.element_size() == 2 else 4096) // dim_pad))
    _decode[(kv_heads, entries)](
        q,
        keys,
        values,
        table,
        work.items,
        work.rows,
        work.done,
        rows,
        prefix,
        out,
        parts,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        entries,
        work.rows.shape[1],
        max_rows,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        SHARED=shared is not None,
        TILE=tile,
        STAGES=_STAGES,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
        **options(q.device),
    )
    return out


def paged_decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """The same, one row at a time in float32."""
    out = torch.empty_like(q)
    group = q.shape[1] // keys.shape[2]
    for row, length in enumerate(lens.tolist()):
        first = 0 if window is None else max(0, length - window)
        k, v = (
            pages[table[row].long()].flatten(0, 1)[first:length].float().repeat_interleave(group, 1)
            for pages in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", q[row].float(), k) * scale
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
