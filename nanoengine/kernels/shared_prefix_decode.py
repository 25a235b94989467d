"""The shared part of paged decode attention: rows with a common prefix of blocks attend to it together.

A program takes one key-value head, up to 64 pairs of a row and a query head, and one stretch of the prefix, as the plan
of attention/shared_prefix.py says; the plan lies on the device, so a CUDA graph captured with room for any plan takes
whatever is in its buffers. ``paged_decode`` merges the partial results with those of each row's own tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.attention.base import SharedPrefixes
from nanoengine.attention.shared_prefix import rows_together
from nanoengine.kernels.attend_span import LOG2E, attend_span


@triton.jit(do_not_specialize=["table_stride", "first_entry", "entries"])
def _attend_prefixes(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    members_ptr,
    parts_ptr,  # as of paged_decode
    scale_log2,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    first_entry,
    entries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key-value head
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    LANES: tl.constexpr,
    TILE: tl.constexpr,  # tokens of one turn of the loop
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    items_ptr += tl.program_id(1) * 5
    members = tl.load(items_ptr + 1)
    if members == 0:
        return

    members_ptr += tl.load(items_ptr)
    lane = tl.arange(0, LANES)
    member = lane // GROUP
    in_item = member < members
    row = tl.load(members_ptr + member, mask=in_item, other=0).to(tl.int64)
    heads = head * GROUP + lane % GROUP
    dims = tl.arange(0, DIM_PAD)
    in_q = in_item[:, None] & (dims[None, :] < DIM)
    q_at = (row * KV_HEADS * GROUP + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
    out, lse = attend_span(
        q,
        k_ptr,
        v_ptr,
        table_ptr + tl.load(members_ptr).to(tl.int64) * table_stride,
        tl.load(items_ptr + 2),
        tl.load(items_ptr + 3),
        head,
        scale_log2,
        kv_block_stride,
        kv_token_stride,
        DIM,
        DIM_PAD,
        BLOCK,
        LANES,
        TILE,
        STAGES,
    )
    entry = (first_entry + tl.load(items_ptr + 4) + member).to(tl.int64)
    part = entry * KV_HEADS * GROUP + heads
    tl.store(parts_ptr + part[:, None] * DIM + dims[None, :], out, mask=in_q)
    lse_ptr = parts_ptr + entries.to(tl.int64) * KV_HEADS * GROUP * DIM
    tl.store(lse_ptr + part, lse, mask=in_item)


def attend_prefixes(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    shared: SharedPrefixes,
    parts: Tensor,
    *,
    scale: float,
    first_entry: int,
    entries: int,
) -> None:
    """Write the partial results of all groups into ``parts``, from ``first_entry`` of its ``entries`` on.

    Other arguments as of ``paged_decode``.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    dim_pad = max(16, triton.next_power_of_2(dim))
    tile = 64 if q.element_size() == 2 and dim_pad <= 128 else 32 if q.element_size() == 2 else 16
    _attend_prefixes[(kv_heads, len(shared.items))](
        q,
        keys,
        values,
        table,
        shared.items,
        shared.rows,
        parts,
        scale * LOG2E,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        first_entry,
        entries,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        LANES=max(16, triton.next_power_of_2(rows_together(group) * group)),
        TILE=tile,
        STAGES=3,
        num_warps=4 if dim_pad <= 128 else 8,
    )
