"""Calls of Hermes and Qwen 2.5/3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from deployments.ingress.parts import Part, Text, Until
from deployments.ingress.tools.call import CallObject
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import Terminal, either

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_AFTER = " \t\r\n}"  # layout after the object: a bracket too many is a common slip


class HermesParser:
    """White space around calls is layout. Between the marks any name is a call: a client can tell the model that it has
    no such tool. A closing mark may be missing; what stands in its place is text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._state: Literal["text", "object", "after"] = "text"
        self._until = Until(OPEN)
        self._calls = 0
        self._object = CallObject(0, "")
        self._after: list[str] = []  # layout after the object
        self._tail = ""  # the beginning of a mark after it

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest:
            match self._state:
                case "text":
                    words, rest = self._until.push(rest)
                    parts += [Text(words)] if words else []
                    if rest is not None:
                        self._object, self._state = CallObject(self._calls, call_id()), "object"
                case "object":
                    parts += self._object.push(rest)
                    rest = self._object.rest
                    if rest is None:
                        pass
                    elif self._object.begun:
                        self._calls, self._state = self._calls + 1, "after"
                    else:
                        parts.append(Text(self._until.dropped + OPEN + self._object.raw))
                        self._state = "text"
                case "after":
                    rest = self._close(rest)
        return parts

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
            words = self._until.end()
            # After a call, white space at the end is layout like that before the next call.
            return [Text(words)] if words.strip() or (words and not self._calls) else []
        if self._state == "object" and not self._object.begun:
            return [Text(self._until.dropped + OPEN + self._object.raw)]
        return []


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    call = f'call: {terminal(OPEN)} "\\n" object "\\n" {terminal(CLOSE)}\n'
    return (
        ('calls: call ("\\n" call)*\n' if many else "calls: call\n") + call + either("object", "arguments", functions)
    )


HERMES = ToolFormat("hermes", (OPEN, CLOSE), HermesParser, _grammar)
