"""Compiler: from a grammar to a matcher that knows the model's tokens. On threads of its own, bounded, and cached.

A schema of ordinary size takes about a millisecond, the largest that are let through take seconds, and a hostile one
would take hours and all memory: so each is tried first where that can be ended (``trial.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance

from nanoengine.errors import ModelLoadError
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar
from nanoengine.structured.matcher import GrammarError, Tokens, matcher
from nanoengine.structured.trial import STACK, Trial
from nanoengine.text.tokenizer import Tokenizer

log = logging.getLogger("nanoengine")

THREADS = 2
CACHE_ENTRIES = 256
CACHE_TEXT = 16 << 20  # characters of grammars: what is compiled grows with it


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a sequence's constraint begins with."""

    matcher: llguidance.LLMatcher | None  # at the start; to be copied
    bad_words: tuple[tuple[int, ...], ...]  # as token ids


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
        self._cache: OrderedDict[tuple[Grammar | None, tuple[str, ...]], Future[Compiled]] = OrderedDict()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def __call__(self, params: SamplingParams) -> Future[Compiled]:
        """What ``params`` ask for, done at once if it was asked for before. It may be cancelled before it has begun.

        The future raises ``GrammarError`` for a grammar that is invalid, not supported or too large.
        """
        key = (params.structured, params.bad_words)
        if key in self._cache and not self._cache[key].cancelled():
            self._cache.move_to_end(key)
            return self._cache[key]
        before = threading.stack_size(STACK)
        try:
            future = self._cache[key] = self._pool.submit(self._compile, *key)
        finally:
            threading.stack_size(before)
        text = sum(len(grammar.text) for grammar, _ in self._cache if grammar is not None)
        while len(self._cache) > CACHE_ENTRIES or (text > CACHE_TEXT and len(self._cache) > 1):
            (grammar, _), _ = self._cache.popitem(last=False)
            text -= len(grammar.text) if grammar is not None else 0
        return future

    def _compile(self, grammar: Grammar | None, bad_words: tuple[str, ...]) -> Compiled:
        tokenizer, tokens = self._tokenizer()
        made = None
        if grammar is not None:
            if not self._eos_token_ids:
                raise GrammarError("cannot be served: this model has no end-of-sequence token to end an answer with")
            try:
                made = matcher(self._trial(tokens)(grammar), tokens)
            except GrammarError:
                raise
            except BaseException as error:  # a panic in the library is no Exception
                log.exception("a grammar could not be compiled")
                raise GrammarError("cannot be compiled") from error
        return Compiled(made, tuple(ids for word in bad_words for ids in _spellings(tokenizer, word)))

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
