"""Which attention backend serves a model on a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.torch import TorchAttention
from nanoengine.errors import ModelLoadError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def select_backend(
    name: str,
    *,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    deterministic: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend called ``name``; "auto" takes the fastest that fits.

    Raises:
        ModelLoadError: there is none of that name, or it cannot serve this device, head size and dtype.
    """
    if name not in ("auto", "torch", "triton"):
        raise ModelLoadError(f"attention backend {name!r} is not known; known: auto, torch, triton")
    if dtype not in _DTYPES:
        raise ModelLoadError(f"no attention backend computes in {dtype}: use float32, bfloat16 or float16")
    obstacle = _no_triton(device, head_dim)
    if name == "torch" or (name == "auto" and obstacle):
        return TorchAttention()
    if obstacle:
        raise ModelLoadError(f"attention backend triton {obstacle}: choose torch or auto")
    from nanoengine.attention.triton import TritonAttention

    return TritonAttention(deterministic=deterministic)


def _no_triton(device: torch.device, head_dim: int) -> str | None:
    """What keeps the triton backend from serving, if anything."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if head_dim > 256:
        return f"serves head sizes up to 256, not {head_dim}"
    if find_spec("triton") is None:
        return "needs the package triton"
    return None
