"""Reading: how the answers of one request are taken apart into words, reasoning and calls."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.ingress.parts import Arguments, Call, Items, Parser, Part, Reasoning, Verbatim
from deployments.ingress.reasoning import ThinkParser
from deployments.ingress.tools.use import ToolUse


@dataclass(frozen=True, slots=True)
class Reading:
    """What is looked for. Nothing, where all is default."""

    tools: ToolUse | None = None
    opened: bool | None = None  # of a model that reasons: whether its prompt ends within the reasoning
    include_reasoning: bool = True

    @property
    def plain(self) -> bool:
        return self.tools is None and self.opened is None


class Reader:
    """One answer while it comes in."""

    def __init__(self, reading: Reading) -> None:
        tools = reading.tools
        self._parser: Parser = Verbatim() if tools is None else tools.format.parser(tools.schemas)
        self._thinker: ThinkParser | None = None
        if reading.opened is not None:
            self._parser = self._thinker = ThinkParser(self._parser, opened=reading.opened)
        self._parallel = tools is None or tools.parallel
        self._include_reasoning = reading.include_reasoning
        self._items = Items()
        self.reasoning_tokens = 0  # those of the pieces that end within the reasoning

    def read(self, text: str, tokens: int, *, last: bool) -> list[tuple[Part, bool]]:
        """The parts that the next piece of text decides, each with whether a new item begins with it.

        ``tokens``: how many the answer has with this piece.
        """
        parts = self._parser.push(text)
        if self._thinker is not None and self._thinker.thinking:
            self.reasoning_tokens = tokens
        if last:
            parts += self._parser.end()
        return [(part, self._items.add(part)) for part in parts if self._wanted(part)]

    def _wanted(self, part: Part) -> bool:
        if isinstance(part, (Call, Arguments)):
            return self._parallel or part.number == 0  # a model cannot be kept from a second call; a client can
        return self._include_reasoning or not isinstance(part, Reasoning)

    @property
    def items(self) -> Items:
        """All parts so far, put together."""
        return self._items
