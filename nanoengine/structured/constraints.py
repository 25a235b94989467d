"""Constraints: for each sequence that has one, which tokens may come next, given those that it has.

A constraint belongs to a request, not to a slot: it follows the tokens as they retire, so a preemption, which loses
none of them, is nothing to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cached_property

import llguidance
import numpy as np

from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray, KeyArray
from nanoengine.structured import masks
from nanoengine.structured.compiler import Compiled
from nanoengine.structured.grammar import Grammar

_ALONE_S = 1e-3
"""Masks are computed one after the other for so long, and what is left then in parallel. A row of JSON takes 12 us, and
64 of them 0.8 ms one after the other where the library's threads take 1.0 to 1.9, to wake up and to wait for each
other; a row whose pattern counts takes 400 to 600, and 64 take 25 to 39 ms against 6 to 9 (32 cores, 152,000 tokens).
What a token costs after that, 3 us, is not worth a thread either."""


class Constraints:
    """Of one engine's sequences, by their keys."""

    def __init__(
        self, num_tokens: int, eos_token_ids: tuple[int, ...], allocate: Callable[[int, int], IntArray] = masks.empty
    ) -> None:
        """``allocate`` makes the memory for masks, int32 [rows, words], where a device can read it."""
        self._num_tokens = num_tokens
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < num_tokens)
        self._not_eos = ~masks.only(self._eos_token_ids, num_tokens)
        self._of: dict[int, _Constraint] = {}
        self._allocate = allocate
        self._masks = allocate(0, masks.words(num_tokens))  # reused: a row of a large vocabulary is 20 kB

    def __len__(self) -> int:
        return len(self._of)

    def add(
        self, key: int, params: SamplingParams, compiled: Compiled, answer: Iterable[int] = ()
    ) -> InvalidRequestError | None:
        """Begin a sequence, which has these tokens of an ``answer`` already. The error, if its grammar does not have
        them: then it has not begun."""
        apart = compiled.matchers
        matcher = apart[key % len(apart)].deep_copy() if apart else None
        self._of[key] = _Constraint(params, matcher, compiled.bad_words, self._num_tokens)
        for token in answer:
            if failed := self.advance([key], [token]):
                self.drop(key)
                return failed[0][1]
        return None

    def drop(self, key: int) -> None:
        """The sequence has ended, if it was one of these."""
        self._of.pop(key, None)

    def masks(self, keys: KeyArray) -> IntArray:
        """What each of these sequences may sample next, int32 [n, words]; valid until the next call.

        Sequences that are not known may sample anything: they have ended, and their token will be dropped.
        """
        if len(keys) > len(self._masks):
            self._masks = self._allocate(2 * len(keys), masks.words(self._num_tokens))
        rows, matchers, narrow = self._masks[: len(keys)], [], []
        for i, key in enumerate(keys.tolist()):
            one = self._of.get(key)
            if one is not None and one.matcher is not None:
                matchers.append((one.matcher, i))
            else:
                rows[i] = -1
            if one is not None and one.narrows:
                narrow.append((one, i))
        self._fill(matchers, rows)
        for one, i in narrow:
            one.narrow(rows[i], self._not_eos)
        return rows

    def advance(self, keys: Iterable[int], tokens: Iterable[int]) -> list[tuple[int, InvalidRequestError]]:
        """Each sequence has this new token. Returns, by key, the error of those whose grammar does not have it.

        That takes a row of which nothing was left to sample, or a grammar that has grown beyond the library's limits.
        """
        stuck = []  # with their grammars
        for key, token in zip(keys, tokens, strict=True):
            if (one := self._of.get(key)) is None:
                continue
            one.follow(token)
            if one.matcher is None or one.grammar is None:
                continue
            # The library lets an answer end where the vocabulary has no token that could go on.
            early = token in self._eos_token_ids and not one.matcher.is_accepting()
            if early or not one.matcher.consume_token(token):
                stuck.append((key, one.grammar))
        return [(key, _dead_end(grammar)) for key, grammar in stuck]

    def _fill(self, matchers: list[tuple[llguidance.LLMatcher, int]], rows: IntArray) -> None:
        """Each matcher's mask into its row."""
        address, width = rows.ctypes.data, rows.shape[1] * rows.itemsize
        until = time.perf_counter() + _ALONE_S
        for i, (matcher, row) in enumerate(matchers):
            if time.perf_counter() > until:
                self._executor.unsafe_compute_mask_ptr(matchers[i:], address, width, len(rows))
                break
            matcher.unsafe_compute_mask_ptr(address + row * width, width)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()


class _Constraint:
    """One sequence's."""

    __slots__ = ("_allowed", "_bad_words", "_goes_on", "_tail", "grammar", "matcher", "narrows")

    def __init__(
        self,
        params: SamplingParams,
        matcher: llguidance.LLMatcher | None,
        bad_words: tuple[tuple[int, ...], ...],
        num_tokens: int,
    ) -> None:
        self.grammar = params.structured
        self.matcher = matcher
        self._goes_on = self.matcher is not None and params.ignore_eos
        self._allowed = masks.only(params.allowed_token_ids, num_tokens) if params.allowed_token_ids else None
        self._bad_words = bad_words
        self.narrows = self._goes_on or self._allowed is not None or bool(bad_words)
        self._tail: list[int] = []  # the last tokens of the output, as many as a bad word has before its last

    def follow(self, token: int) -> None:
        if self._bad_words:
            most = max(map(len, self._bad_words)) - 1
            self._tail = [*self._tail, token][-most:] if most else []

    def narrow(self, mask: IntArray, not_eos: IntArray) -> None:
        """Take away from ``mask`` int32 [words], in place, what else may not come."""
        if self._allowed is not None:
            mask &= self._allowed
        for *before, last in self._bad_words:
            if not before or self._tail[-len(before) :] == before:
                mask[last // 32] &= np.int32(~(1 << last % 32) if last % 32 < 31 else 0x7FFFFFFF)
        if self._goes_on and (rest := mask & not_eos).any():
            mask[:] = rest


def _dead_end(grammar: Grammar) -> InvalidRequestError:
    return grammar.refused(
        "the answer came to a point from which it could not go on: the grammar is too complex, or stop_token_ids, "
        "bad_words, allowed_token_ids or logit_bias forbid all that it allows"
    )
