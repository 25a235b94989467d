"""Constraints: for each sequence that has one, which tokens may come next, given those that it has.

A constraint belongs to a request, not to a slot: it follows the tokens as they retire, so a preemption, which loses
none of them, is nothing to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np

from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray, KeyArray
from nanoengine.structured import masks
from nanoengine.structured.compiler import APART, Compiled

THREADS = APART
"""That make masks where they are dear; 1: the caller itself makes all. As many as a grammar has lexers, since threads
that share one wait for each other. And few, since each is woken for every step: all that the library would have (25 of
32 cores) took 1.0 to 1.9 ms for 64 rows of JSON records."""

_TRIED = 4
_DEAR_S = 0.6e-3
"""The first masks of a step tell what the others will take one after the other: for more than this there are threads.
A mask takes 5 us inside a string, 20 to 40 between two, 400 where a pattern counts (152,000 tokens), so 64 rows in
strings 0.34 ms. With threads they take 0.37 to 0.47, and the caller's own work meanwhile and after it half as long
again, 1.5 ms of a step in place of 1.2, as the threads look for more before they sleep (an H200's host of 16 cores)."""


class Constraints:
    """Of one engine's sequences, by their keys."""

    def __init__(
        self,
        num_tokens: int,
        eos_token_ids: tuple[int, ...],
        memory: Callable[[], IntArray],
        *,
        threads: int = THREADS,
    ) -> None:
        """``memory``, called once there is a mask to make, says where they go: int32 [rows, words], at least as many
        rows as are ever asked for at once."""
        self._num_tokens = num_tokens
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < num_tokens)
        self._not_eos = ~masks.only(self._eos_token_ids, num_tokens)
        self._of: dict[int, _Constraint] = {}
        self._memory = memory
        self._num_threads = threads
        self._batch: _Batch | None = None  # of the last call of ``masks``, while nothing has changed

    def __len__(self) -> int:
        return len(self._of)

    def add(
        self, key: int, params: SamplingParams, compiled: Compiled, answer: Iterable[int] = ()
    ) -> InvalidRequestError | None:
        """Begin a sequence, which has these tokens of an ``answer`` already. The error, if its grammar does not have
        them: then it has not begun."""
        apart = compiled.matchers
        lexer = next(compiled.turns) % len(apart) if apart else 0
        matcher = apart[lexer].deep_copy() if apart else None
        self._of[key] = _Constraint(
            params, matcher, id(apart[lexer]) if apart else 0, compiled.bad_words, self._num_tokens
        )
        self._batch = None
        for token in answer:
            if failed := self.advance([key], [token]):
                self.drop(key)
                return failed[0][1]
        return None

    def drop(self, key: int) -> None:
        """The sequence has ended, if it was one of these."""
        if self._of.pop(key, None) is not None:
            self._batch = None

    def masks(self, keys: KeyArray) -> IntArray:
        """What each of these sequences may sample next, int32 [n, words]; valid until the next call.

        Sequences that are not known may sample anything: they have ended, and their token will be dropped.
        """
        if self._batch is None or self._batch.keys != keys.tobytes():
            self._batch = self._gather(keys)
        batch, rows = self._batch, self._rows[: len(keys)]
        if batch.free:
            rows[batch.free] = -1
        self._fill(batch.matchers, rows)
        for one, row in batch.narrow:
            one.narrow(rows[row], self._not_eos)
        return rows

    def _fill(self, matchers: list[tuple[llguidance.LLMatcher, int]], rows: IntArray) -> None:
        """Each matcher's mask into its row."""
        address, width = rows.ctypes.data, rows.shape[1] * rows.itemsize
        begin = time.perf_counter()
        for done, (matcher, row) in enumerate(matchers):
            if done >= _TRIED and self._num_threads > 1:
                to_come = (time.perf_counter() - begin) / done * (len(matchers) - done)
                if to_come > _DEAR_S:
                    self._threads.unsafe_compute_mask_ptr(matchers[done:], address, width, len(rows))
                    break
            matcher.unsafe_compute_mask_ptr(address + row * width, width)

    def _gather(self, keys: KeyArray) -> _Batch:
        known = [(one, row) for row, key in enumerate(keys.tolist()) if (one := self._of.get(key)) is not None]
        free = {*range(len(keys))} - {row for one, row in known if one.matcher is not None}
        # Threads take slices of this list, so that each has lexers of its own but where one's rows end.
        by_lexer = sorted(known, key=lambda entry: entry[0].lexer)
        matchers = [(one.matcher, row) for one, row in by_lexer if one.matcher is not None]
        return _Batch(keys.tobytes(), matchers, sorted(free), [(one, row) for one, row in known if one.narrows])

    def advance(self, keys: Iterable[int], tokens: Iterable[int]) -> list[tuple[int, InvalidRequestError]]:
        """Each sequence has this new token. Returns, by key, the error of those whose grammar does not have it.

        That takes a row of which nothing was left to sample, or a grammar that has grown beyond the library's limits.
        """
        stuck = []
        for key, token in zip(keys, tokens, strict=True):
            if (one := self._of.get(key)) is None:
                continue
            if one.bad_words:
                one.follow(token)
            if one.matcher is None:
                continue
            # The library lets an answer end where the vocabulary has no token that could go on.
            early = token in self._eos_token_ids and not one.matcher.is_accepting()
            if early or not one.matcher.consume_token(token):
                stuck.append(key)
        return [(key, self._of[key].dead_end()) for key in stuck]

    @cached_property
    def _rows(self) -> IntArray:
        return self._memory()

    @cached_property
    def _threads(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(num_threads=self._num_threads)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences whose masks are made together: most steps have those of the step before."""

    keys: bytes  # int64
    matchers: list[tuple[llguidance.LLMatcher, int]]  # with their rows
    free: list[int]  # rows that no grammar says anything of
    narrow: list[tuple[_Constraint, int]]  # with their rows


class _Constraint:
    """One sequence's."""

    __slots__ = ("_allowed", "_goes_on", "_grammar", "_tail", "bad_words", "lexer", "matcher", "narrows")

    def __init__(
        self,
        params: SamplingParams,
        matcher: llguidance.LLMatcher | None,
        lexer: int,
        bad_words: tuple[tuple[int, ...], ...],
        num_tokens: int,
    ) -> None:
        self._grammar = params.structured
        self.matcher = matcher
        self.lexer = lexer  # the same number for matchers that share one
        self._goes_on = self.matcher is not None and params.ignore_eos
        self._allowed = masks.only(params.allowed_token_ids, num_tokens) if params.allowed_token_ids else None
        self.bad_words = bad_words
        self.narrows = self._goes_on or self._allowed is not None or bool(bad_words)
        self._tail: list[int] = []  # the last tokens of the output, as many as a bad word has before its last

    def follow(self, token: int) -> None:
        most = max(map(len, self.bad_words)) - 1
        self._tail = [*self._tail, token][-most:] if most else []

    def narrow(self, mask: IntArray, not_eos: IntArray) -> None:
        """Take away from ``mask`` int32 [words], in place, what else may not come."""
        if self._allowed is not None:
            mask &= self._allowed
        for *before, last in self.bad_words:
            if not before or self._tail[-len(before) :] == before:
                mask[last // 32] &= np.int32(~(1 << last % 32) if last % 32 < 31 else 0x7FFFFFFF)
        if self._goes_on and (rest := mask & not_eos).any():
            mask[:] = rest

    def dead_end(self) -> InvalidRequestError:
        assert self._grammar is not None
        return self._grammar.refused(
            "the answer came to a point from which it could not go on: the grammar is too complex, or stop_token_ids, "
            "bad_words, allowed_token_ids or logit_bias forbid all that it allows"
        )
