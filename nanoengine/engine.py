"""Engine: requests in, tokens out, one step at a time. The synchronous core that everything else wraps.

Read this file first: ``step`` is the whole engine in a dozen lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from nanoengine.cache.blocks import BlockPool
from nanoengine.config import EngineConfig
from nanoengine.outputs import EngineInfo, Load, MemorySummary, TokenLogprob
from nanoengine.runner.base import PendingStep
from nanoengine.runner.build import build_runner
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.policies import POLICIES
from nanoengine.scheduling.scheduler import Finished, Limits, Scheduler
from nanoengine.scheduling.step import IntArray, KeyArray, Step


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought: tokens[i] is a new token of request keys[i]."""

    keys: KeyArray  # int64 [n]
    tokens: IntArray  # int32 [n]
    finished: list[Finished] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)  # (key, prompt tokens found in the prefix cache)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by index into keys, where asked for


class Engine:
    """One model on one device. Not thread-safe: one loop calls ``add``, ``abort`` and ``step``."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Load the model. ``eos_token_ids``: those of its tokenizer, if there is one; the model's own are added.

        Raises ``ModelLoadError`` if that fails, ``ValueError`` if the settings do not fit the model.
        """
        built = build_runner(config, eos_token_ids)
        self.info: EngineInfo = built.info
        self._runner = built.runner
        self._memory_summary = built.memory_summary
        self._pool = BlockPool(built.runner.num_blocks)
        limits = Limits(
            max_num_seqs=built.info.max_num_seqs,
            max_num_batched_tokens=built.info.max_num_batched_tokens,
            max_prefill_chunk=config.max_prefill_chunk or built.info.max_num_batched_tokens,
            max_model_len=built.info.max_model_len,
            block_size=config.block_size,
            vocab_size=built.info.vocab_size,
            watermark_blocks=int(config.watermark * built.runner.num_blocks),
            prefix_caching=config.enable_prefix_caching,
        )
        policy = POLICIES[config.scheduling_policy]()
        self._scheduler = Scheduler(
            limits, self._pool, policy, model=config.model, eos_token_ids=built.info.eos_token_ids
        )
        self._in_flight: deque[tuple[Step, PendingStep]] = deque()
        self._finished = {"stop": 0, "length": 0, "abort": 0}

    def add(
        self, key: int, prompt: IntArray, params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> None:
        """Queue a request under a key of the caller's; ``prompt`` is int32 [length].

        Raises ``InvalidRequestError`` or ``ContextLengthError`` if it could never be served; nothing has changed then.
        """
        self._scheduler.add(key, prompt, params, priority=priority, cache_salt=cache_salt)

    def abort(self, key: int) -> None:
        """End a request in whatever state it is; unknown keys are ignored, since it may just have ended by itself."""
        if self._scheduler.abort(key):
            self._finished["abort"] += 1

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return self._scheduler.has_work or bool(self._in_flight)

    def step(self) -> StepOutput | None:
        """Plan and launch a step, then wait for the oldest one in flight. None: there was nothing to do."""
        step = self._scheduler.plan()
        if step is not None:
            self._in_flight.append((step, self._runner.launch(step)))
        if not self._in_flight:
            return None
        if step is not None and len(self._in_flight) <= self._runner.depth:
            return StepOutput(np.empty(0, np.int64), np.empty(0, np.int32), started=_started(step))

        oldest, pending = self._in_flight.popleft()
        result = pending.result()
        retired = self._scheduler.retire(oldest, result.tokens)
        for end in retired.finished:
            self._finished[end.reason] += 1
        logprobs = {i: result.logprobs[row] for i, row in enumerate(retired.rows.tolist()) if row in result.logprobs}
        started = _started(step) if step is not None else []
        return StepOutput(retired.keys, retired.tokens, retired.finished, started, logprobs)

    def load(self) -> Load:
        """Load and counters at this moment."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return Load(
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            running=scheduler.num_running,
            prefill_tokens=scheduler.prefill_tokens,
            blocks_total=self._pool.num_blocks,
            blocks_used=self._pool.used,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            evictions=self._pool.evictions,
            preemptions=counters.preemptions,
            finished=dict(self._finished),
        )

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
    return [(a.key, a.cached_tokens) for a in step.admissions if not len(a.output)]
