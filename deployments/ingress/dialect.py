"""Dialect: how a model writes what is not plain words, known from its templates and tokens once, at the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.config import ReasoningParserName, ToolParserName
from deployments.ingress import reasoning
from deployments.ingress.tools.format import ToolFormat
from deployments.ingress.tools.select import select
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import Tokenizer

TAIL = 16  # tokens that a mark and the line breaks after it take at most, at the end of a prompt


@dataclass(frozen=True, slots=True)
class Dialect:
    """``tools`` None: its way of writing calls is not known. ``thinks``: it writes its reasoning between marks."""

    tools: ToolFormat | None
    takes_tools: bool  # its template puts tools into the prompt
    thinks: bool
    switches_thinking: bool  # its template has the option enable_thinking
    special: dict[str, int]  # ids of the marks above that are special tokens

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, tool_parser: ToolParserName, parser: ReasoningParserName
    ) -> Dialect:
        """Reasoning is found by its closing mark in a template: one that opens it, or cuts it out of past turns."""
        tools = select(tool_parser, tokenizer)
        templates = "\n".join(tokenizer.chat_templates.values())
        thinks = parser == "think" or (parser == "auto" and reasoning.CLOSE in templates)
        marks = (*(tools.special if tools else ()), *((reasoning.OPEN, reasoning.CLOSE) if thinks else ()))
        ids = {mark: tokenizer.token_id(mark) for mark in marks}
        return cls(
            tools=tools,
            takes_tools=template.takes_tools,
            thinks=thinks,
            switches_thinking=template.has_option("enable_thinking"),
            special={mark: i for mark, i in ids.items() if i is not None and i in tokenizer.special_ids},
        )

    @property
    def visible(self) -> tuple[int, ...]:
        """Special tokens that a parser of the text has to see."""
        return tuple(self.special.values())

    def terminal(self, mark: str) -> str:
        """A mark in a grammar (Lark, as llguidance reads it): text never matches a special token."""
        return f"<[{self.special[mark]}]>" if mark in self.special else json.dumps(mark)

    def opened(self, tail: Sequence[bytes]) -> bool | None:
        """Whether a prompt that ends with these tokens' bytes ends within the reasoning.

        None: no reasoning is to come, as the model has none, or the prompt has closed it (enable_thinking false).
        """
        end = b"".join(tail[-TAIL:]).rstrip()
        if not self.thinks or end.endswith(reasoning.CLOSE.encode()):
            return None
        return end.endswith(reasoning.OPEN.encode())
