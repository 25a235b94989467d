"""ModelRunner: executes steps on a real model. Inputs in, forward pass, logits of the sampling rows, one token each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.attention.base import AttentionBackend, Batch, DecodeWork, ForwardContext, KVCache
from nanoengine.attention.decode_plan import DecodePlanner
from nanoengine.models.registry import CausalLM
from nanoengine.outputs import PromptScores, TokenLogprob
from nanoengine.runner.base import StepResult
from nanoengine.runner.cuda_graphs import StepGraphs, batch_sizes
from nanoengine.runner.inputs import FlatInputs, Staging, flatten, padded, words
from nanoengine.runner.masked_rows import MaskedRows
from nanoengine.runner.piecewise_graphs import PiecewiseGraphs
from nanoengine.runner.prompt_graphs import PromptGraphs, prompt_sizes
from nanoengine.sampling.sampler import Logprobs, Sampler
from nanoengine.sampling.scores import Scores, score
from nanoengine.scheduling.step import BoolArray, IntArray, Scoring, Step
from nanoengine.structured.masks import words as mask_words

_SPECIAL_ROWS = 64  # at once: bounds the float32 copies of logits that penalties and log-probabilities work on


IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step, from which buffers are sized."""

    rows: int
    tokens: int
    blocks: int  # of one row


class ModelRunner:
    """Owns the KV cache and all device state that is kept per slot."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: KVCache,
        sampler: Sampler,
        *,
        limits: StepLimits,
        device: torch.device,
        depth: int = 0,
        planner: DecodePlanner | None = None,
    ) -> None:
        """``depth`` steps may be in flight while another one is launched; ``planner`` if the backend wants plans."""
        self.num_blocks = cache.keys[0].shape[0]
        self.depth = depth
        self._model = model
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self.device = device
        self._limits = limits
        self._planner = planner
        self._graphs: StepGraphs | None = None
        self._mask_graphs: StepGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None
        self._prompts: PromptGraphs | None = None
        # The token that each slot's sequence decodes next stays on the device: a step needs none from the host. The
        # slot after the last is the padding's, and so is the row.
        self._last_token = torch.zeros(limits.rows + 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(limits.rows + 1, dtype=torch.int32, device=device)
        plans = [] if planner is None else [math.prod(shape) for shape in planner.shapes(limits.rows, planner.shares)]
        self._pads = (*(limits.rows,) * 4, *plans)
        self._staging = Staging(_staging_words(limits, self._pads), depth + 1, device)
        self._masked = MaskedRows(limits.rows, mask_words(sampler.vocab_size), device)
        kv_heads = cache.keys[0].shape[2]
        self._done = torch.zeros(limits.rows, kv_heads, dtype=torch.int32, device=device)  # see DecodeWork
        self._num_logprobs = np.full(limits.rows, -1, np.int32)  # likeliest tokens asked for; -1: no logprobs

    def mask_memory(self) -> IntArray:
        return self._masked.masks

    # -- launch --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> _Launched:
        inputs = flatten(step, self._cache.block_size)
        for admission in step.admissions:
            self._sampler.admit(admission)
            asked = admission.params.logprobs
            self._num_logprobs[admission.slot] = -1 if asked is None else asked
        graph: Callable[[], None] | None = None
        if self._graphs is not None and step.num_decodes == len(step.slots):
            graph = self._stage(step, inputs)
        elif self._prompts is not None:
            graph = self._prompts.stage(step, inputs)
        scores: list[Scores] = []
        if graph is None:
            logits, scores = self._eager(step, inputs)
        else:
            graph()
            logits = self._logits[: len(inputs.sampled_rows), : self._sampler.vocab_size]

        rows = inputs.sampled_rows
        slots, positions = step.slots[rows], inputs.seq_lens[rows]  # the token sampled comes right after the context
        special = self._sampler.special(slots, positions)
        constrained = np.searchsorted(rows, step.constrained)
        graphs = self._mask_graphs if graph is not None else None
        sampling = _Sampling(logits, rows, slots, positions, constrained, special[constrained], graphs)
        special[constrained] = False
        self._sample_specially(sampling, np.flatnonzero(special))
        return _Launched(self, step, sampling, scores)

    def _eager(self, step: Step, inputs: FlatInputs) -> tuple[Tensor, list[Scores]]:
        """Any step, what it does beside the model one operation after the other. Returns the logits of the rows that
        sample, in order, and what ``step.scorings`` ask for."""
        admitted = np.array([admission.slot for admission in step.admissions], np.int32)
        rows, decodes = inputs.sampled_rows, step.num_decodes
        plans: tuple[IntArray, ...] = ()
        if self._planner is not None and decodes:
            prefixes = self._planner.prefixes(step.block_table[:decodes], inputs.seq_lens[:decodes])
            plans = self._planner.plan(inputs.seq_lens[:decodes], decodes, prefixes)
        arrays = (
            inputs.query_start, inputs.seq_lens, step.block_table, inputs.positions, inputs.kv_slots, step.tokens,
            step.slots[:decodes], inputs.sampled_at, step.slots[rows], inputs.seq_lens[rows],
            admitted, self._sampler.settings(admitted), *plans,
        )  # fmt: skip
        (
            query_start, seq_lens, block_table, positions, kv_slots, tokens,
            decoded, sampled_at, sampled_slots, sampled_positions,
            admitted_slots, settings, *work,
        ) = self._staging.send(arrays)  # fmt: skip
        fused = self._sampler.fused
        if fused is not None and len(admitted):
            fused.update(admitted_slots, settings)
        batch = Batch(
            num_decodes=decodes,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            kv_slots=kv_slots.long(),
            query_lens_host=tuple(step.counts.tolist()),
            seq_lens_host=tuple(inputs.seq_lens.tolist()),
            work=DecodeWork.views(work, self._planner, self._done) if self._planner is not None and work else {},
        )
        input_ids = self._last_token.index_select(0, decoded)
        if len(tokens):
            input_ids = torch.cat((input_ids, tokens))
        ctx = ForwardContext(self._backend, self._cache, batch)
        hidden = None if self._pieces is None else self._pieces(input_ids, positions, ctx)
        if hidden is None:
            hidden = self._model(input_ids, positions, ctx)
        scores = []
        for scoring in step.scorings:
            begin = int(inputs.query_start[scoring.row]) + scoring.first - 1 - int(step.starts[scoring.row])
            scores.append(self._score(hidden[begin : begin + len(scoring.targets)], scoring))
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, sampled_at)
        logits = self._model.logits(hidden)[:, : self._sampler.vocab_size]
        if fused is not None and len(rows):
            fused(logits, sampled_slots, sampled_positions, self._tokens[: len(rows)], self._last_token)
        return logits, scores

    def _score(self, hidden: Tensor, scoring: Scoring) -> Scores:
        """Log-probabilities of tokens from the hidden states [n, hidden_size] before each, a few rows at a time: the
        logits of a whole chunk of a prompt would take gigabytes."""
        targets = torch.from_numpy(scoring.targets.astype(np.int64)).to(self.device)
        parts = []
        for begin in range(0, len(hidden), _SPECIAL_ROWS):
            some = slice(begin, begin + _SPECIAL_ROWS)
            logits = self._model.logits(hidden[some])[:, : self._sampler.vocab_size]
            parts.append(score(logits, targets[some], scoring.top))
        return Scores(*map(torch.cat, zip(*parts, strict=True)))

    @torch.inference_mode()
    def constrain(self, sampling: _Sampling, masks: IntArray) -> None:
        """Sample the constrained rows of a step's logits again, now that their masks are known."""
        at, special = sampling.constrained, sampling.special
        slots, positions, specials = sampling.slots[at], sampling.positions[at], np.count_nonzero(special)
        if specials < len(at):
            rows = at
            if specials:  # their masks stay where they are, and are nobody's
                rows, slots = np.where(special, self._limits.rows, at), np.where(special, -1, slots)
            graphs, count = sampling.graphs, len(at)
            size = None if graphs is None else graphs.size(count)
            self._masked.write(rows, slots, positions, size or count)
            self._masked.send(size or count)
            if graphs is None or size is None:
                self._sample_masked(sampling.logits, count)
            else:
                graphs.replay(size)
        if specials:
            self._sample_specially(sampling, at[special], masks[special])

    def _sample_masked(self, logits: Tensor, count: int) -> None:
        """Sample those of ``logits`` that the first rows with masks name, by the device's sampler."""
        assert self._sampler.fused is not None
        rows, slots, positions, masks = self._masked.views(count)
        self._sampler.fused(logits, slots, positions, self._tokens, self._last_token, rows, masks)

    def tokens(self, count: int) -> Tensor:
        return self._tokens[:count]

    def _sample_specially(self, sampling: _Sampling, at: IndexArray, masks: IntArray | None = None) -> None:
        """Sample those rows of a step's logits again that the device's sampler cannot, a few at a time."""
        for begin in range(0, len(at), _SPECIAL_ROWS):
            some = at[begin : begin + _SPECIAL_ROWS]
            slots = sampling.slots[some]
            where = None if len(some) == len(sampling.rows) else torch.from_numpy(some).to(self.device)
            logits = sampling.logits if where is None else sampling.logits[where]
            few = None if masks is None else masks[begin : begin + _SPECIAL_ROWS]
            sampled = self._sampler(logits, slots, sampling.positions[some], few)
            tokens = sampled.tokens.int()
            self._tokens[slice(len(some)) if where is None else where] = tokens
            self._last_token[torch.from_numpy(slots.astype(np.int64)).to(self.device)] = tokens
            if sampled.logprobs is not None:
                sampling.logprobs.append((sampling.rows[some], self._num_logprobs[slots], sampled.logprobs))

    # -- graphs --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], token_counts: Sequence[int] = ()) -> None:
        """Record decode steps of these numbers of rows (ascending) as CUDA graphs, which steps that only decode use,
        and for these numbers of tokens (ascending) other steps: whole, if they are few short prompts, or what comes
        between their attentions."""
        limits, device, planner = self._limits, self.device, self._planner
        assert planner is not None
        self._slots, self._seq_lens, self._positions, self._kv_slots, *self._work = self._staging.fixed(self._pads)
        self._block_table = torch.zeros(limits.rows, limits.blocks, dtype=torch.int32, device=device)
        self._query_start = torch.arange(limits.rows + 1, dtype=torch.int32, device=device)
        # One for all sizes: each graph would keep its own alive.
        vocab_size, dtype = self._model.config.vocab_size, self._model.dtype
        self._logits = torch.zeros(limits.rows + 1, vocab_size, dtype=dtype, device=device)
        pool = torch.cuda.graph_pool_handle()
        if token_counts:
            pieces = PiecewiseGraphs(self._model, self._cache, token_counts, device)
            pieces.capture(pool)
            self._pieces = pieces
        prompts = None
        if sizes_of_prompts := prompt_sizes(token_counts):
            prompts = PromptGraphs(
                self._model, self._cache, self._sampler, self._staging, sizes_of_prompts, block_table=self._block_table,
                logits=self._logits, tokens=self._tokens, last_token=self._last_token,
            )  # fmt: skip
            prompts.capture(pool)
        self._prompts = prompts
        for buffer in (self._seq_lens, self._positions, self._kv_slots, *self._work):
            buffer.zero_()
        self._slots.fill_(limits.rows)
        variants = {False: sizes}
        if planner.shares:
            # Few have prefixes worth sharing, and those that do save more than padding costs: a coarse grid will do.
            coarse = batch_sizes(limits.rows, fineness=2)
            variants[True] = [size for size in sizes if size in coarse]
        graphs = StepGraphs(self._decode, variants, device)
        graphs.capture(pool)
        self._graphs = graphs
        none = np.empty(0, np.int32)
        self._masked.write(none, none, none, limits.rows)
        self._masked.send(limits.rows)
        masked = StepGraphs(self._decode_masked, {False: sizes}, device)
        masked.capture(pool)
        self._mask_graphs = masked

    def _stage(self, step: Step, inputs: FlatInputs) -> Callable[[], None] | None:
        """Send a step of decodes to where its graph reads it; returns that graph, to be run, or None if there is none
        for so many rows."""
        assert self._graphs is not None
        assert self._planner is not None
        rows = len(step.slots)
        prefixes = self._planner.prefixes(step.block_table, inputs.seq_lens)
        shared = prefixes is not None
        size = self._graphs.size(rows, shared)
        if size is None:
            return None
        arrays = (
            padded(step.slots, size, self._limits.rows),
            padded(inputs.seq_lens, size, 0),
            padded(inputs.positions, size, 0),
            padded(inputs.kv_slots, size, -1),
            *self._planner.plan(inputs.seq_lens, size, prefixes),
            step.block_table,
        )
        pads = self._pads if shared or not self._planner.shares else self._pads[:-2]
        *_, at, _ = self._staging.move(arrays, pads)
        self._block_table[:rows, : step.block_table.shape[1]].copy_(self._staging.view(at, step.block_table.shape))
        return partial(self._graphs.replay, size, shared)

    def _decode_masked(self, rows: int, _: bool) -> None:
        """Sample rows of the logits of a graph again."""
        self._sample_masked(self._logits[:, : self._sampler.vocab_size], rows)

    def _decode(self, rows: int, shared: bool) -> None:
        """A decode step of the first rows of the buffers, from the token embedding to the sampled token."""
        assert self._planner is not None
        slots, seq_lens = self._slots[:rows], self._seq_lens[:rows]
        shapes = self._planner.shapes(rows, shared)
        work = [buffer[: math.prod(shape)].view(shape) for buffer, shape in zip(self._work, shapes, strict=False)]
        batch = Batch(
            num_decodes=rows,
            query_start=self._query_start[: rows + 1],
            seq_lens=seq_lens,
            block_table=self._block_table[:rows],
            kv_slots=self._kv_slots[:rows],
            query_lens_host=(),
            seq_lens_host=(),
            work=DecodeWork.views(work, self._planner, self._done),
        )
        input_ids = self._last_token.index_select(0, slots)
        context = ForwardContext(self._backend, self._cache, batch)
        hidden = self._model(input_ids, self._positions[:rows], context)
        logits = self._model.logits(hidden, self._logits[:rows])
        assert self._sampler.fused is not None
        self._sampler.fused(
            logits[:, : self._sampler.vocab_size], slots, seq_lens, self._tokens[:rows], self._last_token
        )


def _staging_words(limits: StepLimits, pads: Sequence[int]) -> int:
    rows, tokens = limits.rows, limits.tokens
    decodes = (*pads, rows * limits.blocks)
    flat = (rows + 1, rows, rows * limits.blocks, *(tokens,) * 3, *(rows,) * 5, rows * 8, *pads)
    return max(words(decodes), words(flat))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The rows of a step that sample."""

    logits: Tensor  # [n, tokens]
    rows: IntArray  # [n] of the step
    slots: IntArray  # [n]
    positions: IntArray  # [n]
    constrained: IndexArray  # [m] which of them wait for their masks
    special: BoolArray  # [m] which of those the device's sampler cannot sample
    graphs: StepGraphs | None = None  # for rows with masks, if the logits are where these read them
    logprobs: list[tuple[IntArray, IntArray, Logprobs]] = field(default_factory=list)  # (rows, how many asked for, ...)


class _Launched:
    """A step whose tokens may still be on the way from the device."""

    def __init__(self, runner: ModelRunner, step: Step, sampling: _Sampling, scores: list[Scores]) -> None:
        self._runner, self._num_rows, self._rows = runner, len(step.slots), sampling.rows
        self._scorings = step.scorings
        self._waiting = (sampling, scores)
        if not len(sampling.constrained):
            self._copy(sampling, scores)

    def constrain(self, masks: IntArray) -> None:
        sampling, scores = self._waiting
        self._runner.constrain(sampling, masks)
        self._copy(sampling, scores)

    def _copy(self, sampling: _Sampling, scores: list[Scores]) -> None:
        """All rows are sampled: start the way to the host."""
        del self._waiting  # and with it the logits
        self._tokens = _to_host(self._runner.tokens(len(self._rows))) if len(self._rows) else None
        self._logprobs = [(r, asked, Logprobs(*map(_to_host, found))) for r, asked, found in sampling.logprobs]
        self._scores = [Scores(*map(_to_host, some)) for some in scores]
        # Waited for alone: what was launched since need not be done.
        self._copied = torch.cuda.Event() if self._runner.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def result(self) -> StepResult:
        tokens: IntArray = np.zeros(self._num_rows, np.int32)
        if self._copied is not None:
            self._copied.synchronize()
        if self._tokens is not None:
            tokens[self._rows] = self._tokens.numpy()
        logprobs: dict[int, TokenLogprob] = {}
        for rows, asked, found in self._logprobs:
            chosen, top_ids, top_logprobs = (tensor.numpy() for tensor in found)
            for i, (row, k) in enumerate(zip(rows.tolist(), asked.tolist(), strict=True)):
                if k >= 0:
                    top = zip(top_ids[i, :k].tolist(), top_logprobs[i, :k].tolist(), strict=True)
                    logprobs[row] = TokenLogprob(int(tokens[row]), float(chosen[i]), tuple(top))
        scores = []
        for scoring, some in zip(self._scorings, self._scores, strict=True):
            scores.append(PromptScores(scoring.first, *(tensor.numpy().tobytes() for tensor in some)))
        return StepResult(tokens, logprobs, tuple(scores))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is there when the device has come so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
