"""What an engine gives back: deltas of a stream, whole answers, and its load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the distribution before temperature and filters) of one sampled token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


class PromptLogprob(NamedTuple):
    """``TokenLogprob`` of a token of the prompt, given those before it."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a stretch of a prompt, in columns: a Python object for each of a long prompt's tokens would
    hold up whoever passes them on."""

    first: int  # index in the prompt of the first token scored, at least 1: nothing comes before token 0
    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n]
    top_ids: bytes  # int32 [n, k], likeliest first
    top_logprobs: bytes  # float32 [n, k]

    def entries(self, prompt: npt.NDArray[np.int32], top: int) -> Iterator[PromptLogprob]:
        """One for each token scored, with at most ``top`` of the likeliest; ``prompt`` is the whole one's ids."""
        logprobs = np.frombuffer(self.logprobs, np.float32)
        n = len(logprobs)
        ids = np.frombuffer(self.top_ids, np.int32).reshape(n, -1)[:, :top].tolist()
        likeliest = np.frombuffer(self.top_logprobs, np.float32).reshape(n, -1)[:, :top].tolist()
        scored = prompt[self.first : self.first + n].tolist()
        ranks = np.frombuffer(self.ranks, np.int32).tolist()
        for token, logprob, rank, i, p in zip(scored, logprobs.tolist(), ranks, ids, likeliest, strict=True):
            yield PromptLogprob(token, logprob, rank, tuple(zip(i, p, strict=True)))


class Delta(msgspec.Struct, frozen=True):  # one a token, often: a frozen dataclass takes ten times as long to make
    """What one request produced since the delta before: one token or several, never half a character of text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last delta only
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for end-of-sequence
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was already there
    completion_tokens: int = 0  # so far, this delta included
    prompt_scores: tuple[PromptScores, ...] = ()  # with the first delta, if asked for
    times: tuple[float, float] | None = None  # with the first delta: seconds in the queue, and from there to it


@dataclass(slots=True)
class Completion:
    """A whole answer to one prompt, as ``LLM.generate`` returns it."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[PromptLogprob | None] | None = None  # one for each token of the prompt; the first is None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is: fixed for its life."""

    model: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # of the model
    num_tokens: int  # of the tokenizer, or vocab_size if that is less: ids from here on are padding, and never sampled
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int  # sequences that run at once
    max_num_batched_tokens: int  # of one step
    device: str
    dtype: str
    load_seconds: dict[str, float] = field(default_factory=dict)  # by phase of start-up


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's load at one instant, and its counters since start. Made once a step; cheap to send."""

    waiting: int = 0  # requests without a slot
    waiting_tokens: int = 0  # their tokens that have to be computed, an upper bound: prefix hits are not known yet
    running: int = 0
    prefill_tokens: int = 0  # tokens of running requests still to be prefilled
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by a request; the rest is free or cached
    blocks_filled: int = 0  # used or cached
    step_base: float = 0.0  # seconds of a step, as fitted to the last ones, whatever it computes; 0: not known yet
    step_prefill: float = 0.0  # ... for each prompt token
    step_decode: float = 0.0  # ... for each sequence that decodes
    steps: int = 0
    prompt_tokens: int = 0  # counters from here on
    generated_tokens: int = 0
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks in use, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Where an engine's memory went, in bytes. Zero where it is not known: of a CPU only weights and pool are."""

    weights: int
    kv_pool: int
    graphs: int = 0  # recorded steps: their tensors and kernels' parameters
    workspace: int = 0  # the most that a step takes beside them, as profiled at start-up
    total: int = 0  # of the device
    used: int = 0  # of the device, by this process and all others
    other: int = 0  # used, but not by torch's allocator here: CUDA itself, libraries, other processes
    growth: int = 0  # live tensors now beyond those at the end of start-up; what stays when idle is a leak
