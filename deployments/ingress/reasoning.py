"""Reasoning that a model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from typing import Literal

from deployments.ingress.parts import Parser, Part, Reasoning, Until

OPEN, CLOSE = "<think>", "</think>"
LAYOUT = "\n"  # around the marks: templates put it back when they write the reasoning of a past turn


class ThinkParser:
    """Splits reasoning off, and leaves what follows to the parser of the answer.

    Reasoning stands at the beginning or nowhere: "<think>" later on is text, as a model that explains the mark writes
    it. Reasoning that never ends is all there is. ``opened``: the prompt ends with the mark, so that the answer begins
    within the reasoning.
    """

    def __init__(self, answer: Parser, *, opened: bool) -> None:
        self._answer = answer
        self._state: Literal["start", "thinking", "after", "answer"] = "thinking" if opened else "start"
        self._space: list[str] = []  # white space at the start
        self._tail = ""  # the beginning of the opening mark
        self._until = Until(CLOSE, LAYOUT)
        self._begun = False  # the reasoning has words

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._state == "thinking"

    def push(self, text: str) -> list[Part]:
        if self._state == "answer":
            return self._answer.push(text)
        if self._state == "start":
            started = self._tail or text.lstrip()
            if not self._tail:
                self._space.append(text[: len(text) - len(started)])
            else:
                started += text
            if started != OPEN and OPEN.startswith(started):
                self._tail = started
                return []
            if not started.startswith(OPEN):
                self._state = "answer"
                return self._answer.push("".join(self._space) + started)
            self._state, text = "thinking", started[len(OPEN) :]
        parts: list[Part] = []
        if self._state == "thinking":
            words, rest = self._until.push(text)
            parts = self._reasoning(words)
            if rest is None:
                return parts
            self._state, text = "after", rest
        if text := text.lstrip(LAYOUT):
            self._state = "answer"
            parts += self._answer.push(text)
        return parts

    def end(self) -> list[Part]:
        if self._state == "thinking":
            return self._reasoning(self._until.end())
        if self._state == "start":
            return self._answer.push("".join(self._space) + self._tail) + self._answer.end()
        return self._answer.end()

    def _reasoning(self, words: str) -> list[Part]:
        if not self._begun:
            words = words.lstrip(LAYOUT)
            self._begun = bool(words)
        return [Reasoning(words)] if words else []
