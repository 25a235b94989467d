"""The GPU backend that needs nothing but Triton: our own kernels, for decode and prefill, over pages of any size."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.base import AttentionBackend, AttentionSpec, Batch
from nanoengine.kernels.paged_decode import paged_decode
from nanoengine.kernels.paged_prefill import paged_prefill


class TritonAttention(AttentionBackend):
    """Decode is bound by memory, and no library reads ragged rows of small pages as fast (kernels/paged_decode.py).

    ``deterministic`` gives a token the same bits whether it is computed in a whole prompt, in a chunk or as a decode,
    alone or in any batch: decodes then run through the prefill kernel. That divides no row among programs, and fills
    as many of a tile's 128 lanes as there are query heads to a key-value head. A large batch of short rows decodes at
    much the same speed; a few long ones take as long as one processor needs to read one head of the longest.
    """

    name = "triton"
    planned = True

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def decode(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        rows = batch.num_decodes
        if self._deterministic:
            return _prefill(spec, q, keys, values, batch, first_row=0, rows=rows)
        return paged_decode(q, keys, values, batch.block_table, batch.work[spec.window], scale=spec.scale)

    def prefill(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        first = batch.num_decodes
        return _prefill(spec, q, keys, values, batch, first_row=first, rows=len(batch.seq_lens) - first)


def _prefill(
    spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, first_row: int, rows: int
) -> Tensor:
    return paged_prefill(
        q,
        keys,
        values,
        batch.block_table,
        batch.query_start,
        batch.seq_lens,
        scale=spec.scale,
        window=spec.window,
        first_row=first_row,
        rows=rows,
    )
