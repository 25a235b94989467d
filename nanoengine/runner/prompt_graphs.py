"""CUDA graphs of steps that are a few short prompts, or ends of prompts, and nothing else: one launch a step.

Where load is low, such a step is what a first token waits for, and launching it takes longer than computing it: 512
tokens of a 0.6B model 2.8 ms in pieces (``piecewise_graphs.py``), of which the GPU needs 2.0 (an H200). Our own prefill
kernel needs to know nothing of the rows on the host, so a graph can hold it, whichever library computes longer prompts:
none is faster there (``attention/flash4.py``). Decodes beside prompts would need graphs for each number of either.

There is a graph for each of a grid of token counts. Missing tokens are computed and stored nowhere; missing rows have
no tokens, and what is sampled for them goes to the slot after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanoengine.attention.base import Batch, ForwardContext, KVCache
from nanoengine.models.registry import CausalLM
from nanoengine.runner.cuda_graphs import StepGraphs
from nanoengine.runner.inputs import FlatInputs, Staging, padded
from nanoengine.sampling.sampler import Sampler
from nanoengine.scheduling.step import Step

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool

_MOST_ROWS = 8
_MOST_TOKENS = 1024  # from where on the GPU takes longer than launching in pieces


def prompt_sizes(token_counts: Sequence[int]) -> list[int]:
    """Those of a grid of token counts that there are graphs for."""
    return [size for size in token_counts if size <= _MOST_TOKENS]


class PromptGraphs:
    """Of one model over one cache, for these numbers of tokens (ascending)."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        sampler: Sampler,
        staging: Staging,
        sizes: Sequence[int],
        *,
        block_table: Tensor,
        logits: Tensor,
        tokens: Tensor,
        last_token: Tensor,
    ) -> None:
        """What the runner's other graphs use too, one at a time: ``block_table`` int32 [slots, width], ``logits``
        [slots + 1, vocab], ``tokens`` and ``last_token`` int32 [slots + 1]."""
        from nanoengine.attention.triton import TritonAttention  # imports triton

        self._attention = TritonAttention()
        self._model, self._cache, self._sampler, self._staging = model, cache, sampler, staging
        self._logits, self._tokens, self._last_token = logits, tokens, last_token
        self._padding_slot = len(block_table)
        self._rows = rows = min(_MOST_ROWS, len(block_table))
        self._block_table = block_table[:rows]
        self._pads = (rows + 1, rows, *(sizes[-1],) * 3, *(rows,) * 3)
        self._inputs = staging.fixed(self._pads)
        self._graphs = StepGraphs(self._run, {False: sizes}, block_table.device)

    def capture(self, pool: Pool) -> None:
        """Record all graphs; ``pool`` is memory that other graphs may have as well."""
        for buffer in self._inputs:
            buffer.zero_()
        *_, kv_slots, _, slots, _ = self._inputs
        kv_slots.fill_(-1)
        slots.fill_(self._padding_slot)
        self._graphs.capture(pool)

    def stage(self, step: Step, inputs: FlatInputs) -> Callable[[], None] | None:
        """Send a step to where its graph reads it; returns that graph, to be run, or None if there is none for it."""
        rows, sampled = self._rows, inputs.sampled_rows
        if step.num_decodes or len(step.slots) > rows or step.scorings:
            return None
        size = self._graphs.size(len(step.tokens))
        if size is None:
            return None
        assert self._sampler.fused is not None
        admitted = np.array([admission.slot for admission in step.admissions], np.int32)
        arrays = (
            padded(inputs.query_start, rows + 1, len(step.tokens)),
            padded(inputs.seq_lens, rows, 0),
            padded(step.tokens, size, 0),
            padded(inputs.positions, size, 0),
            padded(inputs.kv_slots, size, -1),
            padded(inputs.sampled_at, rows, 0),
            padded(step.slots[sampled], rows, self._padding_slot),
            padded(inputs.seq_lens[sampled], rows, 0),
            step.block_table,
            admitted,
            self._sampler.settings(admitted),
        )
        block_table, slots, settings = self._staging.send(arrays, self._pads)[-3:]
        self._block_table[: len(block_table), : block_table.shape[1]].copy_(block_table)
        if len(admitted):
            self._sampler.fused.update(slots, settings)
        return partial(self._graphs.replay, size)

    def _run(self, tokens: int, _: bool) -> None:
        """A step of the first tokens of the buffers, from the token embedding to the sampled token."""
        assert self._sampler.fused is not None
        query_start, seq_lens, ids, positions, kv_slots, sampled_at, slots, sampled_positions = self._inputs
        batch = Batch(
            num_decodes=0,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=self._block_table,
            kv_slots=kv_slots[:tokens],
            query_lens_host=(),
            seq_lens_host=(),
        )
        context = ForwardContext(self._attention, self._cache, batch)
        hidden = self._model(ids[:tokens], positions[:tokens], context).index_select(0, sampled_at)
        logits = self._model.logits(hidden, self._logits[: self._rows])[:, : self._sampler.vocab_size]
        self._sampler.fused(logits, slots, sampled_positions, self._tokens[: self._rows], self._last_token)
