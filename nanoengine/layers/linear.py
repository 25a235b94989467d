"""Linear layers, several of a checkpoint's projections fused into one product, and the token embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.ops import Ops
from nanoengine.weights.load import Slot, into


class Linear(nn.Module):
    """y = x Wᵀ + b. ``parts`` names the projections that share x and the outputs of each, in the order of W's rows.

    A quantised or tensor-parallel form is another class with these methods: ``slots`` says which stored tensors it
    takes and how, ``finish`` lays them out, ``forward`` is [T, in_features] -> [T, sum of parts] (``out`` is where that
    goes, on a GPU).
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._ops = ops
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight: Tensor = _empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = _empty(out_features, dtype=dtype, device=device) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return self._ops.linear(x, self.weight, self.bias, out)

    def of_normed(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, ``forward`` of its norm)."""
        if self.packed is not None:
            x, normed = norm(x, delta)
            return x, self(normed)
        return self._ops.norm_linear(x, delta, norm.norm, self.weight, self.bias)

    def swiglu_of_normed(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, SwiGLU of ``forward`` of its norm), where the parts are gate and up."""
        if self.packed is not None:
            x, product = self.of_normed(norm, x, delta)
            return x, self._ops.swiglu(product)
        return self._ops.norm_swiglu(x, delta, norm.norm, self.weight, self.bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """``prefix`` is what comes before a projection's name."""
        slots, row = {}, 0
        for part, rows in self.parts.items():
            slots[f"{prefix}{part}.weight"] = into(self.weight[row : row + rows])
            if self.bias is not None:
                slots[f"{prefix}{part}.bias"] = into(self.bias[row : row + rows])
            row += rows
        return slots

    def finish(self) -> None:
        self.packed = _packed(self.weight)
        if self.packed is not None:
            self.weight = _empty(0, dtype=self.packed.dtype, device=self.packed.device)  # gives its memory back


class TiedHead(nn.Module):
    """The output projection whose weight is the token embedding's."""

    def __init__(self, embedding: Embedding, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.embedding = embedding
        self.packed: Tensor | None = None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return self._ops.linear(x, self.embedding.weight, None, out)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {}

    def finish(self) -> None:
        # A second copy of the embedding, in memory only: the packed form cannot be looked up by row. For SmolLM2 it
        # costs 113 MB and saves 20 ms of a step of 8 (28 ms -> 8 ms).
        self.packed = _packed(self.embedding.weight)


class Embedding(nn.Module):
    """Token ids [T] -> [T, size]."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight: Tensor = _empty(vocab_size, size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": into(self.weight)}


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _packed(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's blocked layout, or None where that does not pay.

    F.linear in float32 on a CPU goes to MKL's sgemm, which is made for large matrices: at the few rows of a decode step
    it reads the weights at a third of memory's bandwidth. oneDNN with a layout chosen ahead keeps up with memory.
    us per product for SmolLM2's shapes at 8 rows, 2 cores (AVX2), oneDNN against F.linear: qkv 183 / 245, gate-up
    482 / 1234, down 275 / 373, head 7,900 / 28,000; it is ahead from 1 row to 1,024. The operators are those that
    torch.compile's CPU backend emits. bfloat16 stays with F.linear, which uses oneDNN itself where the CPU can.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)  # 8: rows to optimise for
