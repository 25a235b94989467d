"""Compile every kernel for a Hopper GPU, on any machine: the interpreter takes much that the compiler refuses.

Run as a module, by test_kernels_compile.py: TRITON_INTERPRET must not be set when a kernel is defined. A launch
compiles for the arguments that it gets, and does nothing. Prints what each kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nanoengine.attention.base import DecodeWork
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner

HOPPER = GPUTarget("cuda", 90, 32)
LAUNCH_OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {key: kwargs.pop(key) for key in LAUNCH_OPTIONS & set(kwargs)}
    signature, constants, attributes = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, (*args, *kwargs.values()), strict=True)):
        assert i < len(args) or param.name in kwargs
        value = kwargs.get(param.name, value)
        if param.is_constexpr:
            signature[param.name], constants[i,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name], attributes[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    print(f"{kernel.__name__} {options}: {compiled.metadata.shared} bytes of shared memory")


def decodes(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, shared: bool) -> None:
    from nanoengine.kernels.paged_decode import paged_decode

    rows, heads, kv_heads, block = 8, 16, 8, 16
    planner = DecodePlanner(DecodeLayout(rows, heads, kv_heads, block, 10_000_000, (None,), share_prefixes=shared))
    table = np.tile(np.arange(16, dtype=np.int32), (rows, 1))
    lens = np.full(rows, 250, np.int32)
    table[:, -1] = np.arange(16, 16 + rows)
    prefixes = planner.prefixes(table, lens)
    assert (prefixes is not None) == shared
    arrays = [torch.from_numpy(array) for array in planner.plan(lens, rows, prefixes)]
    work = DecodeWork.views(arrays, planner, torch.zeros(rows, kv_heads, dtype=torch.int32))[None]
    pages = torch.zeros(32, block, kv_heads, dim, dtype=kv_dtype)
    paged_decode(torch.zeros(rows, heads, dim, dtype=dtype), pages, pages, torch.from_numpy(table), work, scale=0.1)


def prefills(dtype: torch.dtype, dim: int) -> None:
    from nanoengine.kernels.paged_prefill import paged_prefill

    pages = torch.zeros(32, 16, 8, dim, dtype=dtype)
    starts, lens = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
    table = torch.zeros(1, 4, dtype=torch.int32)
    q = torch.zeros(40, 16, dim, dtype=dtype)
    paged_prefill(q, pages, pages, table, starts, lens, scale=0.1, window=None, rows=1)


def operations(dtype: torch.dtype) -> None:
    from nanoengine.layers.ops import HeadNorms, Norm
    from nanoengine.layers.triton_ops import DeterministicOps, TritonOps

    size, heads, kv_heads, dim = 1024, 16, 8, 64
    norm, weight = Norm(torch.ones(size, dtype=dtype), 1e-6), torch.zeros(2048, size, dtype=dtype)
    pages = torch.zeros(4, 16, kv_heads, dim, dtype=dtype)
    table, slots = torch.zeros(64, dim), torch.zeros(9, dtype=torch.int32)
    head_norms = HeadNorms(torch.ones(dim, dtype=dtype), torch.ones(dim, dtype=dtype), 1e-6)
    for rows in (1, 9):
        x = torch.zeros(rows, size, dtype=dtype)
        ops = TritonOps()
        ops.norm_swiglu(x, x, norm, weight, None)
        ops.norm_linear(x, x, norm, weight, None)
        DeterministicOps().linear(x, weight, None)
        qkv = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        ops.rope_and_store(qkv, ops.rope(table, slots[:rows], dtype), head_norms, pages, pages, slots[:rows])


def sampling(dtype: torch.dtype) -> None:
    from nanoengine.kernels.sample import sample

    rows, slots = torch.arange(4, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    logits, settings = torch.zeros(4, 3000, dtype=dtype), torch.zeros(9, 8, dtype=torch.int32)
    sample(logits, settings, rows, rows, rows, slots, fallback=0)
    masks = torch.zeros(4, 94, dtype=torch.int32)
    sample(logits, settings, rows, rows, rows, slots, fallback=0, rows=rows, masks=masks)


def main() -> None:
    run: Callable[..., None] = compile_only
    JITFunction.run = run  # type: ignore[method-assign, assignment]
    for dtype in (torch.float32, torch.bfloat16):
        decodes(dtype, dtype, 128, shared=False)
        decodes(dtype, dtype, 64, shared=True)
        prefills(dtype, 128)
        operations(dtype)
        sampling(dtype)
    decodes(torch.bfloat16, torch.float8_e4m3fn, 128, shared=True)


if __name__ == "__main__":
    main()
