"""Calls of Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` as the whole answer, or after ``<|python_tag|>``;
several of them with semicolons between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from deployments.ingress.parts import Part, Text, Until
from deployments.ingress.tools.call import CallObject
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import Terminal, either

TAG = "<|python_tag|>"


class Llama3Parser:
    """JSON without the tag is a call only at the very start, and only of a tool that there is: else an answer about
    people, ``{"name": "Ada"}``, would be one. The tag is a special token and never text; code after it, which these
    models write for their built-in interpreter, is text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._state: Literal["between", "object", "text"] = "between"
        self._between: list[str] = []  # white space at the start, or what stands between calls
        self._separated = False  # a semicolon is among it
        self._tagged = False
        self._until = Until(TAG)
        self._calls = 0
        self._object = CallObject(0, "")

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest:
            match self._state:
                case "between":
                    rest = self._next(rest)
                case "object":
                    parts += self._object.push(rest)
                    rest = self._object.rest
                    if rest is None:
                        pass
                    elif self._object.begun:
                        self._calls, self._state = self._calls + 1, "between"
                        self._take_between()
                    else:
                        parts.append(Text(self._take_between() + self._object.raw))
                        self._state = "text"
                case "text":
                    words, rest = self._until.push(rest)
                    parts += [Text(words)] if words else []
                    if rest is not None:
                        self._state, self._tagged = "between", True
                        self._between.append(self._until.dropped)
        return parts

    def _next(self, text: str) -> str | None:
        """Skip what stands between calls, and give what follows."""
        solid = text.lstrip()
        self._between.append(text[: len(text) - len(solid)])
        if not solid:
            return None
        if solid[0] == ";" and self._calls and not self._separated:
            self._between.append(";")
            self._separated = True
            return solid[1:]
        if solid[0] == "{":
            self._state = "object"
            self._object = CallObject(self._calls, call_id(), None if self._tagged else self._names)
            return solid
        self._state = "text"
        return self._take_between() + solid

    def _take_between(self) -> str:
        text = "".join(self._between)
        self._between, self._separated = [], False
        return text

    def end(self) -> list[Part]:
        if self._state == "object" and not self._object.begun:
            return [Text(self._take_between() + self._object.raw)]
        words = self._until.end() if self._state == "text" else "".join(self._between)
        return [Text(words)] if words.strip() or (words and not self._calls) else []


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    calls = 'calls: object ("; " object)*\n' if many else "calls: object\n"
    return calls + either("object", "parameters", functions)


LLAMA3 = ToolFormat("llama3", (TAG,), Llama3Parser, _grammar)
