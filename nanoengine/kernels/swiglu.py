"""SwiGLU (arXiv 2002.05202): silu(gate) * up in one pass over memory.

The reference is ``TorchOps.swiglu``; like it, silu is computed in float32 and rounded before the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.dependent import options, start_next, wait

_BLOCK = 1024  # with 4 warps, one load of 16 bytes a thread of each half


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = row * 2 * SIZE + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + SIZE, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (silu * up).to(dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """[rows, 2 n] -> [rows, n], contiguous, float32, bfloat16 or float16: silu of the first half times the second."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _swiglu[(rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4, **options(gate_up.device)
        )
    return out
