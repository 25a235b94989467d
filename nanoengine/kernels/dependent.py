"""Programmatic dependent launch: a kernel starts while the one before it ends (CUDA C++ Programming Guide, 4.5).

At a batch of one a decode step is hundreds of kernels of 2 to 6 us, of which launching and the first read from memory
are the larger part. A kernel that says ``start_next`` early lets the next one be launched at once; that one reads what
nobody writes, such as weights, and then ``wait``s until all that came before is done and can be seen. Every kernel of
ours waits before it touches anything that another kernel writes or reads, so order is kept through any chain.

Compute capability 9 and later have it; elsewhere, and in the interpreter, ``PDL`` is False and nothing changes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be launched; it still waits for this one where it says so."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until every kernel before this one is done."""
    if PDL:
        gdc_wait()


@cache
def options(device: torch.device) -> dict[str, Any]:
    """What a kernel with an argument ``PDL`` is launched with."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
