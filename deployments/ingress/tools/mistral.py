"""Calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` of its older models, and
``[TOOL_CALLS]name[ARGS]{...}``, once for each call and perhaps with ``[CALL_ID]id`` before the arguments, of its newer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.parts import Arguments, Call, Part
from deployments.ingress.tools.call import CallObject, Value
from deployments.ingress.tools.format import Function, ToolFormat, short_call_id
from deployments.ingress.tools.grammar import Terminal, either, one_of
from deployments.ingress.tools.parser import CallParser

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_MAX_HEAD = 256  # characters between the mark and the arguments; a name has at most 128
_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\s*([\w-]+))?\s*(?:\[ARGS\])?\s*")
_NOT_IN_HEAD = re.compile(r"[^\w.\-\[\]\s]")


class MistralParser(CallParser):
    """The marks are special tokens, so they are never text. After the mark any name is a call."""

    after_call = "array"

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(MARK, "text")
        self._head = ""  # what followed the mark so far
        self._value = Value("{")  # arguments that go out

    def _step(self, text: str, parts: list[Part]) -> str | None:
        match self._state:
            case "text":
                rest = self._words(text, parts)
                if rest is not None:
                    self._state, self._head = "head", ""
                    self._between = [self._until.dropped]
                return rest
            case "head":
                return self._read_head(self._head + text, parts)
            case "arguments":
                end = self._value.scan(text, 0)
                parts.append(Arguments(self._calls - 1, text if end < 0 else text[:end]))
                if end < 0:
                    return None
                self._state = "text"
                return text[end:]
            case "array":
                return self._next(text)
            case _:
                return self._call(text, parts)

    def _read_head(self, head: str, parts: list[Part]) -> str | None:
        """Decide what the mark has announced, and give what follows its head: None while it is undecided."""
        self._head = head
        solid = head.lstrip()
        if solid[:1] in ("[", "{") and len(head) - len(solid) <= _MAX_HEAD:
            self._state = "array"
            self._between.append(head[: len(head) - len(solid)])
            if solid[0] == "[":
                self._between.append("[")
                solid = solid[1:]
            return solid
        found = _NOT_IN_HEAD.search(head)
        if found is None and len(head) <= _MAX_HEAD:
            return None
        if found is not None and found[0] == "{" and found.start() <= _MAX_HEAD:
            named = _HEAD.fullmatch(head, 0, found.start())
            if named is not None:
                parts.append(Call(self._calls, named[2] or short_call_id(), named[1]))
                self._calls, self._state, self._value = self._calls + 1, "arguments", Value("{")
                self._take_opening()
                return head[found.start() :]
        self._state = "text"
        return self._take_opening() + head

    def _next(self, text: str) -> str | None:
        """Skip what stands between the objects of an array, and give what follows."""
        solid = text.lstrip()
        self._between.append(text[: len(text) - len(solid)])
        match solid[:1]:
            case "":
                return None
            case "{":
                self._state, self._object = "object", CallObject(self._calls, short_call_id())
                return solid
            case ",":
                self._between.append(",")
                return solid[1:]
            case "]" if self._calls:
                self._state = "text"
                self._take_opening()
                return solid[1:]
        self._state = "text"
        return self._take_opening() + solid

    def end(self) -> list[Part]:
        match self._state:
            case "head":
                words = self._take_opening() + self._head
            case "object" if not self._object.begun:
                words = self._take_opening() + self._object.raw
            case "text":
                words = self._until.end()
            case _:
                words = "" if self._calls else self._take_opening()
        return self._last(words)


def _array(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    objects = 'object (", " object)*' if many else "object"
    return f'calls: {terminal(MARK)} "[" {objects} "]"\n' + either("object", "arguments", functions)


def _named(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    heads = [f'{terminal(MARK)} "{function.name}" {terminal(ARGS)}' for function in functions]
    return ("calls: call+\n" if many else "calls: call\n") + one_of("call", heads, "", functions)


MISTRAL_ARRAY = ToolFormat("mistral", (MARK,), MistralParser, _array)
MISTRAL_NAMED = ToolFormat("mistral", (MARK, ARGS, CALL_ID), MistralParser, _named)
