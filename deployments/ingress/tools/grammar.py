"""Grammars that force a tool call, marks included, in Lark as llguidance reads it.

They are made of rules. A schema stands in a rule of its own, so that a ``$ref`` in it finds its ``$defs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.ingress import reasoning
from nanoengine.structured.json_schema import prepared

if TYPE_CHECKING:
    from deployments.ingress.tools.format import Function

Terminal = Callable[[str], str]
"""A mark as a terminal of Lark: its text, or its token where that is a special one, which no text matches."""

# A model that may put any amount of space between two tokens of JSON can do so for ever. "lenient" would let a schema
# have its own keywords ignored. Both are set here because a schema could set them for itself.
_JSON = {"x-guidance": {"lenient": False, "whitespace_pattern": r"( |\n {0,40})?"}}


def json_rule(rule: str, schema: dict[str, Any]) -> str:
    """``rule``: JSON that matches a schema. Raises ``SchemaError``."""
    return f"{rule}: %json {json.dumps(prepared(schema) | _JSON)}\n"


def either(rule: str, arguments: str, functions: Sequence[Function]) -> str:
    """``rule``: a call of one of the functions as a JSON object, with its arguments under the name ``arguments``."""
    heads = [f'"{{\\"name\\": \\"{function.name}\\", \\"{arguments}\\": "' for function in functions]
    return one_of(rule, heads, '"}"', functions)


def one_of(rule: str, heads: Sequence[str], tail: str, functions: Sequence[Function]) -> str:
    """``rule``: one of ``heads``, the arguments of its function, and ``tail``."""
    calls = " | ".join(f"{head} {rule}_{i} {tail}" for i, head in enumerate(heads))
    return f"{rule}: {calls}\n" + "".join(json_rule(f"{rule}_{i}", f.schema) for i, f in enumerate(functions))


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
