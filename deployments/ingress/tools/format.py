"""ToolFormat: how a family of models writes tool calls, and how its answers are read and forced."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployments.ingress.parts import Parser
from deployments.ingress.tools.grammar import Terminal

_ALPHANUMERIC = string.ascii_letters + string.digits


class Function(NamedTuple):
    """What a request says of one tool."""

    name: str
    schema: dict[str, Any]  # JSON Schema of its arguments, an object


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    special: tuple[str, ...]  # marks that some tokenizers have as special tokens: they have to be in the text
    parser: Callable[[Mapping[str, dict[str, Any]]], Parser]  # of the tools' schemas by their names
    grammar: Callable[[Sequence[Function], bool, Terminal], str]
    """The rule ``calls`` in Lark, as llguidance reads it: one call of these functions, or several. The last argument
    gives a mark as a terminal of Lark."""


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id when the conversation comes back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
