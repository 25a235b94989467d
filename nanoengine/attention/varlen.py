"""What backends share that leave the prefill to a library: keys and values of the step's rows, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nanoengine.attention.base import Batch
from nanoengine.attention.triton import TritonAttention

_GATHER_TOKENS = 1 << 17
"""Most tokens of context gathered for a layer: bounds the workspace, at 8 heads of 128 in bfloat16 to 512 MiB."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where the contexts of the prefill rows lie in the cache, one row after the other."""

    slots: Tensor  # int64 [tokens]
    starts: Tensor  # int32 [rows + 1] offsets of the rows in it

    def __call__(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values [blocks, block_size, kv_heads, dim] -> [tokens, kv_heads, dim] in ``dtype``."""
        flat = pages.flatten(0, 1)
        if pages.dtype == dtype:
            return flat.index_select(0, self.slots)
        return flat.view(torch.uint8).index_select(0, self.slots).view(pages.dtype).to(dtype)


class VarlenPlan:
    """The prefill rows of a step. What only some kinds of call need is worked out when a layer first asks for it."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch, self._block_size = batch, block_size

    @cached_property
    def query_start(self) -> Tensor:
        """int32 [rows + 1] offsets of the rows among their tokens."""
        first = self._batch.num_decodes  # each decode has one token
        return self._batch.query_start[first:] - first if first else self._batch.query_start

    @cached_property
    def lens(self) -> Tensor:
        """int32 [rows] tokens of context."""
        return self._batch.seq_lens[self._batch.num_decodes :]

    @cached_property
    def key_start(self) -> Tensor:
        """int32 [rows + 1] offsets of the rows' contexts, were they one after the other."""
        starts = self.lens.new_zeros(len(self.lens) + 1)
        torch.cumsum(self.lens, 0, out=starts[1:])
        return starts

    @cached_property
    def table(self) -> Tensor:
        """int32 [rows, width] blocks."""
        return self._batch.block_table[self._batch.num_decodes :]

    @cached_property
    def longest_query(self) -> int:
        return max(self._batch.query_lens_host[self._batch.num_decodes :])

    @cached_property
    def longest(self) -> int:
        return max(self._batch.seq_lens_host[self._batch.num_decodes :])

    @cached_property
    def gathered(self) -> Gathered | None:
        """None where the contexts are too many to gather."""
        batch, first = self._batch, self._batch.num_decodes
        lens = batch.seq_lens_host[first:]
        if lens == batch.query_lens_host[first:]:  # nothing is cached: what this step stores is all there is
            return Gathered(batch.kv_slots[first:], self.query_start)
        total = sum(lens)
        if total > _GATHER_TOKENS:
            return None
        row = torch.repeat_interleave(self.lens, output_size=total)
        position = torch.arange(total, device=row.device) - self.key_start[row]
        block = self.table[row, position // self._block_size].long()
        return Gathered(block * self._block_size + position % self._block_size, self.key_start)


class VarlenAttention(TritonAttention):
    """A backend whose prefill is a library's; ``prefill`` gets a ``VarlenPlan``."""

    def prepare(self, batch: Batch, block_size: int) -> VarlenPlan:
        return VarlenPlan(batch, block_size)
