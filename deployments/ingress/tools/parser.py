"""CallParser: what the parsers of all formats share: text goes out up to a mark, and after it calls may come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from deployments.ingress.parts import Part, Text, Until
from deployments.ingress.tools.call import CallObject


class OpenCall(Protocol):
    """The state machine of one call. Push text until ``rest`` is not None."""

    begun: bool
    """It is a call now, and stays one."""
    rest: str | None
    """What follows it, or the text that is no call after all."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    @property
    def raw(self) -> str:
        """All text before ``rest``, of what has not begun to be a call."""


class CallParser(ABC):
    """Implements ``parts.Parser``. A format says what its states are, and what stands between calls."""

    after_call: str
    """The state after a call."""

    def __init__(self, mark: str, state: str) -> None:
        self._state = state
        self._until = Until(mark)
        self._calls = 0
        self._between: list[str] = []  # what has come before what may be a call
        self._object: OpenCall = CallObject(0, "")

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest:
            rest = self._step(rest, parts)
        return parts

    @abstractmethod
    def _step(self, text: str, parts: list[Part]) -> str | None:
        """Take what belongs to the present state, and give what follows it: None where all was taken."""

    def _take_opening(self) -> str:
        """What has come before what may be a call, and is text if it turns out to be none. Once."""
        text, self._between = "".join(self._between), []
        return text

    def _words(self, text: str, parts: list[Part]) -> str | None:
        """Text up to the mark; gives what follows the mark."""
        words, rest = self._until.push(text)
        if words:
            parts.append(Text(words))
        return rest

    def _call(self, text: str, parts: list[Part]) -> str | None:
        """More of what may be a call; gives what follows it."""
        parts += self._object.push(text)
        if self._object.rest is not None:
            opening = self._take_opening()
            if self._object.begun:
                self._calls, self._state = self._calls + 1, self.after_call
            else:
                parts.append(Text(opening + self._object.raw))
                self._state = "text"
        return self._object.rest

    def _last(self, words: str) -> list[Part]:
        """Words at the end; after a call white space there is layout, like that before the next call."""
        return [Text(words)] if words.strip() or (words and not self._calls) else []
