"""The GPU backend: our own decode kernel over pages of any size; prefill gathers pages and leaves the rest to torch."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.base import AttentionSpec, Batch
from nanoengine.attention.torch import TorchAttention
from nanoengine.kernels.paged_decode import paged_decode


class TritonAttention(TorchAttention):
    """Decode is bound by memory, and no library reads ragged rows of small pages as fast as the kernel does (figures in
    kernels/paged_decode.py). A prefill is bound by arithmetic, so gathering its context first costs it little."""

    name = "triton"
    recordable = True

    def decode(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        rows = batch.num_decodes
        return paged_decode(
            q,
            keys,
            values,
            batch.block_table[:rows],
            batch.seq_lens[:rows],
            scale=spec.scale,
            window=spec.window,
            longest=batch.longest_decode,
        )
