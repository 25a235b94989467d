"""RMSNorm (arXiv 1910.07467), with the addition that comes before it in a transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoengine.layers.ops import Norm, Ops
from nanoengine.weights.load import Slot, into


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._ops = ops

    @property
    def norm(self) -> Norm:
        """As ``Ops`` takes it."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm), both [T, size]; None is nothing to add."""
        return self._ops.add_rms_norm(x, delta, self.norm)

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": into(self.weight)}
