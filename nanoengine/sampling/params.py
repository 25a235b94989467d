"""SamplingParams: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoengine.errors import InvalidRequestError


def _check(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} must be {rule}, got {value!r}", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one sequence. Names and meanings are vLLM's where they exist there.

    Raises ``InvalidRequestError`` naming the field when a value is out of range.
    """

    temperature: float = 1.0  # 0 is greedy: the other filters then have no effect
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = (
        1.0  # keep the smallest set of likeliest tokens whose mass reaches p, the one that crosses p included
    )
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # > 1 discourages tokens of prompt and output (CTRL, section 4.1)
    presence_penalty: float = 0.0  # subtracted once from tokens already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    seed: int | None = None  # same seed, same tokens, whatever else is in the batch
    max_tokens: int | None = 16  # None: up to the model's context
    min_tokens: int = 0  # until then no end-of-sequence or stop token can be sampled and no stop string acts
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # off: token ids only, no text, no stop strings
    logprobs: int | None = None  # also return the log-probability of each token and of this many likeliest

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            _check(ok, name, "a finite number", value)
        for name in ("top_k", "min_tokens"):
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool), name, "an integer", value)
        _check(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        _check(self.top_k >= -1, "top_k", "-1 or 0 (off), or at least 1", self.top_k)
        _check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        _check(
            0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "greater than 0 and at most 100",
            self.repetition_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, "between -2 and 2", getattr(self, name))
        if self.seed is not None:
            _check(isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer", self.seed)
        if self.max_tokens is not None:
            _check(
                isinstance(self.max_tokens, int) and self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens
            )
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"at most max_tokens ({self.max_tokens})",
                self.min_tokens,
            )
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings", self.stop)
        _check(not self.stop or self.detokenize, "stop", "empty when detokenize is off", self.stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        ids_ok = all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in self.stop_token_ids)
        _check(ids_ok, "stop_token_ids", "token ids (integers, 0 or more)", self.stop_token_ids)
        if self.logprobs is not None:
            _check(
                isinstance(self.logprobs, int) and 0 <= self.logprobs <= 20,
                "logprobs",
                "between 0 and 20",
                self.logprobs,
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
