"""What an answer's text is made of: words for the reader, reasoning, and tool calls, as they come in.

A parser is the state machine of one answer. It takes the text in pieces, however they are cut, and gives parts; the
parts, put together, do not depend on the cuts. So the streamed and the whole answer are the same parse. Each piece is
looked at once: what may still turn out to be a mark is held back, and never more than the mark's length of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    """Words for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Words of the model to itself."""

    text: str


class Call(NamedTuple):
    """A tool call begins; calls of one answer are numbered from 0."""

    number: int
    id: str
    name: str


class Arguments(NamedTuple):
    """The next characters of a call's arguments: JSON text, as the model wrote it."""

    number: int
    text: str


Part = Text | Reasoning | Call | Arguments


class Parser(Protocol):
    """One answer's state machine. It raises nothing, whatever the text."""

    def push(self, text: str) -> list[Part]:
        """Take the next piece, and give the parts that are certain now."""

    def end(self) -> list[Part]:
        """The parts that the end of the text decides. Call it once, last."""


class Verbatim:
    """All text is for the reader."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def end(self) -> list[Part]:
        return []


class Until:
    """Text up to a mark, given out as soon as it is certain to come before it.

    ``layout``: characters that are layout where they stand right before the mark, and dropped there; None is white
    space. They are held back too, until it is known whether the mark follows.
    """

    def __init__(self, mark: str, layout: str | None = None) -> None:
        self._mark = mark
        self._layout = layout
        self._space: list[str] = []  # layout so far, that the mark may follow
        self._tail = ""  # the beginning of the mark, if it is one
        self.dropped = ""  # layout before the mark that came, for when the mark turns out to mark nothing

    def push(self, text: str) -> tuple[str, str | None]:
        """(text before the mark, what follows the mark: None while it has not come)."""
        window = self._tail + text
        at = window.find(self._mark)
        if at >= 0:
            before = window[:at].rstrip(self._layout)
            text = "".join(self._space) + before if before else ""
            self.dropped = window[len(before) : at] if before else "".join(self._space) + window[:at]
            self._space, self._tail = [], ""
            return text, window[at + len(self._mark) :]
        start = begins_at(window, self._mark)
        window, self._tail = window[:start], window[start:]
        certain = window.rstrip(self._layout)
        if not certain:
            self._space.append(window)
            return "", None
        text = "".join(self._space) + certain
        self._space = [window[len(certain) :]]
        return text, None

    def end(self) -> str:
        """What was held back and is text after all."""
        text = "".join(self._space) + self._tail
        self._space, self._tail = [], ""
        return text


def begins_at(text: str, mark: str) -> int:
    """Where the longest end of ``text`` stands that ``mark`` begins with, and is longer than; else its length."""
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            return start
    return len(text)


@dataclass(slots=True)
class Item:
    """A stretch of an answer: parts of one kind in a row, or one call."""

    kind: type[Text] | type[Reasoning] | type[Call]
    pieces: list[str] = field(default_factory=list)
    call: Call | None = None

    @property
    def text(self) -> str:
        """The words, or a call's arguments."""
        return "".join(self.pieces)


class Items:
    """Parts put together, in the order in which they came."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def add(self, part: Part) -> bool:
        """Whether a new item begins with it."""
        if isinstance(part, Arguments):
            self.items[-1].pieces.append(part.text)
            return False
        if isinstance(part, Call):
            self.items.append(Item(Call, call=part))
            return True
        begins = not self.items or self.items[-1].kind is not type(part)
        if begins:
            self.items.append(Item(type(part)))
        self.items[-1].pieces.append(part.text)
        return begins

    def text(self, kind: type[Text] | type[Reasoning]) -> str | None:
        """All words of a kind; None if there are none."""
        return "".join(item.text for item in self.items if item.kind is kind) or None

    def calls(self) -> list[Item]:
        return [item for item in self.items if item.call is not None]
