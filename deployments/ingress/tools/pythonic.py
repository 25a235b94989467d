"""Calls of Llama 3.2 and 4 that are asked for a list of Python: ``[f(city="Paris", days=3), g()]`` as the whole answer,
or after ``<|python_start|>``."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from deployments.ingress.parts import Arguments, Call, Part
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import SchemaError, Terminal, json_rule, parameters
from deployments.ingress.tools.parser import CallParser

MARK = "<|python_start|>"  # what closes it is a special token, and never text

_MAX_HEAD = 512  # characters before the first argument, or between two
_NAME = r"[^\W\d][\w.-]*"
_HEAD = re.compile(rf"\s*({_NAME})\(\s*(?={_NAME}\s*=|\))")
_BEGINS = re.compile(rf"\s*(?:({_NAME})(?:\(\s*(?:{_NAME}\s*)?)?)?")  # a head that is not whole yet
_KEY = re.compile(rf"[\s,]*(?:(\))|({_NAME})\s*=)")
_KEY_BEGINS = re.compile(rf"[\s,]*(?:{_NAME}\s*)?")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_OUTSIDE = re.compile(r"[\"'()\[\]{},]")


class CallExpression:
    """The state machine of one call: a ``parser.OpenCall``. It begins when its first argument has a name.

    An argument goes out when it is whole: strings and words of Python are others in JSON.
    """

    def __init__(self, number: int, id: str, names: Container[str] | None = None) -> None:
        """``names``: any other name makes it text. None takes all names."""
        self._number, self._id, self._names = number, id, names
        self._state: Literal["head", "key", "value"] = "head"
        self._head = ""
        self._arguments = 0
        self._pieces: list[str] = []  # of the value that has begun
        self._depth = 0
        self._quote = ""  # the one that ends the string
        self._escaped = False
        self.begun = False
        self.rest: str | None = None

    @property
    def raw(self) -> str:
        return self._head

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        following: str | None = text
        while following and self.rest is None:
            match self._state:
                case "head":
                    following = self._begin(self._head + following, parts)
                case "key":
                    following = self._key(self._head + following, parts)
                case _:
                    following = self._value(following, parts)
        return parts

    def _begin(self, head: str, parts: list[Part]) -> str | None:
        found, begins = _HEAD.match(head), _BEGINS.match(head)
        name = found[1] if found else begins[1] if begins else None
        known = self._names is None or name is None or name in self._names
        if found and known:
            self.begun, self._head, self._state = True, "", "key"
            parts += [Call(self._number, self._id, found[1]), Arguments(self._number, "{")]
            return head[found.end() :]
        whole = begins is not None and begins.end() == len(head)
        if whole and len(head) <= _MAX_HEAD and (known or "(" not in head):
            self._head = head
        else:
            self._head, self.rest = "", head
        return None

    def _key(self, head: str, parts: list[Part]) -> str | None:
        found = _KEY.match(head)
        if found is None and len(head) <= _MAX_HEAD and _KEY_BEGINS.fullmatch(head):
            self._head = head
            return None
        self._head = ""
        if found is None or found[1]:
            parts.append(Arguments(self._number, "}"))
            self.rest = head[found.end() :] if found else head
            return None
        comma = ", " if self._arguments else ""
        parts.append(Arguments(self._number, f"{comma}{json.dumps(found[2], ensure_ascii=False)}: "))
        self._arguments, self._state = self._arguments + 1, "value"
        return head[found.end() :]

    def _value(self, text: str, parts: list[Part]) -> str | None:
        """More of the value; gives what follows it."""
        end = self._end(text)
        self._pieces.append(text if end < 0 else text[:end])
        if end < 0:
            return None
        parts.append(Arguments(self._number, _as_json("".join(self._pieces).strip())))
        self._pieces, self._state = [], "key"
        return text[end:]

    def _end(self, text: str) -> int:
        """Where in ``text`` the value ends; -1: further on."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING[self._quote] if self._quote else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"' | "'":
                    self._quote = "" if self._quote else found[0]
                case "(" | "[" | "{":
                    self._depth += 1
                case "," | ")" if not self._depth:
                    return found.start()
                case ")" | "]" | "}":
                    self._depth = max(0, self._depth - 1)
        return -1


_TOKEN = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|\b(?:True|False|None)\b""", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{char: char for char in "\\'\"/"}}


def _as_json(text: str) -> str:
    """The JSON of a value that is written in Python, or in JSON. What is neither is a string without quotes."""
    value = _TOKEN.sub(_token, text)
    try:
        json.loads(value, parse_constant=int)  # NaN is no JSON, nor a number
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return value


def _token(found: re.Match[str]) -> str:
    if found[0] in _WORDS:
        return _WORDS[found[0]]
    text = _ESCAPE.sub(_escape, found[1] if found[1] is not None else found[2])
    # JSON writes what is beyond 16 bits as two halves; half of it is none.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(text, ensure_ascii=False)


def _escape(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, found[0])


class PythonicParser(CallParser):
    """A list is calls only at the very start, and only of tools that there are: ``[sic]`` is text. After the mark any
    name is a call."""

    after_call = "between"

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(MARK, "start")
        self._names = tools.keys()
        self._tagged = False

    def _step(self, text: str, parts: list[Part]) -> str | None:
        match self._state:
            case "start" | "between":
                return self._next(text)
            case "call":
                return self._call(text, parts)
            case _:
                rest = self._words(text, parts)
                if rest is not None:
                    self._state, self._tagged = "start", True
                    self._between.append(self._until.dropped)
                return rest

    def _next(self, text: str) -> str | None:
        """Skip what stands before the next call, and give what follows."""
        solid = text.lstrip()
        self._between.append(text[: len(text) - len(solid)])
        if not solid:
            return None
        opening, begins = self._take_opening(), self._state
        if solid[0] == ("[" if begins == "start" else ","):
            self._state, self._between = "call", [opening, solid[0]]
            self._object = CallExpression(self._calls, call_id(), None if self._tagged else self._names)
            return solid[1:]
        self._state = "text"
        return solid[1:] if begins == "between" and solid[0] == "]" else opening + solid

    def end(self) -> list[Part]:
        match self._state:
            case "text":
                return self._last(self._until.end())
            case "call":
                return [] if self._object.begun else self._last(self._take_opening() + self._object.raw)
        return self._last("" if self._calls else self._take_opening())


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    rules = ['calls: "[" call (", " call)* "]"\n' if many else 'calls: "[" call "]"\n']
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}\n")
    for i, function in enumerate(functions):
        values = parameters(function.schema)
        rules.append(f'call_{i}: "{function.name}(" first_{i}_0 ")"\n')
        for j, value in enumerate(values):
            if not re.fullmatch(_NAME, value.name):
                raise SchemaError(f"has a parameter {value.name!r}, which cannot be written as this model writes calls")
            # What may come while nothing has, and what may come behind a comma.
            key, others = json.dumps(f"{value.name}=", ensure_ascii=False), f"more_{i}_{j + 1}"
            rules.append(f"first_{i}_{j}: argument_{i}_{j} {others}")
            rules.append("\n" if value.required else f" | first_{i}_{j + 1}\n")
            argument = f'", " argument_{i}_{j}'
            rules.append(f"more_{i}_{j}: ({argument}){'' if value.required else '?'} {others}\n")
            rules.append(f"argument_{i}_{j}: {key} value_{i}_{j}\n")
            rules.append(json_rule(f"value_{i}_{j}", value.schema))
        rules.append(f'first_{i}_{len(values)}: ""\nmore_{i}_{len(values)}: ""\n')
    return "".join(rules)


PYTHONIC = ToolFormat("pythonic", (MARK,), PythonicParser, _grammar)
