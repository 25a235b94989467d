"""Calls of Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` as the whole answer, or after ``<|python_tag|>``;
several of them with semicolons between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.parts import Part
from deployments.ingress.tools.call import CallObject
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import Terminal, either
from deployments.ingress.tools.parser import CallParser

TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """JSON without the tag is a call only at the very start, and only of a tool that there is: else an answer about
    people, ``{"name": "Ada"}``, would be one. The tag is a special token and never text; code after it, which these
    models write for their built-in interpreter, is text."""

    after_call = "between"

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(TAG, "between")
        self._names = tools.keys()
        self._separated = False  # a semicolon is among what stands between calls
        self._tagged = False

    def _step(self, text: str, parts: list[Part]) -> str | None:
        match self._state:
            case "between":
                return self._next(text)
            case "object":
                return self._call(text, parts)
            case _:
                rest = self._words(text, parts)
                if rest is not None:
                    self._state, self._tagged = "between", True
                    self._between.append(self._until.dropped)
                return rest

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
        return self._take_opening() + solid

    def _take_opening(self) -> str:
        self._separated = False
        return super()._take_opening()

    def end(self) -> list[Part]:
        if self._state == "object":
            return [] if self._object.begun else self._last(self._take_opening() + self._object.raw)
        return self._last(self._until.end() if self._state == "text" else "".join(self._between))


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    calls = 'calls: object ("; " object)*\n' if many else "calls: object\n"
    return calls + either("object", "parameters", functions)


LLAMA3 = ToolFormat("llama3", (TAG,), Llama3Parser, _grammar)
