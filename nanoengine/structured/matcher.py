"""From a grammar to the library's matcher: what llguidance is told of tokens and grammars, and what it says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from nanoengine.structured.grammar import Grammar
from nanoengine.structured.json_schema import SchemaError, prepared

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_DETAIL = 400  # characters of the library's explanation
_FORCED_TEXTS, _FORCED_LENGTH = 4096, 256  # that are kept as tokens: so many, of so many characters

# A model that may put any amount of space between two tokens of JSON can do so for ever, and does at times. This lets
# it write one space or an indented line, as models do, and no more.
# "lenient" is a switch that a schema could set itself, to have keywords ignored.
_OPTIONS: JsonCompileOptions = {"lenient": False, "whitespace_pattern": r"( |\n {0,40})?"}

_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|%json\b\s*')
"""What has to be told apart to find the schemas in a grammar: strings, regular expressions, comments."""


class GrammarError(Exception):
    """What is wrong with a grammar, as the end of a sentence that begins with where it stands in the request."""


class Tokens:
    """A vocabulary as the library wants it. Special tokens are no text, and a grammar's text never matches them."""

    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """``tokens``: the bytes of each. ``encode``: the tokenizer's own way to write a text, if there is one."""
        self.tokens = tokens
        self._special = {*special, *eos_token_ids}
        self._encode = encode
        self._kept = lru_cache(_FORCED_TEXTS)(self._written)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.special_token_ids = sorted(self._special)
        self.wrapped = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(tokens), eos_token=[*eos_token_ids] or None
        )

    def __call__(self, text: str) -> list[int]:
        """How a model would write ``text``: where a grammar leaves one text only, the library asks for just that.

        It does so for each mask of such a place, and those of a grammar are the same again and again: to ask the
        tokenizer each time took half of the mask's time (20 to 100 of 40 to 150 us, 152,000 tokens), in Python.
        """
        return (self._kept if len(text) <= _FORCED_LENGTH else self._written)(text)

    def _written(self, text: str) -> list[int]:
        """The tokenizer's own way, unless that is not the same text: some put a space before it, and all take
        "<|im_end|>" for the special token."""
        data = text.encode()
        if self._encode is not None:
            ids = list(self._encode(text))
            same = b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids) == data
            if same and self._special.isdisjoint(ids):
                return ids
        return self._longest_first(data)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: i for i, data in enumerate(self.tokens) if data and i not in self._special}

    def _longest_first(self, data: bytes) -> list[int]:
        """``data`` in tokens, each the longest that fits; as far as there are any."""
        ids, most, at = [], max(map(len, self._by_bytes)), 0
        while at < len(data):
            lengths = range(min(most, len(data) - at), 0, -1)
            length = next((n for n in lengths if data[at : at + n] in self._by_bytes), 0)
            if length == 0:
                break
            ids.append(self._by_bytes[data[at : at + length]])
            at += length
        return ids


def matcher(source: str, tokens: Tokens) -> llguidance.LLMatcher:
    """A matcher at the start of an answer. ``source`` is ``source``'s. Raises ``GrammarError``."""
    made = llguidance.LLMatcher(tokens.wrapped, source, log_level=0, limits=_limits())
    if not made.is_error():
        made.compute_bitmask()  # what is lazy in the lexer is done here, and not between two steps
    if made.is_error():
        raise GrammarError(f"is not valid or not supported: {_detail(made)}")
    return made


def source(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises ``GrammarError``."""
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
                return llguidance.LLMatcher.grammar_from_lark(_with_schemas(any_to_lark(grammar.text)))
            except SchemaError as error:
                raise GrammarError(f"has a schema that {error}") from None
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
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)


def _with_schemas(lark: str) -> str:
    """A grammar whose schemas (``%json {...}``) are what they are outside of one. Raises ``SchemaError``."""
    pieces, at = [], 0
    while found := _LARK.search(lark, at):
        pieces.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            if not isinstance(schema, (dict, bool)):
                raise SchemaError("must be an object, true or false")
            pieces.append(json.dumps(prepared(schema) | {"x-guidance": _OPTIONS}))
    return "".join(pieces) + lark[at:]


def _limits() -> llguidance.LLParserLimits:
    # A lexer state takes 1 to 2 kB, and sequences with one grammar share them.
    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _literal(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)


def _detail(made: llguidance.LLMatcher) -> str:
    """The library's explanation, on one line and without the grammar that it repeats."""
    text = made.get_error().removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":
        text = "no text matches it"
    return _short(text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_DETAIL else text[:_MAX_DETAIL] + "..."
