"""Norms of q and k (optional), rotation, and the store of k and v into the pages, in one pass over memory.

The reference is ``TorchOps.rope_and_store``, and the rounding steps are its, so the results are transformers' too: cos
and sin are rounded to the model's dtype, each product is, and so is their sum. Where the compiler fuses a product with
the sum, the last place may differ. With norms, the order of the sum of squares differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.dependent import options, start_next, wait

_ELEMENTS = 512  # of each half of the heads of a program: with 2 warps, one load of 16 bytes a thread


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_1,  # [1, pairs], of the norm's first half and second
    weight_2,
    cos,  # [1, pairs], rounded to x's dtype
    sin,
    inside,  # [heads, pairs] of the tile at x_ptr
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both halves of a tile of heads, float32 that holds values of x's dtype."""
    first = tl.load(x_ptr, mask=inside, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + EPS)[:, None]
        first = ((first * scale).to(dtype).to(tl.float32) * weight_1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_2).to(dtype).to(tl.float32)
    turned_1 = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    turned_2 = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return turned_1.to(dtype).to(tl.float32), turned_2.to(dtype).to(tl.float32)


@triton.jit
def _stored(x, out_ptr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """x as the cache holds it. 448 is float8_e4m3fn's largest: beyond it the cast itself would make NaN."""
    if FP8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(out_ptr.dtype.element_ty)


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TILE: tl.constexpr,  # heads of a program
    KV_STRIDE: tl.constexpr,  # elements from one token of the cache to the next
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    DIM: tl.constexpr = 2 * HALF
    Q_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    in_dim = pair < HALF
    qkv_ptr += token * (HEADS + 2 * KV_HEADS) * DIM
    # Before the wait: these were there before the step began.
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    table_ptr += tl.load(positions_ptr + token).to(tl.int64) * DIM
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(table_ptr + pair, mask=in_dim, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + HALF + pair, mask=in_dim, other=0.0).to(dtype).to(tl.float32)[None, :]
    weight_1, weight_2 = cos, sin
    if NORM:
        norm_ptr = k_norm_ptr
        if tile < Q_TILES:
            norm_ptr = q_norm_ptr
        weight_1 = tl.load(norm_ptr + pair, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        weight_2 = tl.load(norm_ptr + HALF + pair, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    wait(PDL)
    if tile < Q_TILES:
        head = tile * TILE + tl.arange(0, TILE)
        at = head[:, None] * DIM + pair[None, :]
        inside = (head < HEADS)[:, None] & in_dim[None, :]
        first, second = _rotated(qkv_ptr + at, weight_1, weight_2, cos, sin, inside, HALF, EPS, NORM)
        q_ptr += token * HEADS * DIM
        tl.store(q_ptr + at, first.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(q_ptr + at + HALF, second.to(q_ptr.dtype.element_ty), mask=inside)
    elif tile < Q_TILES + KV_TILES:
        head = (tile - Q_TILES) * TILE + tl.arange(0, TILE)
        at = head[:, None] * DIM + pair[None, :]
        inside = (head < KV_HEADS)[:, None] & in_dim[None, :]
        qkv_ptr += HEADS * DIM
        first, second = _rotated(qkv_ptr + at, weight_1, weight_2, cos, sin, inside, HALF, EPS, NORM)
        inside = inside & (slot >= 0)
        keys_ptr += slot * KV_STRIDE
        tl.store(keys_ptr + at, _stored(first, keys_ptr, FP8), mask=inside)
        tl.store(keys_ptr + at + HALF, _stored(second, keys_ptr, FP8), mask=inside)
    else:
        head = (tile - Q_TILES - KV_TILES) * TILE + tl.arange(0, TILE)
        at = head[:, None] * DIM + pair[None, :]
        inside = (head < KV_HEADS)[:, None] & in_dim[None, :] & (slot >= 0)
        qkv_ptr += (HEADS + KV_HEADS) * DIM
        first = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        values_ptr += slot * KV_STRIDE
        tl.store(values_ptr + at, _stored(first, values_ptr, FP8), mask=inside)
        tl.store(values_ptr + at + HALF, _stored(second, values_ptr, FP8), mask=inside)


def rope_store(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Normalise and rotate q and k, store k and v, return q [T, heads, head_dim], contiguous.

    ``qkv`` is [T, (heads + 2 kv_heads) * head_dim], contiguous: heads of q, then k, then v; ``table`` float32
    [max_position, head_dim]: cos of each frequency, then sin; ``positions`` and ``slots`` int64 or int32 [T].
    ``q_norm`` and ``k_norm`` are weights [head_dim], or both None. ``keys`` and ``values`` are [blocks, block_size,
    kv_heads, head_dim], blocks one after another, alike in strides and dtype: the model's, another float, or
    float8_e4m3fn, into which values are cast saturating. A negative slot stores nothing: a padded row of a graph.
    """
    kv_heads, head_dim = keys.shape[2:]
    tokens = len(qkv)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.is_contiguous()
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    half = head_dim // 2
    half_pad = triton.next_power_of_2(half)
    tile = max(1, _ELEMENTS // half_pad)
    if tokens:
        _rope_store[(tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile))](
            qkv,
            table,
            positions,
            slots,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            q,
            keys,
            values,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=half,
            HALF_PAD=half_pad,
            TILE=tile,
            KV_STRIDE=keys.stride(1),
            EPS=eps,
            NORM=q_norm is not None,
            FP8=keys.dtype == torch.float8_e4m3fn,
            num_warps=2,
            **options(qkv.device),
        )
    return q
