"""Which operations serve a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nanoengine.errors import ModelLoadError
from nanoengine.layers.ops import Ops, TorchOps


def select_ops(device: torch.device, *, deterministic: bool = False) -> Ops:
    """The fastest operations for ``device``; ``deterministic`` ones give a row the same bits in any batch.

    On a CPU both are torch's: there float32 products give that already (``layers/linear.py``).

    Raises:
        ModelLoadError: deterministic on CUDA, and the package triton is not installed.
    """
    if device.type != "cuda":
        return TorchOps()
    if find_spec("triton") is None:
        if deterministic:
            raise ModelLoadError("deterministic on CUDA needs the package triton: pip install triton")
        return TorchOps()
    from nanoengine.layers.triton_ops import DeterministicOps, TritonOps

    return DeterministicOps() if deterministic else TritonOps()
