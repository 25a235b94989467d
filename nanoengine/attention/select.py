"""Which attention backend serves a model on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.torch import TorchAttention
from nanoengine.errors import ModelLoadError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("torch", "triton", "flash", "flash4")
_WGMMA = (9, 10, 11)  # compute capabilities whose matrix instructions flash does not use, and flash4 needs


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

    On a GPU all decode with our own kernel, which no library matches; they differ in the prefill. On an H200, in
    TFLOP/s for 4 x 8192 tokens: flash4 648 with pages of 128 and 575 with 16, triton 396, flash 300; for 16 x 1024
    triton 358, flash 164. On other kinds of GPU flash comes before triton: it was made for those, and triton was not
    measured there. Decode and prefill by different kernels differ in bits, so a ``deterministic`` engine (see
    TritonAttention) has triton only; on CUDA, so has float32.

    ``kv_dtype`` is that of the KV cache: None is ``dtype``, else float8_e4m3fn.

    Raises:
        ModelLoadError: there is none of that name, or it cannot serve this device, head size and dtype.
    """
    if name not in ("auto", *_NAMES):
        raise ModelLoadError(f"attention backend {name!r} is not known; known: auto, {', '.join(_NAMES)}")
    if dtype not in _DTYPES:
        raise ModelLoadError(f"no attention backend computes in {dtype}: use float32, bfloat16 or float16")
    if kv_dtype not in (None, dtype, torch.float8_e4m3fn):
        raise ModelLoadError(f"no attention backend reads a KV cache in {kv_dtype}: use {dtype} or float8_e4m3fn")
    obstacles: dict[str, Callable[[], str | None]] = {
        "flash4": lambda: _no_flash4(device, head_dim, dtype, deterministic),
        "flash": lambda: _no_flash(device, head_dim, dtype, deterministic),
        "triton": lambda: _no_triton(device, head_dim),
        "torch": lambda: _no_torch(device, dtype, deterministic, kv_dtype),
    }
    if name != "auto":
        if obstacle := obstacles[name]():
            raise ModelLoadError(f"attention backend {name} {obstacle}: choose another one, or auto")
        return _made(name, deterministic)
    found = {}
    for candidate in _fastest_first(device):
        found[candidate] = obstacles[candidate]()
        if found[candidate] is None:
            return _made(candidate, deterministic)
    raise ModelLoadError("no attention backend can serve: " + "; ".join(f"{n} {why}" for n, why in found.items()))


def _fastest_first(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _WGMMA:
        return ("flash4", "triton", "flash", "torch")
    return ("flash4", "flash", "triton", "torch")


def _made(name: str, deterministic: bool) -> AttentionBackend:
    if name == "torch":
        return TorchAttention()
    if name == "flash4":
        from nanoengine.attention.flash4 import Flash4Attention

        return Flash4Attention()
    if name == "flash":
        from nanoengine.attention.flash import FlashAttention

        return FlashAttention()
    from nanoengine.attention.triton import TritonAttention

    return TritonAttention(deterministic=deterministic)


def _no_torch(
    device: torch.device, dtype: torch.dtype, deterministic: bool, kv_dtype: torch.dtype | None
) -> str | None:
    """What keeps the backend from serving, if anything; so below."""
    if kv_dtype not in (None, dtype):
        return f"reads a KV cache in {dtype} only"
    if deterministic and device.type != "cpu":
        return "does not give the same bits in any batch"
    return None


def _no_triton(device: torch.device, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if head_dim > 256:
        return f"serves head sizes up to 256, not {head_dim}"
    if find_spec("triton") is None:
        return "needs the package triton"
    return None


def _no_flash(device: torch.device, head_dim: int, dtype: torch.dtype, deterministic: bool) -> str | None:
    if obstacle := _no_triton(device, head_dim):  # it decodes
        return obstacle
    if deterministic:
        return "does not give the same bits in decode and prefill"
    if dtype == torch.float32:
        return "computes in bfloat16 and float16 only"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "needs a GPU of compute capability 8.0 or more"
    return _not_importable("flash_attn.flash_attn_interface", "flash-attn")


def _no_flash4(device: torch.device, head_dim: int, dtype: torch.dtype, deterministic: bool) -> str | None:
    if obstacle := _no_triton(device, head_dim):
        return obstacle
    if deterministic:
        return "does not give the same bits in decode and prefill"
    if dtype == torch.float32:
        return "computes in bfloat16 and float16 only"
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _WGMMA:
        return "needs a GPU of compute capability 9, 10 or 11"
    if head_dim % 8 or (head_dim > 128 and head_dim != 256 and major > 9):
        return f"does not serve head sizes of {head_dim} on this GPU"
    return _not_importable("flash_attn.cute", "flash-attn-4")


def _not_importable(module: str, package: str) -> str | None:
    """A library built for another torch or CUDA is as good as missing."""
    try:
        import_module(module)
    except ImportError as error:
        return f"needs the package {package} ({error})"
    return None
