"""Sampler: logits of one step -> one token per row, and log-probabilities for rows that asked.

In vLLM's order: masks (grammar, allowed tokens, bad words), logit bias, min_tokens, penalties, temperature, min-p,
top-k, top-p, draw. Log-probabilities are of the raw distribution, before all of that: they say what the model thinks,
the sampled token's is finite whatever was forbidden beside it, and they do not change with how it is sampled.

Settings are a table indexed by slot, on the host. A step gathers its rows from it, decides from them which work is
needed at all (a step of greedy rows is one argmax, unfiltered rows sort nothing), and sends the few numbers that the
device needs. Each row runs through the filters that it asked for and no others, so its token does not depend on its
company; with random numbers that are a function of (seed, position), it does not depend on history either.

A row that cannot be sampled, because its logits hold a NaN or +inf or are all -inf, yields the end-of-sequence token
(id 0 for a model without one): the request ends, and the engine and the other rows go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.sampling import filters
from nanoengine.sampling.bias import Biases
from nanoengine.sampling.penalties import Penalties
from nanoengine.sampling.random import request_seed, uniform
from nanoengine.scheduling.step import Admission, BoolArray, IntArray

if TYPE_CHECKING:
    from nanoengine.sampling.device import DeviceSampler

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),  # 0: off
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("penalised", np.bool_),
        ("biased", np.bool_),
        ("special", np.bool_),  # for one of these, or for log-probabilities: the fused kernel cannot sample it
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("seed", np.uint64),
        ("stoppable_from", np.int64),  # position of the first token that may end the sequence
        ("logprobs", np.int32),  # likeliest tokens asked for; -1: no log-probabilities at all
    ]
)

Rows = npt.NDArray[np.void]  # of dtype _ROW

NO_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON cannot say; the value that OpenAI's API uses


class Logprobs(NamedTuple):
    """Natural log-probabilities. Rows that did not ask hold zeros; k is the most that any row of the step asked for."""

    chosen: Tensor  # float32 [n]
    top_ids: Tensor  # int64 [n, k], likeliest first
    top_logprobs: Tensor  # float32 [n, k]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled, on the device: nothing here has waited for it."""

    tokens: Tensor  # int64 [n]
    logprobs: Logprobs | None  # None: no row asked


class Sampler:
    """Samples for up to ``num_slots`` sequences at once. ``seed`` is the engine's, for requests that bring none."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        seed: int,
        fused: DeviceSampler | None = None,
    ) -> None:
        """``vocab_size`` without padding. ``fused`` takes the rows that it can; the others, or without it all, are
        ``special``."""
        self.fused = fused
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seed = seed
        self._fallback = next((i for i in eos_token_ids if i < vocab_size), 0)
        self._table = np.zeros(num_slots, dtype=_ROW)
        self._ending_ids = np.zeros((num_slots, max(1, len(eos_token_ids))), dtype=np.int64)
        self._penalties = Penalties(num_slots, vocab_size, device)
        self._biases = Biases(device)
        self._masking = _masking_table(device)
        self._masked = torch.empty(0, 0, device=device)

    def admit(self, admission: Admission) -> None:
        """Set up the slot of a sequence that starts, or starts again after a preemption, before its first row."""
        slot, params = admission.slot, admission.params
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        ending_ids = [i for i in (*self._eos_token_ids, *params.stop_token_ids) if i < self.vocab_size]
        row = self._table[slot]
        row["temperature"] = max(params.temperature, 1e-30) if params.temperature else 0  # no underflow into greedy
        row["top_k"] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        row["top_p"] = params.top_p
        row["min_p"] = params.min_p
        row["penalised"] = penalised
        row["biased"] = params.logit_bias is not None
        row["special"] = penalised or params.logit_bias is not None or params.logprobs is not None
        row["repetition"] = params.repetition_penalty
        row["presence"] = params.presence_penalty
        row["frequency"] = params.frequency_penalty
        row["seed"] = request_seed(params.seed, self._seed, admission.key)
        row["stoppable_from"] = len(admission.prompt) + params.min_tokens if ending_ids else 0
        row["logprobs"] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        if penalised:
            self._penalties.admit(slot, admission.prompt, admission.output)
        if params.logit_bias is not None:
            self._biases.admit(slot, params.logit_bias)
        if params.min_tokens and ending_ids:
            self._set_ending_ids(slot, ending_ids)

    def special(self, slots: IntArray, positions: IntArray) -> BoolArray:
        """Which rows the fused kernel cannot sample, masks apart; arguments as for a call."""
        if self.fused is None:
            return np.ones(len(slots), np.bool_)
        # Two columns: to gather whole rows takes ten times as long, 27 us of a step of 64.
        return self._table["special"][slots] | (positions < self._table["stoppable_from"][slots])

    def settings(self, slots: IntArray) -> IntArray:
        """What the fused kernel has to know of these slots: int32 [n, 8], to be sent to ``fused.update``."""
        if self.fused is None:
            return np.empty((len(slots), 0), np.int32)
        rows = self._table[slots]
        return self.fused.pack(*(rows[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")))

    def __call__(self, logits: Tensor, slots: IntArray, positions: IntArray, masks: IntArray | None = None) -> Sampled:
        """Sample row i of ``logits`` [n, vocab] (any float dtype, left as it is) for the sequence in ``slots[i]``.

        ``positions[i]`` is the index in the sequence of the token that is sampled: prompt length + index in the output.
        ``masks``, if any, are one for each row, of the form that ``nanoengine.structured.masks`` describes.
        """
        rows = self._table[slots]
        tokens = self._choose(self._adjust(logits, slots, rows, positions, masks), rows, positions)
        penalised = np.flatnonzero(rows["penalised"])
        if len(penalised):
            self._penalties.record(slots[penalised], tokens[self._send(penalised)])
        return Sampled(tokens, self._logprobs(logits, tokens, rows))

    def _adjust(
        self, logits: Tensor, slots: IntArray, rows: Rows, positions: IntArray, masks: IntArray | None = None
    ) -> Tensor:
        """Logits after masks, biases, min_tokens, penalties: a float32 copy if any row has one, else the argument."""
        biased = np.flatnonzero(rows["biased"])
        unstoppable = np.flatnonzero(positions < rows["stoppable_from"])
        penalised = np.flatnonzero(rows["penalised"])
        if masks is not None:
            logits = self._mask(logits, masks)
        elif len(biased) or len(unstoppable) or len(penalised):
            logits = logits.to(torch.float32, copy=True)
        if len(biased):
            self._biases.apply(logits, biased, slots[biased])
        if len(unstoppable):
            ids = self._send(self._ending_ids[slots[unstoppable]])
            logits[self._send(unstoppable).unsqueeze(1), ids] = -torch.inf
        if len(penalised):
            settings = [self._send(rows[name][penalised]) for name in ("repetition", "presence", "frequency")]
            self._on_rows(logits, penalised, lambda some: self._penalties.apply(some, slots[penalised], *settings))
        return logits

    def _mask(self, logits: Tensor, masks: IntArray) -> Tensor:
        """Float32 ``logits`` [n, vocab], -inf where ``masks`` int32 [n, words] forbid a token. Until the next call."""
        # Eight tokens are looked up at once and added, in a buffer that stays: fresh memory of this size costs more
        # than what is written to it. Unpacked bits and torch's masked_fill take five times as long on CPU.
        rows, width = len(logits), 32 * masks.shape[1]
        if self._masked.shape[0] < rows or self._masked.shape[1] != width:
            self._masked = torch.empty(rows, width, device=self._device)
        masked = self._masked[:rows]
        octets = self._send(masks.view(np.uint8).reshape(-1)).int()
        torch.index_select(self._masking, 0, octets, out=masked.view(-1, 8))
        masked = masked[:, : logits.shape[1]]
        return masked.add_(logits)

    def _choose(self, logits: Tensor, rows: Rows, positions: IntArray) -> Tensor:
        greedy = rows["temperature"] == 0
        if greedy.all():
            return self._greedy(logits)
        if not greedy.any():
            return self._draw(logits, rows, positions)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        where = self._send(np.flatnonzero(greedy))
        tokens[where] = self._greedy(logits[where])
        where = self._send(np.flatnonzero(~greedy))
        tokens[where] = self._draw(logits[where], rows[~greedy], positions[~greedy])
        return tokens

    def _greedy(self, logits: Tensor) -> Tensor:
        tokens = filters.argmax(logits)
        best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return torch.where(best.isfinite(), tokens, self._fallback)

    def _draw(self, logits: Tensor, rows: Rows, positions: IntArray) -> Tensor:
        weights = filters.weigh(logits, self._send(rows["temperature"]))
        if rows["min_p"].any():
            filters.keep_min_p(weights, self._send(rows["min_p"]))
        if rows["top_k"].any():
            at = np.flatnonzero(rows["top_k"])
            top_k = rows["top_k"][at]
            self._on_rows(weights, at, partial(filters.keep_top_k, top_k=self._send(top_k), most=int(top_k.max())))
        if (rows["top_p"] < 1).any():
            at = np.flatnonzero(rows["top_p"] < 1)
            self._on_rows(weights, at, partial(filters.keep_top_p, top_p=self._send(rows["top_p"][at])))
        tokens, drawn = filters.draw(weights, self._send(uniform(rows["seed"], positions)))
        return torch.where(drawn, tokens, self._fallback)

    def _on_rows(self, tensor: Tensor, at: npt.NDArray[np.intp], change: Callable[[Tensor], None]) -> None:
        """``change`` the rows ``at`` of ``tensor`` in place, and no others."""
        if len(at) == len(tensor):
            change(tensor)
        else:
            where = self._send(at)
            some = tensor[where]
            change(some)
            tensor[where] = some

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: Rows) -> Logprobs | None:
        at = np.flatnonzero(rows["logprobs"] >= 0)
        if not len(at):
            return None
        where = self._send(at)
        logprobs = logits[where].float().log_softmax(dim=1)
        chosen = logprobs.gather(1, tokens[where].unsqueeze(1)).squeeze(1)
        top = logprobs.topk(int(rows["logprobs"].max()), dim=1)
        result = Logprobs(
            chosen.new_zeros(len(rows)),
            tokens.new_zeros(len(rows), top.indices.shape[1]),
            chosen.new_zeros(len(rows), top.indices.shape[1]),
        )
        result.chosen[where] = chosen.nan_to_num(nan=NO_LOGPROB, neginf=NO_LOGPROB)
        result.top_ids[where] = top.indices
        result.top_logprobs[where] = top.values.nan_to_num(nan=NO_LOGPROB, neginf=NO_LOGPROB)
        return result

    def _set_ending_ids(self, slot: int, ids: list[int]) -> None:
        spare = len(ids) - self._ending_ids.shape[1]
        if spare > 0:
            self._ending_ids = np.pad(self._ending_ids, ((0, 0), (0, spare)), mode="edge")
        self._ending_ids[slot] = ids[0]  # pads with an id that is masked anyway
        self._ending_ids[slot, : len(ids)] = ids

    def _send(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self._device, non_blocking=True)


def _masking_table(device: torch.device) -> Tensor:
    """What each value of a mask's byte adds to the logits of its eight tokens, the lowest bit's first: [256, 8]."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf).to(device)
