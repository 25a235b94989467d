"""Calls of Hermes and Qwen 2.5/3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.parts import Part
from deployments.ingress.tools.call import CallObject
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import Terminal, either
from deployments.ingress.tools.parser import CallParser, OpenCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_AFTER = " \t\r\n}"  # layout after the object: a bracket too many is a common slip


class HermesParser(CallParser):
    """White space around calls is layout. Between the marks any name is a call: a client can tell the model that it has
    no such tool. A closing mark may be missing; what stands in its place is text."""

    after_call = "after"

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(OPEN, "text")
        self._after: list[str] = []  # layout after the object
        self._tail = ""  # the beginning of a mark after it

    def _step(self, text: str, parts: list[Part]) -> str | None:
        match self._state:
            case "text":
                rest = self._words(text, parts)
                if rest is not None:
                    self._object, self._state = self._new_call(), "object"
                return rest
            case "object":
                return self._call(text, parts)
            case _:
                return self._close(text)

    def _new_call(self) -> OpenCall:
        return CallObject(self._calls, call_id())

    def _take_opening(self) -> str:
        return self._until.dropped + OPEN

    def _close(self, text: str) -> str | None:
        """Skip the closing mark, and give what is text or the next call."""
        window = self._tail + text
        if not self._tail:
            window = text.lstrip(_AFTER)
            self._after.append(text[: len(text) - len(window)])
        if window.startswith(CLOSE):
            self._after, self._tail, self._state = [], "", "text"
            return window[len(CLOSE) :]
        if CLOSE.startswith(window):
            self._tail = window
            return None
        layout, self._after, self._tail, self._state = "".join(self._after), [], "", "text"
        return layout + window

    def end(self) -> list[Part]:
        if self._state == "text":
            return self._last(self._until.end())
        if self._state == "object" and not self._object.begun:
            return self._last(self._take_opening() + self._object.raw)
        return []


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    call = f'call: {terminal(OPEN)} "\\n" object "\\n" {terminal(CLOSE)}\n'
    return (
        ('calls: call ("\\n" call)*\n' if many else "calls: call\n") + call + either("object", "arguments", functions)
    )


HERMES = ToolFormat("hermes", (OPEN, CLOSE), HermesParser, _grammar)
