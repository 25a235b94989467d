"""Which attention backend serves a model on a device."""

from __future__ import annotations

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.torch import TorchAttention
from nanoengine.errors import ModelLoadError


def select_backend(name: str, *, device: torch.device, head_dim: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend called ``name``; "auto" takes the fastest that fits.

    Raises:
        ModelLoadError: there is none of that name, or it cannot serve this device, head size and dtype.
    """
    if name not in ("auto", TorchAttention.name):
        raise ModelLoadError(f"attention backend {name!r} is not known; known: auto, {TorchAttention.name}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelLoadError(f"attention backend torch cannot compute in {dtype}: use float32, bfloat16 or float16")
    return TorchAttention()
