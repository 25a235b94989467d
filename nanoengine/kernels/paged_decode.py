"""Paged decode attention in Triton, and its reference in torch.

One query token a row. A program takes one piece of a row's context, as the plan of attention/decode_plan.py says, and
one key-value head; the query heads that share it are packed into one tile, so that keys and values are read once for
all of them. A second kernel merges the pieces of a row by their log-sum-exp (Flash-Decoding, Dao et al., 2023), and
with them those of a prefix that rows have read together (kernels/shared_prefix_decode.py).
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

_FEW_ROWS = 8
"""Up to so many rows tiles are half as long: pieces are short then, and waiting for the first tile is most of it."""


@triton.jit(do_not_specialize=["table_stride", "entries"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    out_ptr,
    parts_ptr,  # float32: outputs [entries, heads, dim], then log2 of the sums of weights [entries, heads]
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    entries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    TILE: tl.constexpr,  # tokens of one turn of the loop
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    head = tl.program_id(0)
    items_ptr += tl.program_id(1) * 4
    row = tl.load(items_ptr).to(tl.int64)
    begin = tl.load(items_ptr + 1)
    end = tl.load(items_ptr + 2)
    piece = tl.load(items_ptr + 3)
    if begin >= end:
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_q = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    heads = head * GROUP + group
    q_at = (row * KV_HEADS * GROUP + heads[:, None]) * DIM + dims[None, :]
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
    else:
        part = piece.to(tl.int64) * KV_HEADS * GROUP + heads
        tl.store(parts_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
        lse_ptr = parts_ptr + entries.to(tl.int64) * KV_HEADS * GROUP * DIM
        tl.store(lse_ptr + part, lse, mask=group < GROUP)


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
        lse = tl.load(lse_ptr + part, mask=number < count, other=float("-inf"))
        parts = tl.load(
            parts_ptr + part[:, None] * DIM + dims[None, :],
            mask=(number[:, None] < count) & (dims[None, :] < DIM),
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(lse, 0))
        decay = tl.exp2(best - new_best)
        weights = tl.exp2(lse - new_best)
        total = total * decay + tl.sum(weights, 0)
        out = out * decay + tl.sum(parts * weights[:, None], 0)
        best = new_best
    return best, total, out


@triton.jit(do_not_specialize=["own", "entries", "size", "max_rows"])
def _merge(  # type: ignore[no-untyped-def]
    parts_ptr,
    rows_ptr,  # int32 [2, size], as of DecodePlanner
    shared_ptr,  # int32 [5, max_rows], as of PrefixPlan.rows
    out_ptr,
    own,
    entries,
    size,
    max_rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SHARED: tl.constexpr,  # whether rows may share a prefix
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pieces = tl.load(rows_ptr + size + row)
    if pieces == 0:
        return

    first = tl.load(rows_ptr + row).to(tl.int64)
    lse_ptr = parts_ptr + entries.to(tl.int64) * HEADS * DIM
    best = tl.max(tl.full((CHUNK,), float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
    out = tl.zeros((DIM_PAD,), tl.float32)
    best, total, out = _add(best, total, out, parts_ptr, lse_ptr, first, 1, pieces, head, HEADS, DIM, DIM_PAD, CHUNK)
    if SHARED:
        shared_pieces = tl.load(shared_ptr + 3 * max_rows + row)
        first = own + tl.load(shared_ptr + 2 * max_rows + row).to(tl.int64)
        step = tl.load(shared_ptr + 4 * max_rows + row)
        best, total, out = _add(
            best, total, out, parts_ptr, lse_ptr, first, step, shared_pieces, head, HEADS, DIM, DIM_PAD, CHUNK
        )
    dims = tl.arange(0, DIM_PAD)
    at = (row * HEADS + head) * DIM + dims
    tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), mask=dims < DIM)


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, work: DecodeWork, *, scale: float) -> Tensor:
    """Attention of one token a row: q [rows, heads, dim] over pages [blocks, block_size, kv_heads, dim].

    ``table`` is int32 [rows, width]; ``work`` says who reads what of it (each row's own token included, already
    stored); rows without an item come out as they may. float32, bfloat16 or float16; pages are of q's dtype or
    float8_e4m3fn (as they are, without a scale). Returns q's shape and dtype.
    """
    rows, heads, dim = q.shape
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
    # Tiles of 64 KiB of keys and values: two stages of them fit the shared memory of an A100 and what came after it.
    tile = min(64 if rows <= _FEW_ROWS else 128, max(16, 16384 // (dim_pad * q.element_size() // 2)))
    dependent = options(q.device)
    _decode[(kv_heads, len(work.items))](
        q,
        keys,
        values,
        table,
        work.items,
        out,
        parts,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        entries,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        TILE=tile,
        STAGES=2,
        num_warps=4,
        **dependent,
    )
    _merge[(rows, heads)](
        parts,
        work.rows,
        work.rows if shared is None else shared.rows,
        out,
        own,
        entries,
        work.rows.shape[1],
        0 if shared is None else shared.rows.shape[1],
        HEADS=heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        SHARED=shared is not None,
        CHUNK=32,
        num_warps=4,
        **dependent,
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
