"""ModelRunner: executes steps on a real model. Inputs in, forward pass, logits of the sampling rows, one token each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.base import AttentionBackend, Batch, ForwardContext, KVCache
from nanoengine.models.registry import CausalLM
from nanoengine.outputs import TokenLogprob
from nanoengine.runner.base import StepResult
from nanoengine.runner.inputs import LongArray, flatten
from nanoengine.sampling.sampler import Sampled, Sampler
from nanoengine.scheduling.step import IntArray, Step

_NONE: IntArray = np.empty(0, np.int32)


class ModelRunner:
    """Owns the KV cache and all device state that is kept per slot."""

    depth = 0

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: KVCache,
        sampler: Sampler,
        *,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.num_blocks = cache.keys[0].shape[0]
        self._model = model
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._device = device
        # The token that each slot's sequence decodes next stays on the device: a step needs no token from the host.
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._num_logprobs = np.full(num_slots, -1, np.int32)  # likeliest tokens asked for; -1: no logprobs

    @torch.inference_mode()
    def launch(self, step: Step) -> _Launched:
        for admission in step.admissions:
            self._sampler.admit(admission)
            asked = admission.params.logprobs
            self._num_logprobs[admission.slot] = -1 if asked is None else asked
        inputs = flatten(step, self._cache.block_size)
        slots = self._to_device(step.slots.astype(np.int64))
        batch = Batch(
            num_decodes=step.num_decodes,
            query_start=self._to_device(inputs.query_start),
            seq_lens=self._to_device(inputs.seq_lens),
            block_table=self._to_device(step.block_table),
            kv_slots=self._to_device(inputs.kv_slots),
            query_lens_host=tuple(step.counts.tolist()),
            seq_lens_host=tuple(inputs.seq_lens.tolist()),
        )
        input_ids = self._last_token[slots[: step.num_decodes]]
        if len(step.tokens):
            input_ids = torch.cat((input_ids, self._to_device(step.tokens.astype(np.int64))))
        context = ForwardContext(self._backend, self._cache, batch)
        hidden = self._model(input_ids, self._to_device(inputs.positions), context)

        rows = inputs.sampled_rows
        if not len(rows):
            return _Launched(len(step.slots), rows, None, _NONE)
        if len(rows) < len(hidden):
            hidden = hidden[self._to_device(inputs.sampled_at)]
        # The token sampled comes right after the row's context.
        sampled = self._sampler(self._model.logits(hidden), step.slots[rows], inputs.seq_lens[rows])
        self._last_token[slots[self._to_device(rows)]] = sampled.tokens
        return _Launched(len(step.slots), rows, sampled, self._num_logprobs[step.slots[rows]])

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class _Launched:
    """A step whose tokens may still be on the way from the device."""

    def __init__(self, num_rows: int, rows: LongArray, sampled: Sampled | None, num_logprobs: IntArray) -> None:
        self._num_rows, self._rows, self._sampled, self._num_logprobs = num_rows, rows, sampled, num_logprobs

    def result(self) -> StepResult:
        tokens: IntArray = np.zeros(self._num_rows, np.int32)
        if self._sampled is None:
            return StepResult(tokens, {})
        tokens[self._rows] = self._sampled.tokens.cpu().numpy()
        return StepResult(tokens, self._logprobs(tokens))

    def _logprobs(self, tokens: IntArray) -> dict[int, TokenLogprob]:
        assert self._sampled is not None
        if self._sampled.logprobs is None:
            return {}
        chosen, top_ids, top_logprobs = (t.cpu().numpy() for t in self._sampled.logprobs)
        result = {}
        for i, (row, k) in enumerate(zip(self._rows.tolist(), self._num_logprobs.tolist(), strict=True)):
            if k >= 0:
                top = zip(top_ids[i, :k].tolist(), top_logprobs[i, :k].tolist(), strict=True)
                result[row] = TokenLogprob(int(tokens[row]), float(chosen[i]), tuple(top))
        return result
