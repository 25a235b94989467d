"""Engine: requests in, tokens out, one step at a time. The synchronous core that everything else wraps.

Read this file first: ``step`` is the whole engine in a dozen lines.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from nanoengine.cache.blocks import BlockPool
from nanoengine.cache.events import PrefixEvents, PrefixLog
from nanoengine.config import EngineConfig
from nanoengine.errors import Refusal
from nanoengine.outputs import EngineInfo, Load, MemorySummary, PromptScores, TokenLogprob
from nanoengine.runner.base import PendingStep
from nanoengine.runner.build import build_runner
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.pace import StepTimes
from nanoengine.scheduling.policies import POLICIES
from nanoengine.scheduling.scheduler import Finished, Limits, Retired, Scheduler
from nanoengine.scheduling.step import IntArray, KeyArray, Step
from nanoengine.structured.compiler import Compiled, Compiler
from nanoengine.structured.constraints import Constraints
from nanoengine.structured.gate import Gate, Request
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought: tokens[i] is a new token of request keys[i]."""

    keys: KeyArray  # int64 [n]
    tokens: IntArray  # int32 [n]
    finished: list[Finished] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)  # (key, prompt tokens found in the prefix cache)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by index into keys, where asked for
    refused: list[tuple[int, Refusal]] = field(default_factory=list)  # by key: ended, and not as asked
    scores: list[tuple[int, PromptScores]] = field(default_factory=list)  # (key, some of its prompt's, in order)


class Engine:
    """One model on one device. Not thread-safe: one loop calls ``add``, ``abort`` and ``step``."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...] = (),
        num_tokens: int | None = None,
        *,
        log_prefixes: bool = False,
    ) -> None:
        """Load the model. ``eos_token_ids``: those of its tokenizer, if there is one; the model's own are added.

        ``num_tokens`` is how many ids its tokenizer has: those beyond are padding, and never sampled.
        ``log_prefixes``: somebody will take ``prefix_events`` after each step.

        Raises ``ModelLoadError`` if that fails, ``ValueError`` if the settings do not fit the model.
        """
        built = build_runner(config, eos_token_ids, num_tokens)
        self.info: EngineInfo = built.info
        self._runner = built.runner
        self._memory_summary = built.memory_summary
        self._prefix_log = PrefixLog(config.block_size) if log_prefixes and config.enable_prefix_caching else None
        self._pool = BlockPool(built.runner.num_blocks, self._prefix_log)
        limits = Limits(
            max_num_seqs=built.info.max_num_seqs,
            max_num_batched_tokens=built.info.max_num_batched_tokens,
            max_prefill_chunk=config.max_prefill_chunk or built.info.max_num_batched_tokens,
            max_model_len=built.info.max_model_len,
            block_size=config.block_size,
            vocab_size=built.info.vocab_size,
            watermark_blocks=int(config.watermark * built.runner.num_blocks),
            prefix_caching=config.enable_prefix_caching,
            num_tokens=built.info.num_tokens,
        )
        policy = POLICIES[config.scheduling_policy]()
        self._scheduler = Scheduler(
            limits, self._pool, policy, model=config.model, eos_token_ids=built.info.eos_token_ids
        )
        self._in_flight: deque[tuple[Step, PendingStep]] = deque()
        self._times = StepTimes()
        self._busy_since = 0.0  # when the oldest step in flight could begin
        tokens, eos = built.info.num_tokens, built.info.eos_token_ids
        self._gate = Gate(Compiler(lambda: load_tokenizer(resolve_model(config.model, config.revision)), tokens, eos))
        self._constraints = Constraints(tokens, eos, built.runner.mask_memory)
        self._finished = {"stop": 0, "length": 0, "abort": 0}

    def add(
        self,
        key: int,
        tokens: IntArray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        generated: int = 0,
    ) -> None:
        """Queue a request under a key of the caller's; ``tokens``, int32 [length], are its prompt.

        An answer that another engine has begun goes on where the last ``generated`` of ``tokens`` are what there is of
        it: what comes then is what that engine would have gone on with, if ``params`` have a seed or are greedy.

        Raises ``InvalidRequestError`` or ``ContextLengthError`` if it could never be served; nothing has changed then.
        A grammar is compiled while others run; what is wrong with it is in the ``refused`` of a later step.
        """
        request = Request(key, tokens, params, priority, cache_salt, generated)
        if params.structured is None and not params.bad_words:
            self._queue(request)
            if params.constrained:
                self._constraints.add(key, params, Compiled([], ()))
            return
        self._scheduler.check_request(tokens, params, generated)
        self._gate.enter(request)

    def _queue(self, request: Request) -> None:
        self._scheduler.add(
            request.key,
            request.tokens,
            request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            generated=request.generated,
        )

    def check_grammar(self, params: SamplingParams) -> None:
        """Compile what ``params`` ask for, and wait for it. Raises ``InvalidRequestError``."""
        if params.structured is not None or params.bad_words:
            self._gate.check(params)

    def abort(self, key: int) -> None:
        """End a request in whatever state it is; unknown keys are ignored, since it may just have ended by itself."""
        if self._gate.leave(key) or self._scheduler.abort(key):
            self._constraints.drop(key)
            self._finished["abort"] += 1

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return self._scheduler.has_work or bool(self._in_flight) or bool(self._gate)

    def step(self) -> StepOutput | None:
        """Plan and launch a step, then wait for the oldest one in flight. None: there was nothing to do."""
        refused = self._add_compiled() if self._gate else []
        step = self._scheduler.plan()
        if step is not None:
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            self._in_flight.append((step, self._runner.launch(step)))
            if len(self._in_flight) == 1:
                self._constrain()
        started = _started(step) if step is not None else []
        if not self._in_flight or (step is not None and len(self._in_flight) <= self._runner.depth):
            if step is None and not refused:
                if self._gate:
                    self._gate.wait()
                return None
            return StepOutput(np.empty(0, np.int64), np.empty(0, np.int32), started=started, refused=refused)

        oldest, pending = self._in_flight.popleft()
        result = pending.result()
        begin, self._busy_since = self._busy_since, time.perf_counter()
        prefill = oldest.num_tokens - oldest.num_decodes
        self._times.add(prefill, oldest.num_decodes, self._busy_since - begin)
        retired = self._scheduler.retire(oldest, result.tokens)
        finished = retired.finished
        if len(oldest.constrained):
            refused += self._advance(oldest, retired)
            finished = [end for end in finished if not any(end.key == key for key, _ in refused)]
        self._constrain()
        for end in finished:
            self._finished[end.reason] += 1
        logprobs = {i: result.logprobs[row] for i, row in enumerate(retired.rows.tolist()) if row in result.logprobs}
        scores = [(int(oldest.keys[s.row]), found) for s, found in zip(oldest.scorings, result.scores, strict=True)]
        return StepOutput(retired.keys, retired.tokens, finished, started, logprobs, refused, scores)

    def _constrain(self) -> None:
        """Give the step that is in flight alone its masks, now that all those before it have retired.

        Its forward pass runs meanwhile, and only the sampling of these rows waits for them. So on a GPU masks cost time
        only where they, and planning and launching the next step after them, take the host longer than the pass.
        """
        if self._in_flight:
            ((step, pending),) = self._in_flight
            if len(step.constrained):
                pending.constrain(self._constraints.masks(step.keys[step.constrained]))

    def _advance(self, step: Step, retired: Retired) -> list[tuple[int, Refusal]]:
        """Let constraints follow what a step brought; returns the requests that have to end for it."""
        constrained = np.zeros(len(step.keys), np.bool_)
        constrained[step.constrained] = True
        ours = constrained[retired.rows]
        failed: dict[int, Refusal] = dict(
            self._constraints.advance(retired.keys[ours].tolist(), retired.tokens[ours].tolist())
        )
        for end in retired.finished:
            self._constraints.drop(end.key)
            self._finished["abort"] += end.key in failed
        for key in failed:
            self.abort(key)
        return list(failed.items())

    def _add_compiled(self) -> list[tuple[int, Refusal]]:
        """Queue requests whose grammar is ready; returns those whose grammar is at fault, or has not got its turn."""
        refused: list[tuple[int, Refusal]] = []
        for one, compiled in self._gate.opened():
            if isinstance(compiled, Refusal):
                refused.append((one.key, compiled))
                continue
            error = self._constraints.add(one.key, one.params, compiled, one.answer.tolist())
            if error is not None:
                refused.append((one.key, error))
                continue
            self._queue(one)
        return refused

    def load(self) -> Load:
        """Load and counters at this moment."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return Load(
            waiting=scheduler.num_waiting + len(self._gate),
            waiting_tokens=scheduler.waiting_tokens,
            running=scheduler.num_running,
            prefill_tokens=scheduler.prefill_tokens,
            blocks_total=self._pool.num_blocks,
            blocks_used=self._pool.used,
            blocks_filled=self._pool.filled,
            step_base=self._times.base,
            step_prefill=self._times.prefill,
            step_decode=self._times.decode,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            evictions=self._pool.evictions,
            preemptions=counters.preemptions,
            finished=dict(self._finished),
        )

    def prefix_events(self) -> PrefixEvents | None:
        """What the prefix cache took and gave up since the last call; None if nothing, or if nothing is logged."""
        return self._prefix_log.take() if self._prefix_log is not None else None

    def memory_summary(self) -> MemorySummary:
        """Where the device's memory went, and what has grown since the start. Waits for the device."""
        return self._memory_summary()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self._pool.clear()

    def check(self) -> None:
        """Assert that no block, slot or counter is astray; at idle, that everything was given back. For tests."""
        self._scheduler.check()


def _started(step: Step) -> list[tuple[int, int]]:
    return [(a.key, a.cached_tokens) for a in step.admissions if a.first]
