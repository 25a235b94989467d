"""Paged decode attention in Triton, and its reference in torch.

One query token a row. A program takes one piece of a row's context, as the plan of attention/decode_plan.py says, and
one key-value head; the query heads that share it are packed into one tile, so that keys and values are read once for
all of them. The program that is the last of a row to be done merges its pieces by their log-sum-exp (Flash-Decoding,
Dao et al., 2023), and with them those of a prefix that rows have read together (kernels/shared_prefix_decode.py): a
kernel of its own for that took 15 to 20 us a layer at 256 rows, of which few are divided.
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

_MANY_ROWS = 384
"""From so many rows on tiles are small and two of them under way, which suits short rows; below, rows may be long.

In TB/s on an H200, for (tile, stages) of (128, 2), (64, 5) and (32, 5): 1,024 rows of 128 to 256 tokens 3.70, 3.50,
3.95; 256 of 200 to 1,400 4.15, 4.14, 4.17; 64 of 8k 4.33, 4.30, 3.97; 64 of 620 2.89, 2.61, 2.63. Two tiles under way
take 5 stages, as addresses come from the block table, which is loaded too."""


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    best,
    total,
    out,
    parts_ptr,
    lse_ptr,
    first_entry,
    step,
    count,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CHUNK: tl.constexpr,  # parts taken at a time
):
    """Add ``count`` parts to the running maximum, total and output of one row and head."""
    dims = tl.arange(0, DIM_PAD)
    for start in range(0, count, CHUNK):
        number = start + tl.arange(0, CHUNK)
        part = (first_entry + number * step) * HEADS + head
        # Past the first-level cache, which may hold what was there before another processor wrote it.
        lse = tl.load(lse_ptr + part, mask=number < count, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            parts_ptr + part[:, None] * DIM + dims[None, :],
            mask=(number[:, None] < count) & (dims[None, :] < DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(lse, 0))
        decay = tl.exp2(best - new_best)
        weights = tl.exp2(lse - new_best)
        total = total * decay + tl.sum(weights, 0)
        out = out * decay + tl.sum(parts * weights[:, None], 0)
        best = new_best
    return best, total, out


@triton.jit(do_not_specialize=["table_stride", "own", "entries", "size", "max_rows"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,  # int32 [items, 4] and
    rows_ptr,  # int32 [2, size], as of DecodePlanner
    shared_ptr,  # int32 [5, max_rows], as of PrefixPlan.rows
    done_ptr,  # int32 [rows, KV_HEADS]: pieces of a row that are done; 0 before and after
    out_ptr,
    parts_ptr,  # float32: outputs [entries, heads, dim], then log2 of the sums of weights [entries, heads]
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    own,  # entries of parts before those of shared prefixes
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
    wait(PDL)
    if begin >= end:
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_q = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    heads = head * GROUP + group
    q_at = (row * HEADS + heads[:, None]) * DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
    out, lse = attend_span(
        q,
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
        GROUP_PAD,
        TILE,
        STAGES,
    )
    if piece < 0:
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)
        return

    part = piece.to(tl.int64) * HEADS + heads
    tl.store(parts_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
    lse_ptr = parts_ptr + entries.to(tl.int64) * HEADS * DIM
    tl.store(lse_ptr + part, lse, mask=group < GROUP)
    pieces = tl.load(rows_ptr + size + row)
    done_ptr += row * KV_HEADS + head
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == pieces - 1:
        # The last of its row, whichever that is, merges; always in the same order.
        tl.store(done_ptr, 0)
        first = tl.load(rows_ptr + row).to(tl.int64)
        for member in tl.static_range(GROUP):
            mine = head * GROUP + member
            best = tl.max(tl.full((CHUNK,), float("-inf"), tl.float32), 0)
            total = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
            merged = tl.zeros((DIM_PAD,), tl.float32)
            best, total, merged = _add(
                best, total, merged, parts_ptr, lse_ptr, first, 1, pieces, mine, HEADS, DIM, DIM_PAD, CHUNK
            )
            if SHARED:
                others = tl.load(shared_ptr + 3 * max_rows + row)
                entry = own + tl.load(shared_ptr + 2 * max_rows + row).to(tl.int64)
                step = tl.load(shared_ptr + 4 * max_rows + row)
                best, total, merged = _add(
                    best, total, merged, parts_ptr, lse_ptr, entry, step, others, mine, HEADS, DIM, DIM_PAD, CHUNK
                )
            at = (row * HEADS + mine) * DIM + dims
            tl.store(out_ptr + at, (merged / total).to(out_ptr.dtype.element_ty), mask=dims < DIM)


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
    own = entries = len(work.items)  # no piece has more than one part
    shared = work.shared
    if shared is not None:
        entries += shared.parts
    parts = torch.empty(entries * heads * (dim + 1), dtype=torch.float32, device=q.device)
    if shared is not None:
        attend_prefixes(q, keys, values, table, shared, parts, scale=scale, first_entry=own, entries=entries)
    dim_pad = max(16, triton.next_power_of_2(dim))  # 16: the least that a tensor core multiplies, in rows and columns
    # float32, which no tensor core multiplies as it is, goes through registers, which hold less.
    largest, stages = (32, 5) if len(q) >= _MANY_ROWS else (128, 2)
    tile = max(16, min(largest, (largest * 128 if q.element_size() == 2 else 4096) // dim_pad))
    _decode[(kv_heads, len(work.items))](
        q,
        keys,
        values,
        table,
        work.items,
        work.rows,
        work.rows if shared is None else shared.rows,
        work.done,
        out,
        parts,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        own,
        entries,
        work.rows.shape[1],
        0 if shared is None else shared.rows.shape[1],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        SHARED=shared is not None,
        TILE=tile,
        STAGES=stages,
        CHUNK=16,
        num_warps=4,
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
