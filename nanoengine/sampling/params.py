"""SamplingParams: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidRequestError
from nanoengine.structured.grammar import Grammar

_MAX_INT = 2**31 - 1
_MAX_STOPS = 64  # stop strings, or stop token ids: each costs a little at every token
_MAX_STOP_LENGTH = 1024  # characters
_MAX_BIASES = 1024
_MAX_BIAS = 100
_MAX_ALLOWED = 1 << 16
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_LENGTH = 256  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one sequence. Names and meanings are vLLM's where they exist there.

    Raises ``InvalidRequestError`` naming the field when a value is out of range.
    """

    temperature: float = 1.0  # 0 is greedy: the filters (top_k, top_p, min_p) then have no effect
    top_k: int = 0  # keep the k likeliest tokens, and those as likely as the k-th; 0 or -1 keeps all
    top_p: float = 1.0  # of what top_k keeps: the likeliest whose mass reaches p, the one that crosses p included
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # > 1 discourages tokens of prompt and output (CTRL, section 4.1)
    presence_penalty: float = 0.0  # subtracted once from tokens already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    seed: int | None = None  # modulo 2**64; same seed, same tokens, whatever else is in the batch
    max_tokens: int | None = 16  # None: up to the model's context. 0, with prompt_logprobs, only scores the prompt
    min_tokens: int = 0  # until then no end-of-sequence or stop token can be sampled and no stop string acts
    stop: tuple[str, ...] = ()  # a string or a sequence of them; the one that is complete first ends the answer
    stop_token_ids: tuple[int, ...] = ()  # act with ignore_eos too
    ignore_eos: bool = False  # the model's end-of-sequence tokens do not end the answer
    include_stop_str_in_output: bool = False  # the text of the stop string, or stop token, is part of the answer
    skip_special_tokens: bool = True
    visible_special_tokens: tuple[int, ...] = ()  # shown all the same: marks that a parser of the text needs
    detokenize: bool = True  # off: token ids only, no text, no stop strings
    logprobs: int | None = None  # also return the log-probability of each token and of this many likeliest
    prompt_logprobs: int | None = None  # the same of each token of the prompt, which is then computed from its start
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, before penalties and temperature
    allowed_token_ids: tuple[int, ...] = ()  # if any, no other token is sampled, an end-of-sequence included
    bad_words: tuple[str, ...] = ()  # the token that would complete one of these is not sampled
    structured: Grammar | None = None  # the answer matches it, and then ends, whatever ignore_eos and min_tokens say

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value), name, "a finite number", value)
        for name, optional in (
            ("top_k", False), ("min_tokens", False), ("max_tokens", True), ("seed", True), ("logprobs", True),
            ("prompt_logprobs", True),
        ):  # fmt: skip
            value = getattr(self, name)
            _check(_is_int(value) or (optional and value is None), name, "an integer", value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            _check(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))

        self._check_range("temperature", 0, 100)
        self._check_range("min_p", 0, 1)
        self._check_range("presence_penalty", -2, 2)
        self._check_range("frequency_penalty", -2, 2)
        _check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1", self.top_p)
        _check(
            0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "greater than 0 and at most 100",
            self.repetition_penalty,
        )
        _check(-1 <= self.top_k <= _MAX_INT, "top_k", "-1 or 0 (off), or at least 1", self.top_k)
        _check(0 <= self.min_tokens <= _MAX_INT, "min_tokens", "at least 0", self.min_tokens)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_range(name, 0, 20)
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            _check(least <= self.max_tokens <= _MAX_INT, "max_tokens", f"at least {least}", self.max_tokens)
            rule = f"at most max_tokens ({self.max_tokens})"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        self._check_stops()
        self._check_constraints()

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        _check(low <= value <= high, name, f"between {low} and {high}", value)

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            self._as_tuple(name, _MAX_STOPS, f"a list of at most {_MAX_STOPS}")
        rule = f"non-empty strings of at most {_MAX_STOP_LENGTH} whole characters"
        _check(all(_is_text(stop, _MAX_STOP_LENGTH) for stop in self.stop), "stop", rule, self.stop)
        _check(not self.stop or self.detokenize, "stop", "empty when detokenize is off", self.stop)
        for name in ("stop_token_ids", "visible_special_tokens"):
            ok = all(map(_is_token_id, getattr(self, name)))
            _check(ok, name, "token ids (integers, 0 or more)", getattr(self, name))

    def _check_constraints(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        rule = f"at most {_MAX_BIASES} token ids (integers, 0 or more) with numbers from -{_MAX_BIAS} to {_MAX_BIAS}"
        ok = isinstance(bias, Mapping) and len(bias) <= _MAX_BIASES and all(map(_is_token_id, bias))
        ok = ok and all(_is_number(value) and abs(value) <= _MAX_BIAS for value in bias.values())
        _check(ok, "logit_bias", rule, self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(bias) or None)

        rule = f"a list of at most {_MAX_ALLOWED} token ids (integers, 0 or more)"
        allowed = self._as_tuple("allowed_token_ids", _MAX_ALLOWED, rule)
        _check(all(map(_is_token_id, allowed)), "allowed_token_ids", rule, allowed)
        rule = f"a list of at most {_MAX_BAD_WORDS} strings of 1 to {_MAX_BAD_WORD_LENGTH} whole characters"
        words = self._as_tuple("bad_words", _MAX_BAD_WORDS, rule)
        _check(all(_is_text(word, _MAX_BAD_WORD_LENGTH) and word.strip() for word in words), "bad_words", rule, words)
        ok = self.structured is None or isinstance(self.structured, Grammar)
        _check(ok, "structured", "a Grammar", self.structured)

    def _as_tuple(self, name: str, most: int, rule: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        _check(value is None or (isinstance(value, (tuple, list)) and len(value) <= most), name, rule, value)
        object.__setattr__(self, name, tuple(value or ()))
        return getattr(self, name)

    def seeded(self, seed: int) -> SamplingParams:
        """The same with a seed of 64 bits. ``dataclasses.replace`` would check all fields again, for 40 us."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        return other

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        """Whether the tokens so far say which ones may come next: see ``nanoengine.structured``."""
        return self.structured is not None or bool(self.allowed_token_ids or self.bad_words)


def _check(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} must be {rule}, got {_short(value)}", param=param, code="invalid_value")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object, most: int) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no text can contain it, and it cannot be sent on
        return False
    return True
