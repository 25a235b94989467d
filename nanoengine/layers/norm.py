"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoengine.weights.load import Slot, into


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. As transformers does it: normalised in float32, rounded to x's dtype,
    then multiplied by the weight in that dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": into(self.weight)}
