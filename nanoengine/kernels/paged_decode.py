"""Paged decode attention in Triton, and its reference in torch.

One query token a row. A program takes one row, one key-value head and one stretch of the context; the query heads that
share the key-value head are packed into one tile, so that keys and values are read once for all of them, and a second
kernel merges the stretches by their log-sum-exp (Flash-Decoding, Dao et al., 2023).

Decoding is bound by reading keys and values. On one H200 (reads at most 4.43 TB/s) this reads them at, in TB/s: 4.01
for 256 rows of 200 to 1,400 tokens, 4.33 for 64 of 8k, 4.00 for 1,024 of 128 to 256 (16 query and 8 key-value heads of
128, bfloat16, blocks of 16; blocks of 32 are no faster); 1 row of 2k takes 14 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    WINDOW: tl.constexpr,  # 0: full attention
    TILE: tl.constexpr,  # tokens of one turn of the loop
    SPLIT: tl.constexpr,  # tokens of one program
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin = first + split * SPLIT
    if begin >= length:
        return
    end = tl.minimum(begin + SPLIT, length)

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_q = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    heads = head * GROUP + group
    q_at = (row * KV_HEADS * GROUP + heads[:, None]) * DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    out = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        seen = at < end
        block = tl.load(table_ptr + row * table_stride + at // BLOCK, mask=seen, other=0)
        # 64 bits: a pool of few layers on a large card has more than 2^31 elements in one layer.
        where = block.to(tl.int64) * kv_block_stride + (at % BLOCK) * kv_token_stride + head * DIM
        in_kv = seen[:, None] & (dims[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=in_kv, other=0.0)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    out = out / total[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)
    else:
        part = (row * SPLITS + split) * KV_HEADS * GROUP + heads
        tl.store(out_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=group < GROUP)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    parts_ptr,
    lse_ptr,
    lens_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lens_ptr + row)
    seen = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    split = tl.arange(0, SPLITS_PAD)
    used = split < tl.cdiv(seen, SPLIT)
    dims = tl.arange(0, DIM_PAD)
    part = (row * SPLITS + split) * HEADS + head
    lse = tl.load(lse_ptr + part, mask=used, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    in_part = used[:, None] & (dims[None, :] < DIM)
    parts = tl.load(parts_ptr + part[:, None] * DIM + dims[None, :], mask=in_part, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + (row * HEADS + head) * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DIM)


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
) -> Tensor:
    """Attention of one token a row: q [rows, heads, dim] over pages [blocks, block_size, kv_heads, dim].

    ``table`` is int32 [rows, width], ``lens`` int32 [rows] (the row's own token included, already stored), ``longest``
    at least their maximum. float32, bfloat16 or float16, all three alike; returns q's shape and dtype.
    """
    rows, heads, dim = q.shape
    block_size, kv_heads = keys.shape[1:3]
    # Few rows need more splits to reach every processor; many have enough programs, and each split costs a merge.
    split = 256 if rows * kv_heads < 64 else 512
    splits = triton.cdiv(longest if window is None else min(longest, window), split)
    q = q.contiguous()
    out = torch.empty_like(q)
    if splits > 1:
        parts = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    else:
        parts = lse = out
    shape = {
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "WINDOW": window or 0,
        "SPLIT": split,
        "SPLITS": splits,
    }
    # Tiles of 64 KiB of keys and values: two stages of them fit the shared memory of an A100 and what came after it.
    tile = max(16, 16384 // (triton.next_power_of_2(dim) * q.element_size() // 2))
    _decode[(kv_heads, splits, rows)](
        q,
        keys,
        values,
        table,
        lens,
        parts,
        lse,
        scale * _LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),  # 16: the fewest rows of a tensor core's tile
        BLOCK=block_size,
        TILE=min(128, tile),
        STAGES=2,
        num_warps=4,
        **shape,
    )
    if splits > 1:
        _merge[(rows, heads)](
            parts, lse, lens, out, HEADS=heads, SPLITS_PAD=triton.next_power_of_2(splits), num_warps=2, **shape
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
