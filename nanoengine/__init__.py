"""nanoengine: a continuous-batching LLM engine with a paged KV cache. Usable alone; it never imports ray.

Names load on first use, so that a process that only tokenises (an ingress) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoengine.async_engine import AsyncEngine
    from nanoengine.config import EngineConfig
    from nanoengine.llm import LLM
    from nanoengine.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams"]

_HOME = {
    "LLM": "nanoengine.llm",
    "AsyncEngine": "nanoengine.async_engine",
    "EngineConfig": "nanoengine.config",
    "SamplingParams": "nanoengine.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
