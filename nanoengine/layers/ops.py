"""The small operations between the matrix products: norms, rotation, activation, and the store into the KV cache.

A model says what it computes in these words; which kernels compute it is decided once, at load (``select_ops``). The
implementation here is plain torch: it runs on every device and is what the others are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm on each head of q and k: weights [head_dim] each."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight [size]."""

    weight: Tensor
    eps: float


class Ops(Protocol):
    """Float tensors are in the model's dtype; T is the number of tokens. Nothing here waits for the device."""

    fused: bool  # kernels of our own: kv_slots may be int32, and a negative one stores nothing

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out], into ``out`` if it is given."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """(x + delta, its RMSNorm), both [T, size]; ``delta`` None is nothing to add. May reuse x's memory.

        RMSNorm (arXiv 1910.07467) as transformers does it: normalised in float32, rounded to x's dtype, then
        multiplied by the weight in that dtype.
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, 2 n] -> [T, n]: silu of the first half, times the second (arXiv 2002.05202)."""

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, ``linear`` of its norm)."""

    def norm_swiglu(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, ``swiglu`` of ``linear`` of its norm)."""

    def rope(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> object:
        """What ``rope_and_store`` needs of the positions (int32 or int64 [T]), worked out once a step for all layers.

        ``table`` is float32 [max_position, head_dim]: cos of each frequency, then sin.
        """

    def rope_and_store(
        self, qkv: Tensor, rope: object, norms: HeadNorms | None, keys: Tensor, values: Tensor, kv_slots: Tensor
    ) -> Tensor:
        """Normalise and rotate q and k, write k and v into the cache, return q [T, heads, head_dim].

        ``qkv`` is [T, (heads + 2 kv_heads) * head_dim], heads of q, then k, then v; ``keys`` and ``values`` are
        [blocks, block_size, kv_heads, head_dim] in the cache's dtype; ``kv_slots`` int64 [T] (int32 too, if ``fused``)
        says where each token goes: block * block_size + offset.
        """


class TorchOps(Ops):
    """See the module."""

    fused = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, _rms_norm(x, norm.weight, norm.eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, normed = self.add_rms_norm(x, delta, norm)
        return x, self.linear(normed, weight, bias)

    def norm_swiglu(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, product = self.norm_linear(x, delta, norm, weight, bias)
        return x, self.swiglu(product)

    def rope(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin as ``rotate`` takes them."""
        cos, sin = table[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def rope_and_store(
        self, qkv: Tensor, rope: object, norms: HeadNorms | None, keys: Tensor, values: Tensor, kv_slots: Tensor
    ) -> Tensor:
        assert isinstance(rope, tuple)
        kv_heads, head_dim = keys.shape[2:]
        qkv = qkv.view(len(qkv), -1, head_dim)
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if norms is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((_rms_norm(q, norms.q, norms.eps), _rms_norm(k, norms.k, norms.eps)), dim=1)
        q, k = rotate(qk, *rope).split((heads, kv_heads), dim=1)  # both at once: half the small operations
        keys.view(-1, kv_heads, head_dim).index_copy_(0, kv_slots, k.to(keys.dtype))
        values.view(-1, kv_heads, head_dim).index_copy_(0, kv_slots, v.to(values.dtype))
        return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x, [T, heads, head_dim]; cos and sin are [T, 1, head_dim], and ``sin``
    carries the signs, -sin then sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # the same to the bit, in one operation
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
