"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoengine.weights.load import Slot, into


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. As transformers does it: normalised in float32, rounded to x's dtype,
    then multiplied by the weight in that dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": into(self.weight)}
