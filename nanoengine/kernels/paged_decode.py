"""Paged decode attention in Triton, and its reference in torch.

One query token a row. A program takes one row, one key-value head and one stretch of the context; the query heads that
share the key-value head are packed into one tile, so that keys and values are read once for all of them, and a second
kernel merges the stretches by their log-sum-exp (Flash-Decoding, Dao et al., 2023).

The grid follows from sizes that the host knows, and each row divides its own length among its programs on the device:
a CUDA graph captured for the longest context serves short ones, whose spare programs end at once. Where rows share a
prefix (kernels/shared_prefix_decode.py), they divide what comes after it, and the merge takes its parts too.

Decoding is bound by reading keys and values. On one H200 (reads at most 4.43 TB/s) this reads them at, in TB/s: 4.01
for 256 rows of 200 to 1,400 tokens, 4.33 for 64 of 8k, 4.00 for 1,024 of 128 to 256 (16 query and 8 key-value heads of
128, bfloat16, blocks of 16; blocks of 32 are no faster); 1 row of 2k takes 14 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.attention.base import SharedPrefixes
from nanoengine.kernels.attend_span import LOG2E, attend_span
from nanoengine.kernels.shared_prefix_decode import attend_prefixes

_PROGRAMS = 8192
"""Programs of a launch, unless contexts are long: 60 for each processor of an H200, so that ragged rows even out, while
the empty ones of a captured graph still cost little."""

_MAX_SPLITS = 64
"""Programs of one row and head: with 8 heads, 4 for each processor of an H200."""


@triton.jit
def _divided(  # type: ignore[no-untyped-def]
    lens_ptr,
    shared_ptr,
    row,
    splits,
    max_rows,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """How a row divides among its programs: first position, end, tokens of a program, programs, parts of a prefix."""
    length = tl.load(lens_ptr + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    prefix_parts = length * 0
    if SHARED:
        first = tl.load(shared_ptr + max_rows + row)
        prefix_parts = tl.load(shared_ptr + 3 * max_rows + row)
    seen = length - first
    span = tl.maximum(tl.cdiv(tl.cdiv(seen, splits), TILE) * TILE, SPLIT)
    return first, length, span, tl.maximum(tl.cdiv(seen, span), 1), prefix_parts


@triton.jit(do_not_specialize=["table_stride", "splits", "entries", "max_rows"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    shared_ptr,  # int32 [5, max_rows], as of PrefixPlan.rows
    out_ptr,
    parts_ptr,  # float32: outputs [entries, heads, dim], then log2 of the sums of weights [entries, heads]
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    splits,
    entries,
    max_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    WINDOW: tl.constexpr,  # 0: full attention
    SHARED: tl.constexpr,  # whether rows may share a prefix
    TILE: tl.constexpr,  # tokens of one turn of the loop
    SPLIT: tl.constexpr,  # fewest tokens of one program, if the row has more than that
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first, length, span, used, prefix_parts = _divided(
        lens_ptr, shared_ptr, row, splits, max_rows, WINDOW, SHARED, TILE, SPLIT
    )
    if split >= used:
        return

    begin = first + split * span
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
        tl.minimum(begin + span, length),
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
    if used + prefix_parts == 1:
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)
    else:
        part = (row * splits + split) * KV_HEADS * GROUP + heads
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


@triton.jit(do_not_specialize=["splits", "entries", "max_rows"])
def _merge(  # type: ignore[no-untyped-def]
    parts_ptr,
    lens_ptr,
    shared_ptr,
    out_ptr,
    splits,
    entries,
    max_rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _first, _length, _span, used, prefix_parts = _divided(
        lens_ptr, shared_ptr, row, splits, max_rows, WINDOW, SHARED, TILE, SPLIT
    )
    if used + prefix_parts == 1:
        return

    lse_ptr = parts_ptr + entries.to(tl.int64) * HEADS * DIM
    best = tl.max(tl.full((CHUNK,), float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
    out = tl.zeros((DIM_PAD,), tl.float32)
    best, total, out = _add(
        best, total, out, parts_ptr, lse_ptr, row * splits, 1, used, head, HEADS, DIM, DIM_PAD, CHUNK
    )
    if SHARED:
        first_part = tl.num_programs(0) * splits + tl.load(shared_ptr + 2 * max_rows + row).to(tl.int64)
        step = tl.load(shared_ptr + 4 * max_rows + row)
        best, total, out = _add(
            best, total, out, parts_ptr, lse_ptr, first_part, step, prefix_parts, head, HEADS, DIM, DIM_PAD, CHUNK
        )
    dims = tl.arange(0, DIM_PAD)
    at = (row * HEADS + head) * DIM + dims
    tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), mask=dims < DIM)


def num_splits(rows: int, kv_heads: int, longest: int, split: int) -> int:
    """Programs that each row and key-value head get where no row sees more than ``longest`` tokens.

    Enough of them to fill the device at one row, and to keep a long row among many from being its last; few enough
    that those which find nothing to do cost little.
    """
    programs = rows * kv_heads
    most = max(1, _PROGRAMS // programs, min(2 * _PROGRAMS // programs, triton.cdiv(longest, 4096)))
    return min(most, _MAX_SPLITS, max(1, triton.cdiv(longest, split)))


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None,
    longest: int,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Attention of one token a row: q [rows, heads, dim] over pages [blocks, block_size, kv_heads, dim].

    ``table`` is int32 [rows, width], ``lens`` int32 [rows] (the row's own token included, already stored; 0 gives
    zeros), ``longest`` at least their maximum: it sets the grid. float32, bfloat16 or float16; pages are of q's dtype
    or float8_e4m3fn (as they are, without a scale). ``shared`` says which rows read a prefix of their blocks together;
    under a window none do. Returns q's shape and dtype.
    """
    rows, heads, dim = q.shape
    block_size, kv_heads = keys.shape[1:3]
    # Few rows need more splits to reach every processor; many have enough programs, and each split costs a merge.
    split = 256 if rows * kv_heads < 64 else 512
    splits = num_splits(rows, kv_heads, longest if window is None else min(longest, window), split)
    q = q.contiguous()
    out = torch.empty_like(q)
    own, entries = rows * splits, rows * splits
    if window is not None:
        shared = None
    if shared is not None:
        entries += shared.parts
    merges = splits > 1 or shared is not None
    parts = torch.empty(entries * heads * (dim + 1), dtype=torch.float32, device=q.device) if merges else out
    if shared is not None:
        attend_prefixes(q, keys, values, table, shared, parts, scale=scale, first_entry=own, entries=entries)
    dim_pad = max(16, triton.next_power_of_2(dim))  # 16: the least that a tensor core multiplies, in rows and columns
    # Tiles of 64 KiB of keys and values: two stages of them fit the shared memory of an A100 and what came after it.
    tile = min(128, max(16, 16384 // (dim_pad * q.element_size() // 2)))
    shape = {
        "DIM": dim,
        "DIM_PAD": dim_pad,
        "WINDOW": window or 0,
        "SHARED": shared is not None,
        "TILE": tile,
        "SPLIT": split,
    }
    groups, max_rows = (lens, rows) if shared is None else (shared.rows, shared.rows.shape[1])
    _decode[(kv_heads, splits, rows)](
        q,
        keys,
        values,
        table,
        lens,
        groups,
        out,
        parts,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        splits,
        entries,
        max_rows,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=block_size,
        STAGES=2,
        num_warps=4,
        **shape,
    )
    if merges:
        _merge[(rows, heads)](
            parts, lens, groups, out, splits, entries, max_rows, HEADS=heads, CHUNK=32, num_warps=4, **shape
        )
    return out


def paged_decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """The same, one row at a time in float32."""
    out = torch.zeros_like(q)
    group = q.shape[1] // keys.shape[2]
    for row, length in enumerate(lens.tolist()):
        if length == 0:
            continue
        first = 0 if window is None else max(0, length - window)
        k, v = (
            pages[table[row].long()].flatten(0, 1)[first:length].float().repeat_interleave(group, 1)
            for pages in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", q[row].float(), k) * scale
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
