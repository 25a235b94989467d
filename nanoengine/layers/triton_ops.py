"""The operations of ``Ops`` as fused kernels, for CUDA devices. See kernels/ for each."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.norm import add_rms_norm
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.swiglu import swiglu
from nanoengine.layers.ops import HeadNorms, linear


class TritonOps:
    """One kernel an operation; the matrix products are torch's.

    But for those, what a row gives depends on that row alone, bit for bit. Tensors are contiguous.
    """

    fused = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, add_rms_norm(x, delta, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

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

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return matmul(x, weight, bias, out)
