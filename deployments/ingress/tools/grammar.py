"""Grammars that force a tool call, marks included, in Lark as llguidance reads it.

They are made of rules. A schema stands in a rule of its own, so that a ``$ref`` in it finds its ``$defs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.ingress import reasoning

if TYPE_CHECKING:
    from deployments.ingress.tools.format import Function

Terminal = Callable[[str], str]
"""A mark as a terminal of Lark: its text, or its token where that is a special one, which no text matches."""


class SchemaError(Exception):
    """Why arguments cannot be held to a schema, as the end of a sentence."""


def json_rule(rule: str, schema: dict[str, Any] | bool) -> str:
    """``rule``: JSON that matches a schema."""
    return f"{rule}: %json {json.dumps(schema)}\n"


def either(rule: str, arguments: str, functions: Sequence[Function]) -> str:
    """``rule``: a call of one of the functions as a JSON object, with its arguments under the name ``arguments``."""
    heads = [f'"{{\\"name\\": \\"{function.name}\\", \\"{arguments}\\": "' for function in functions]
    return one_of(rule, heads, '"}"', functions)


def one_of(rule: str, heads: Sequence[str], tail: str, functions: Sequence[Function]) -> str:
    """``rule``: one of ``heads``, the arguments of its function, and ``tail``."""
    calls = " | ".join(f"{head} {rule}_{i} {tail}" for i, head in enumerate(heads))
    return f"{rule}: {calls}\n" + "".join(json_rule(f"{rule}_{i}", f.schema) for i, f in enumerate(functions))


class Parameter(NamedTuple):
    """One argument of a function, for formats that write each by itself."""

    name: str
    schema: dict[str, Any]  # with the definitions that its references need
    required: bool


_ABOUT = frozenset({"title", "description", "$schema", "$comment", "strict"})  # say nothing of what an object holds


def parameters(schema: dict[str, Any]) -> list[Parameter]:
    """What a function takes, in the order of its schema. Raises ``SchemaError`` where its parts are not independent."""
    named: dict[str, Any] = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.keys() - _ABOUT - named.keys() - {"type", "properties", "required", "additionalProperties"}
    if others or schema["type"] != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise SchemaError(
            "cannot be kept by a model that writes each argument by itself: beside properties and required it has "
            f"{', '.join(sorted(others)) or 'what is no object'}"
        )
    if missing := [name for name in required if name not in properties]:
        raise SchemaError(f"requires {missing[0]!r}, which is not among its properties")
    return [
        Parameter(name, named | value if isinstance(value, dict) else {"allOf": [value]}, name in required)
        for name, value in properties.items()
    ]


def whole(bodies: Sequence[tuple[str, str]], terminal: Terminal, *, opened: bool | None) -> str:
    """The grammar of an answer that matches one of ``bodies``, each the name of a rule and the rules.

    ``opened``: of a model that may reason first; whether the prompt ends within it. None: it does not reason.
    """
    start = f"({' | '.join(name for name, _ in bodies)})"
    thought = ""
    if opened is not None:
        opening = "thought" if opened else f"({terminal(reasoning.OPEN)} thought)?"
        close = terminal(reasoning.CLOSE)
        thought = (
            f"thought[suffix={close}]: /(?s:.*)/\n" if close.startswith('"') else f"thought: /(?s:.*)/ {close}\n"
        ) + "LAYOUT: /\\n*/\n"
        start = f"{opening} LAYOUT {start}"
    return f"start: {start}\n{thought}" + "".join(rules for _, rules in bodies)
