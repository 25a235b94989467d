"""Attention kernels alone, on a GPU: how fast decode reads the cache, and how fast prefill computes.

    python -m loadtest.attention

One layer, keys and values in bfloat16, blocks of 16 tokens in random order. Each case is a CUDA graph of launches over
different caches, larger together than the GPU's own cache, and its median of several replays. flash-attn 2 and 4 are
measured beside our kernels where they are installed. The first lines are what the memory gives: nothing reads faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.base import DecodeWork
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner
from nanoengine.kernels.paged_decode import paged_decode
from nanoengine.kernels.paged_prefill import paged_prefill

BLOCK, DIM, KV_HEADS = 16, 128, 8
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")
TOKEN_BYTES = 2 * KV_HEADS * DIM * DTYPE.itemsize
COLD_BYTES = 400 << 20  # several times the cache of any GPU

Launch = Callable[[], object]


@dataclass(frozen=True)
class Pages:
    """A paged cache that holds rows of some lengths."""

    keys: Tensor  # [blocks, BLOCK, KV_HEADS, DIM]
    values: Tensor
    table: Tensor  # int32 [rows, width]
    lens: Tensor  # int32 [rows]

    @classmethod
    def random(cls, lens: Sequence[int], block: int = BLOCK) -> Pages:
        needed = [-(-n // block) for n in lens]
        total, width = sum(needed), max(needed)
        keys, values = (torch.randn(total, block, KV_HEADS, DIM, dtype=DTYPE, device=CUDA) for _ in range(2))
        blocks = torch.randperm(total, dtype=torch.int32)
        table = torch.zeros(len(lens), width, dtype=torch.int32)
        for row, some in enumerate(blocks.split(needed)):
            table[row, : len(some)] = some
        return cls(keys, values, table.to(CUDA), torch.tensor(lens, dtype=torch.int32, device=CUDA))


def microseconds(launches: Sequence[Launch], replays: int = 7) -> float:
    """Of one launch."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return median(_timed(graph.replay) for _ in range(replays)) / len(launches)


def _timed(run: Launch) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def decode(name: str, lens: list[int], heads: int = 16) -> None:
    copies = [Pages.random(lens) for _ in range(max(2, COLD_BYTES // (sum(lens) * TOKEN_BYTES)))]
    layout = DecodeLayout(len(lens), heads, KV_HEADS, BLOCK, TOKEN_BYTES, (None,), share_prefixes=False)
    planner, done = DecodePlanner(layout), torch.zeros(len(lens), KV_HEADS, dtype=torch.int32, device=CUDA)
    q = torch.randn(len(lens), heads, DIM, dtype=DTYPE, device=CUDA)

    def launch(pages: Pages) -> Launch:
        arrays = planner.plan(np.array(lens, np.int32), len(lens))
        work = DecodeWork.views([torch.from_numpy(array).to(CUDA) for array in arrays], planner, done)[None]
        return lambda: paged_decode(q, pages.keys, pages.values, pages.table, work, scale=DIM**-0.5)

    ways: dict[str, list[Launch]] = {"ours": [launch(pages) for pages in copies]}
    try:
        from flash_attn import flash_attn_with_kvcache

        large = [Pages.random(lens, 256) for _ in copies]  # the smallest page that the library takes
        ways["flash-attn 2"] = [
            lambda p=p: flash_attn_with_kvcache(  # type: ignore[misc]
                q[:, None], p.keys, p.values, cache_seqlens=p.lens, block_table=p.table, softmax_scale=DIM**-0.5
            )
            for p in large
        ]
    except ImportError:
        pass
    try:
        from flash_attn.cute import flash_attn_varlen_func

        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=CUDA)
        ways["flash-attn-4"] = [
            lambda p=p: flash_attn_varlen_func(  # type: ignore[misc]
                q,
                p.keys,
                p.values,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                page_table=p.table,
                seqused_k=p.lens,
                softmax_scale=DIM**-0.5,
            )
            for p in copies
        ]
    except ImportError:
        pass
    figures = [f"{way} {_read(lens, microseconds(launches))}" for way, launches in ways.items()]
    print(f"decode  {name:24} {heads} heads  {'  '.join(figures)}", flush=True)


def _read(lens: list[int], us: float) -> str:
    return f"{us:7.1f} us {sum(lens) * TOKEN_BYTES / us / 1e6:5.2f} TB/s"


def prefill(name: str, rows: int, queries: int, cached: int = 0, heads: int = 16) -> None:
    total = cached + queries
    pages = Pages.random([total] * rows)
    q = torch.randn(rows * queries, heads, DIM, dtype=DTYPE, device=CUDA)
    starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32, device=CUDA)
    flops = rows * 4 * heads * DIM * (queries * cached + queries * (queries + 1) / 2)
    ways: dict[str, Launch] = {
        "ours": lambda: paged_prefill(
            q, pages.keys, pages.values, pages.table, starts, pages.lens, scale=DIM**-0.5, window=None, rows=rows
        )
    }
    try:
        from flash_attn.cute import flash_attn_varlen_func

        ways["flash-attn-4"] = lambda: flash_attn_varlen_func(
            q,
            pages.keys,
            pages.values,
            cu_seqlens_q=starts,
            max_seqlen_q=queries,
            page_table=pages.table,
            seqused_k=pages.lens,
            softmax_scale=DIM**-0.5,
            causal=True,
        )
    except ImportError:
        pass
    figures = []
    for way, launch in ways.items():
        us = microseconds([launch] * 3)
        figures.append(f"{way} {us:8.1f} us {flops / us / 1e6:4.0f} TFLOP/s")
    print(f"prefill {name:24} {heads} heads  {'  '.join(figures)}", flush=True)


def ceilings() -> str:
    """What reading alone, and copying, reach."""
    large = torch.zeros(4 << 30, dtype=torch.uint8, device=CUDA).view(torch.int32)
    other, size = torch.empty_like(large), large.numel() * 4
    read = min(_timed(large.amax) for _ in range(4))
    copy = min(_timed(lambda: other.copy_(large)) for _ in range(4))
    return f"pure read {size / read / 1e6:.2f} TB/s, copy {2 * size / copy / 1e6:.2f} TB/s"


def main() -> None:
    torch.manual_seed(0)
    rng = Random(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings()}")
    decode("256 x 200-1400", [rng.randint(200, 1400) for _ in range(256)])
    decode("256 x 200-1400", [rng.randint(200, 1400) for _ in range(256)], heads=32)
    decode("64 x 8192-9011", [rng.randint(8192, 9011) for _ in range(64)])
    decode("1024 x 128-256", [rng.randint(128, 256) for _ in range(1024)])
    decode("1024 x 620", [620] * 1024)
    decode("64 x 620", [620] * 64)
    decode("1 x 2048", [2048])
    prefill("16 x 1024", 16, 1024)
    prefill("4 x 8192", 4, 8192)
    prefill("4 x 8192", 4, 8192, heads=32)
    prefill("64 x 128 after 2048", 64, 128, cached=2048)


if __name__ == "__main__":
    main()
