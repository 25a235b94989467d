"""Compiler: from a grammar to a matcher that knows the model's tokens. On threads of its own, bounded, and cached.

A schema of ordinary size takes about a millisecond, the largest that are let through take seconds, and a hostile one
would take hours and all memory. The library stops what grows in its lexer and its grammar (``_limits``). It recurses
where one rule refers to another, and a stack that overflows ends the process: hence the threads' stacks, which hold
the longest chain that ``MAX_TEXT`` has room for. What it does not bound is refused before, in ``json_schema.py``.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from nanoengine.errors import ModelLoadError
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar
from nanoengine.structured.json_schema import SchemaError, prepared
from nanoengine.text.tokenizer import Tokenizer

log = logging.getLogger("nanoengine")

THREADS = 2
CACHE_ENTRIES = 256
CACHE_TEXT = 16 << 20  # characters of grammars: what is compiled grows with it
_STACK = 256 << 20  # bytes; only what is touched takes memory
_MAX_DETAIL = 400  # characters of the library's explanation

# A model that may put any amount of space between two tokens of JSON can do so for ever, and does at times. This lets
# it write one space or an indented line, as models do, and no more.
_WHITESPACE = r"( |\n {0,40})?"


class GrammarError(Exception):
    """What is wrong with a grammar, as the end of a sentence that begins with where it stands in the request."""


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
        self._tokens: tuple[Tokenizer, llguidance.LLTokenizer] | None = None
        self._cache: OrderedDict[tuple[Grammar | None, tuple[str, ...]], Future[Compiled]] = OrderedDict()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def __call__(self, params: SamplingParams) -> Future[Compiled]:
        """What ``params`` ask for, done at once if it was asked for before.

        The future raises ``GrammarError`` for a grammar that is invalid, not supported or too large.
        """
        key = (params.structured, params.bad_words)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        before = threading.stack_size(_STACK)
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
        matcher = None
        if grammar is not None:
            if not self._eos_token_ids:
                raise GrammarError("cannot be served: this model has no end-of-sequence token to end an answer with")
            try:
                matcher = _matcher(grammar, tokens)
            except GrammarError:
                raise
            except BaseException as error:  # a panic in the library is no Exception
                log.exception("a grammar could not be compiled")
                raise GrammarError("cannot be compiled") from error
        return Compiled(matcher, tuple(ids for word in bad_words for ids in _spellings(tokenizer, word)))

    def _tokenizer(self) -> tuple[Tokenizer, llguidance.LLTokenizer]:
        with self._loading:
            if self._tokens is None:
                try:
                    tokenizer = self._load_tokenizer()
                except ModelLoadError as error:
                    raise GrammarError(f"needs the model's tokenizer: {error}") from error
                wrapped = llguidance.TokenizerWrapper(_Tokens(tokenizer, self._num_tokens, self._eos_token_ids))
                eos = self._eos_token_ids or None
                self._tokens = tokenizer, llguidance.LLTokenizer(wrapped, n_vocab=self._num_tokens, eos_token=eos)
            return self._tokens


class _Tokens:
    """The tokenizer as the library wants it. Special tokens are no text, and a grammar's text never matches them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i in tokenizer.special_ids if i < num_tokens}.union(eos_token_ids)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.tokens = [tokenizer.token_bytes(i) for i in range(num_tokens)]
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: str) -> list[int]:
        """How a model would write ``text``: where a grammar leaves one text only, the library asks for just that.

        The tokenizer's own way, unless that is not the same text: some put a space before it, and all take "<|im_end|>"
        for the special token.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        same = b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids) == data
        return ids if same and self._special.isdisjoint(ids) else self._longest_first(data)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: i for i, data in enumerate(self.tokens) if data and i not in self._special}

    def _longest_first(self, data: bytes) -> list[int]:
        """``data`` in tokens, each the longest that fits; as far as there are any."""
        ids, most = [], max(map(len, self._by_bytes))
        while data:
            length = next((n for n in range(min(most, len(data)), 0, -1) if data[:n] in self._by_bytes), 0)
            if length == 0:
                break
            ids.append(self._by_bytes[data[:length]])
            data = data[length:]
        return ids


def _limits() -> llguidance.LLParserLimits:
    # A lexer state takes 1 to 2 kB, and sequences with one grammar share them.
    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _matcher(grammar: Grammar, tokens: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokens, _source(grammar), log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # what is lazy in the lexer is done here, and not between two steps
    if matcher.is_error():
        raise GrammarError(f"is not valid or not supported: {_detail(matcher)}")
    return matcher


def _detail(matcher: llguidance.LLMatcher) -> str:
    """The library's explanation, on one line and without the grammar that it repeats."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":
        text = "no text matches it"
    return _short(text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_DETAIL else text[:_MAX_DETAIL] + "..."


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form."""
    match grammar.kind:
        case "regex":
            # The whole answer has to match, so an anchor at an end says nothing; inside, the library refuses them.
            # "d": \d is 0 to 9, as in JSON Schema, and not every digit of Unicode.
            text = grammar.text.removeprefix("^")
            if text.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", text):
                text = text[:-1]
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/")
        case "choice":
            # As a regular expression it is one automaton; alternatives of a grammar are tried one by one.
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(grammar.text))))
        case "grammar":
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
            except (Exception, RecursionError) as error:
                raise GrammarError(f"is not valid: {_short(str(error))}") from None
        case "json_object":
            schema: Any = {"type": "object"}
        case "json_schema":
            schema = json.loads(grammar.text)
            try:
                schema = prepared(schema)
            except SchemaError as error:
                raise GrammarError(str(error)) from None
    # "lenient" is a switch that a schema could set itself, to have keywords ignored.
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"lenient": False, "whitespace_pattern": _WHITESPACE}
    )


def _literal(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """The token ids of a word at the start of a text, and of one after a space if that is written with as many."""
    word = word.strip()
    bare = tokenizer.encode(word, add_special_tokens=False)
    yield tuple(bare)
    spaced = tokenizer.encode(" " + word, add_special_tokens=False)
    if len(spaced) == len(bare) and spaced != bare:
        yield tuple(spaced)
