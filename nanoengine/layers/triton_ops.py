"""The operations of ``Ops`` as fused kernels, for CUDA devices. See kernels/ for each."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.kernels.few_rows import FEW, few_rows
from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.norm import add_rms_norm
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.swiglu import swiglu
from nanoengine.layers.ops import HeadNorms, Norm, TorchOps


class TritonOps(TorchOps):
    """One kernel an operation; the matrix products are torch's, but for a few rows.

    But for those products, what a row gives depends on that row alone, bit for bit. Tensors are contiguous.
    """

    fused = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if 0 < len(x) <= FEW:
            return few_rows(x, weight, bias, out=out)[1]
        return super().linear(x, weight, bias, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        return x, add_rms_norm(x, delta, norm.weight, norm.eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if 0 < len(x) <= FEW:
            return few_rows(x, weight, bias, delta=delta, norm=(norm.weight, norm.eps))
        return super().norm_linear(x, delta, norm, weight, bias)

    def norm_swiglu(
        self, x: Tensor, delta: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if 0 < len(x) <= FEW:
            return few_rows(x, weight, bias, delta=delta, norm=(norm.weight, norm.eps), swiglu=True)
        return super().norm_swiglu(x, delta, norm, weight, bias)

    def rope(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Nothing to work out: the kernel reads the table itself."""
        return table, positions

    def rope_and_store(
        self, qkv: Tensor, rope: object, norms: HeadNorms | None, keys: Tensor, values: Tensor, kv_slots: Tensor
    ) -> Tensor:
        assert isinstance(rope, tuple)
        table, positions = rope
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        return rope_store(qkv, table, positions, kv_slots, q_norm, k_norm, eps, keys, values)


class DeterministicOps(TritonOps):
    """The matrix products too give a row the same bits whatever else is in the batch, at some cost in speed."""

    norm_linear = TorchOps.norm_linear
    norm_swiglu = TorchOps.norm_swiglu

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return matmul(x, weight, bias, out)
