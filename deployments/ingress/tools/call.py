"""One tool call as a JSON object, ``{"name": ..., "arguments": {...}}``, while it comes in.

A call begins when its name is known and its arguments have begun to be an object; from then on it stays a call, and
its arguments go out as they are written. What is found to be malformed before that is text, all of it. So is an answer
that ends before that. What is malformed later is in the arguments, which clients have to check anyway: OpenAI's own
models may write arguments that are no valid JSON, and an answer cut by max_tokens always does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Literal

from deployments.ingress.parts import Arguments, Call, Part

_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "index"})  # any other before the call begins: text
_ARGUMENTS = ("arguments", "parameters")

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_LITERAL_END = re.compile(r"[\s,:{}\[\]\"]")
_SOLID = re.compile(r"\S")


class Value:
    """Finds where a JSON value ends, by its brackets and quotes: its parts need not be valid."""

    def __init__(self, first: str) -> None:
        self._literal = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Where in ``text`` the value ends that goes on at ``at``; -1: further on."""
        if self._literal:
            found = _LITERAL_END.search(text, at)
            return found.start() if found else -1
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._in_string:
                return at
        return -1


class CallObject:
    """The state machine of one call. Push text until ``rest`` is not None."""

    def __init__(self, number: int, id: str, names: Container[str] | None = None) -> None:
        """``names``: any other name makes it text. None takes all names."""
        self._number, self._id, self._names = number, id, names
        self._expect: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._raw: list[str] = []  # all of it, until the call begins
        self._key = ""
        self._name = ""
        self._value: Value | None = None  # the value or key that has begun
        self._pieces: list[str] = []  # of it
        self._arguments: str | None = None  # whole, and waiting for a name that comes later
        self._streams = False  # the arguments go out as they come
        self.begun = False
        self.rest: str | None = None  # what follows the object, or the text that is no call after all

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if not self.begun:
            self._raw.append(text)
        parts: list[Part] = []
        at = 0
        while self.rest is None:
            if self._value is not None:
                end = self._value.scan(text, at)
                self._take(text[at : end if end >= 0 else len(text)], parts)
                if end < 0:
                    break
                at, self._value = end, None
                if not self._complete(parts):
                    self._give_up(text, at)
                continue
            found = _SOLID.search(text, at)
            if found is None:
                break
            at = found.start()
            if not self._step(found[0], parts):
                self._give_up(text, at)
            elif self._value is None:
                at += 1
                if self._expect == "object":  # it was the closing bracket
                    self.rest = text[at:]
        return parts

    @property
    def raw(self) -> str:
        """All text before ``rest``, of what has not begun to be a call."""
        return "".join(self._raw)

    def _step(self, char: str, parts: list[Part]) -> bool:
        """Take one character of the object's own. False: it is malformed."""
        match self._expect, char:
            case "object", "{":
                self._expect = "key"
            case "key", '"':
                self._value = Value(char)
            case "colon", ":":
                self._expect = "value"
            case "value", _ if char not in ",:}]":
                self._value = Value(char)
            case "comma", ",":
                self._expect = "key"
            case (("comma" | "key"), "}"):
                if not self.begun and not self._begin(parts, "{}" if self._arguments is None else self._arguments):
                    return False
                self._expect = "object"
            case _:
                return False
        return True

    def _take(self, piece: str, parts: list[Part]) -> None:
        """More of the key or value that has begun."""
        if self._expect == "value" and self._key in _ARGUMENTS and self._arguments is None and piece:
            opens = not self._pieces and piece[0] == "{"
            if self._streams or (opens and self._begin(parts, "")):
                self._streams = True
                parts.append(Arguments(self._number, piece))
                return
        self._pieces.append(piece)

    def _complete(self, parts: list[Part]) -> bool:
        """The key or value has ended. False: it is malformed."""
        text = "".join(self._pieces)
        self._pieces = []
        if self._expect == "key":
            self._expect = "colon"
            key = _string(text)
            self._key = key or ""
            return key is not None and (self.begun or key in _KEYS)
        self._expect = "comma"
        if self._streams:
            self._streams = False
            return True
        if self.begun:
            return True
        if self._key == "name" and not self._name:
            name = _string(text)
            self._name = name or ""
            if not name or (self._names is not None and name not in self._names):
                return False
            return self._arguments is None or self._begin(parts, self._arguments)
        if self._key in _ARGUMENTS and self._arguments is None:
            # Some models write them as JSON in a string, which is the API's own form; null is no arguments.
            arguments = "{}" if text == "null" else _string(text) if text[0] == '"' else text
            if arguments is None or not arguments.lstrip().startswith("{"):
                return False
            self._arguments = arguments
            return not self._name or self._begin(parts, arguments)
        return True

    def _begin(self, parts: list[Part], arguments: str) -> bool:
        if self.begun or not self._name:
            return False
        self.begun = True
        self._raw = []
        parts.append(Call(self._number, self._id, self._name))
        if arguments:
            parts.append(Arguments(self._number, arguments))
        return True

    def _give_up(self, text: str, at: int) -> None:
        """It is malformed where ``text`` goes on at ``at``."""
        self.rest = text[at:]
        if not self.begun:
            self._raw[-1] = text[:at]


def _string(text: str) -> str | None:
    """The string that a JSON literal stands for; None: it stands for none."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()  # half of a surrogate pair can be written as JSON, and never be sent
            return value
    except ValueError:
        pass
    return None
