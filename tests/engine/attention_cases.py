"""Random rows over a paged cache whose other blocks hold NaN, and attention written out query by query."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.base import AttentionBackend, AttentionSpec, Batch, DecodeWork, ForwardContext, KVCache
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner


def planned(
    planner: DecodePlanner, table: Tensor, lens: list[int], size: int | None = None
) -> dict[int | None, DecodeWork]:
    """A plan for these rows, in arrays for ``size`` rows, on the table's device."""
    seq_lens = np.array(lens, np.int32)
    arrays = planner.plan(seq_lens, size or len(lens), planner.prefixes(table.cpu().numpy(), seq_lens))
    done = torch.zeros(1024, dtype=torch.int32, device=table.device)
    return DecodeWork.views([torch.from_numpy(array).to(table.device) for array in arrays], planner, done)


HOLE = float("nan")  # what fills the memory that nobody may read


@dataclass(frozen=True)
class Case:
    """Rows of (cached tokens, new tokens); a row of one new token is a decode."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 4
    kv_heads: int = 2
    group: int = 3  # query heads per key-value head
    head_dim: int = 8
    window: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


class Pages:
    """Random keys and values of a case's rows, in shuffled blocks of a cache that else holds holes."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        # Decodes first, as in every step.
        self.rows = sorted(case.rows, key=lambda row: row[1] > 1)
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        lens, counts = [past + new for past, new in self.rows], [new for _, new in self.rows]

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, case.dtype)

        heads = case.kv_heads * case.group
        self.q = [rand(n, heads, case.head_dim) for n in counts]
        self.k = [rand(n, case.kv_heads, case.head_dim) for n in lens]
        self.v = [rand(n, case.kv_heads, case.head_dim) for n in lens]

        size = case.block_size
        needed = [-(-n // size) for n in lens]
        blocks = list(range(sum(needed) + 3))
        random.Random(case.seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.cache = KVCache.allocate(
            layers=1,
            num_blocks=sum(needed) + 3,
            block_size=size,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            device=torch.device(device),
        )
        for pages, rows in ((self.cache.keys[0], self.k), (self.cache.values[0], self.v)):
            pages.fill_(HOLE)
            for (past, _), table, tokens in zip(self.rows, self.tables, rows, strict=True):
                for position in range(past):  # the new ones are stored by attend
                    pages[table[position // size], position % size] = tokens[position]

        slots = [
            self.tables[row][position // size] * size + position % size
            for row, (past, new) in enumerate(self.rows)
            for position in range(past, past + new)
        ]
        width = max(needed)
        self.batch = Batch(
            num_decodes=sum(n == 1 for n in counts),
            query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            block_table=torch.tensor(
                [t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32, device=device
            ),
            kv_slots=torch.tensor(slots, device=device),
            query_lens_host=tuple(counts),
            seq_lens_host=tuple(lens),
        )
        decodes = self.batch.num_decodes
        if decodes:
            layout = DecodeLayout(len(counts), heads, case.kv_heads, size, 1, (case.window,), share_prefixes=False)
            planner = DecodePlanner(layout)
            work = planned(planner, self.batch.block_table[:decodes], lens[:decodes])
            self.batch = replace(self.batch, work=work)
        self.spec = AttentionSpec(0, heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, case.window)

    def attend(self, backend: AttentionBackend) -> Tensor:
        new_k = torch.cat([k[past:] for k, (past, _) in zip(self.k, self.rows, strict=True)])
        new_v = torch.cat([v[past:] for v, (past, _) in zip(self.v, self.rows, strict=True)])
        context = ForwardContext(backend, self.cache, self.batch)
        for pages, new in zip(context.pages(self.spec), (new_k, new_v), strict=True):
            stored = new.to(pages.dtype).view(torch.uint8)  # as bytes: few operations take float8
            pages.flatten(0, 1).view(torch.uint8).index_copy_(0, context.kv_slots, stored)
        return context.attend(self.spec, torch.cat(self.q))

    def naive(self) -> Tensor:
        """softmax(q·K) V in float64, per token and head."""
        case, out = self.case, []
        for q, k, v, (past, new) in zip(self.q, self.k, self.v, self.rows, strict=True):
            for i in range(new):
                position = past + i
                first = 0 if case.window is None else max(0, position - case.window + 1)
                token = []
                for head in range(case.kv_heads * case.group):
                    keys = k[first : position + 1, head // case.group].double()
                    scores = keys @ q[i, head].double() * self.spec.scale
                    token.append(scores.softmax(0) @ v[first : position + 1, head // case.group].double())
                out.append(torch.stack(token))
        return torch.stack(out)
