"""Compiler: from a grammar to a matcher that knows the model's tokens. On threads of its own, bounded, and cached.

A schema of ordinary size takes about a millisecond, the largest that are let through take seconds, and a hostile one
would take hours and all memory: so each is tried first where that can be ended (``trial.py``).

Copies of a matcher share its lexer, and wait for each other where they run in parallel: 64 masks of one grammar for
152,000 tokens take 5.6 ms on one thread of an H200's host, 6.9 ms on all, and 1.8 ms if the matchers were compiled
apart. So a grammar that comes again is compiled again, a few times, where there are cores for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import llguidance

from nanoengine.errors import ModelLoadError
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar
from nanoengine.structured.matcher import GrammarError, Tokens, matcher
from nanoengine.structured.trial import STACK, Trial
from nanoengine.text.tokenizer import Tokenizer

log = logging.getLogger("nanoengine")

Made = TypeVar("Made")

THREADS = 2
CACHE_ENTRIES = 256
CACHE_TEXT = 16 << 20  # characters of grammars: what is compiled grows with it
APART = max(1, min(8, (os.cpu_count() or 1) // 4))  # matchers of one grammar: each has a lexer's memory
APART_SECONDS = 0.1  # what takes longer to compile is compiled once: others wait for these threads


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a sequence's constraint begins with."""

    matchers: list[llguidance.LLMatcher]  # of the grammar, compiled apart, at the start: to be copied; may grow
    bad_words: tuple[tuple[int, ...], ...]  # as token ids
    source: str = ""  # what the matchers are compiled from; empty: no more are to be
    turns: Iterator[int] = field(default_factory=count)  # whose it is to be copied: each as often as the others


@dataclass(slots=True)
class _Entry:
    """Of the cache."""

    first: Future[Compiled]
    asked: int = 1  # how many matchers


class Compiler:
    """For one tokenizer. Called by one thread."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], num_tokens: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """``load_tokenizer`` is called once, by the first request that needs it: most engines never have one."""
        self._load_tokenizer = load_tokenizer
        self._num_tokens = num_tokens
        self._eos_token_ids = [i for i in eos_token_ids if i < num_tokens]
        self._loading = threading.Lock()
        self._tokens: tuple[Tokenizer, Tokens] | None = None
        self._trials = threading.local()  # one for each thread
        self._cache: OrderedDict[tuple[Grammar | None, tuple[str, ...]], _Entry] = OrderedDict()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def __call__(self, params: SamplingParams) -> Future[Compiled]:
        """What ``params`` ask for, done at once if it was asked for before. It may be cancelled before it has begun.

        The future raises ``GrammarError`` for a grammar that is invalid, not supported or too large.
        """
        key = (params.structured, params.bad_words)
        if (entry := self._cache.get(key)) is not None and not entry.first.cancelled():
            self._cache.move_to_end(key)
            if entry.asked < APART and entry.first.done() and entry.first.exception() is None:
                entry.asked += 1
                self._submit(self._compile_again, entry.first.result())
            return entry.first
        future = self._submit(self._compile, *key)
        self._cache[key] = _Entry(future)
        text = sum(len(grammar.text) for grammar, _ in self._cache if grammar is not None)
        while len(self._cache) > CACHE_ENTRIES or (text > CACHE_TEXT and len(self._cache) > 1):
            (grammar, _), _ = self._cache.popitem(last=False)
            text -= len(grammar.text) if grammar is not None else 0
        return future

    def _submit(self, work: Callable[..., Made], *args: Any) -> Future[Made]:
        """To a thread of the pool, whose stack is large enough for any grammar."""
        before = threading.stack_size(STACK)
        try:
            return self._pool.submit(work, *args)
        finally:
            threading.stack_size(before)

    def _compile(self, grammar: Grammar | None, bad_words: tuple[str, ...]) -> Compiled:
        tokenizer, tokens = self._tokenizer()
        made, text = [], ""
        if grammar is not None:
            if not self._eos_token_ids:
                raise GrammarError("cannot be served: this model has no end-of-sequence token to end an answer with")
            try:
                text = self._trial(tokens)(grammar)
                begin = time.perf_counter()
                made = [matcher(text, tokens)]
                if time.perf_counter() - begin > APART_SECONDS:
                    text = ""
            except GrammarError:
                raise
            except BaseException as error:  # a panic in the library is no Exception
                log.exception("a grammar could not be compiled")
                raise GrammarError("cannot be compiled") from error
        return Compiled(made, tuple(ids for word in bad_words for ids in _spellings(tokenizer, word)), text)

    def _compile_again(self, compiled: Compiled) -> None:
        """One matcher more."""
        if compiled.source:
            compiled.matchers.append(matcher(compiled.source, self._tokenizer()[1]))

    def _trial(self, tokens: Tokens) -> Trial:
        """This thread's."""
        if not hasattr(self._trials, "own"):
            self._trials.own = Trial(tokens, self._eos_token_ids)
        own: Trial = self._trials.own
        return own

    def _tokenizer(self) -> tuple[Tokenizer, Tokens]:
        with self._loading:
            if self._tokens is None:
                try:
                    tokenizer = self._load_tokenizer()
                except ModelLoadError as error:
                    raise GrammarError(f"needs the model's tokenizer: {error}") from error
                self._tokens = (
                    tokenizer,
                    Tokens(
                        [tokenizer.token_bytes(i) for i in range(self._num_tokens)],
                        [i for i in tokenizer.special_ids if i < self._num_tokens],
                        self._eos_token_ids,
                        lambda text: tokenizer.encode(text, add_special_tokens=False),
                    ),
                )
            return self._tokens


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """The token ids of a word at the start of a text, and of one after a space if that is written with as many."""
    word = word.strip()
    bare = tokenizer.encode(word, add_special_tokens=False)
    yield tuple(bare)
    spaced = tokenizer.encode(" " + word, add_special_tokens=False)
    if len(spaced) == len(bare) and spaced != bare:
        yield tuple(spaced)
