"""Grammar: what an answer has to match, as a request says it. No torch, no grammar library: the ingress imports it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nanoengine.errors import InvalidRequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

MAX_TEXT = 1 << 18  # characters: what a schema of thousands of fields takes
_MAX_GRAMMAR = 1 << 16  # characters of Lark or GBNF, or of a regular expression: they take quadratic time
MAX_CHOICES = 4096
_MAX_DEPTH = 64  # of nesting in a schema: libraries recurse where it nests


@dataclass(frozen=True, slots=True)
class Grammar:
    """An answer must match this, whole. Equal grammars are compiled once.

    Raises ``InvalidRequestError``, naming ``field``, for what can be seen to be wrong without compiling it; the rest is
    found by the engine, before the first token.
    """

    kind: Kind
    text: str = ""  # JSON Schema; "" for json_object; a regular expression; a JSON list of strings; Lark or GBNF
    field: str = field(default="structured_outputs", compare=False)  # of the request: where it came from, "a.b.c"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise self.refused(f"kind must be one of {', '.join(get_args(Kind))}")
        most = _MAX_GRAMMAR if self.kind in ("grammar", "regex") else MAX_TEXT
        if not isinstance(self.text, str) or len(self.text) > most:
            raise self.refused(f"must be a text of at most {most} characters")
        self._check_characters(self.text)
        if self.kind in ("json_schema", "choice"):
            self._check_json()
        elif (self.kind == "json_object") != (self.text == ""):
            raise self.refused("must have no text" if self.text else "must not be empty")

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.refused(f"is not valid JSON: {error}") from None
        if self.kind == "choice":
            strings = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
            if not strings or not 0 < len(value) <= MAX_CHOICES:
                raise self.refused(f"must be a list of 1 to {MAX_CHOICES} strings that are not empty")
            self._check_characters("".join(value))  # again: JSON writes them as escapes
        elif not isinstance(value, (dict, bool)):
            raise self.refused("must be an object, true or false")
        elif _depth(value) > _MAX_DEPTH:
            raise self.refused(f"is nested deeper than {_MAX_DEPTH} levels")

    def _check_characters(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.refused("holds half of a surrogate pair (\\ud800 to \\udfff)") from None

    def refused(self, reason: str) -> InvalidRequestError:
        """The error for this grammar: it cannot be served, for this reason."""
        return InvalidRequestError(f"{self.field}: {reason}", param=self.field.split(".")[0], code="invalid_grammar")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
