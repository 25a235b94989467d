"""ToolUse: the tools of one request, which of them it forces, and how its answers are read for calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.ingress.dialect import Dialect
from deployments.ingress.errors import bad_request
from deployments.ingress.protocol import NamedTool, Tool, ToolChoice
from deployments.ingress.tools import grammar
from deployments.ingress.tools.format import Function, ToolFormat
from nanoengine.structured.grammar import Grammar

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called."""

    format: ToolFormat
    for_template: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]  # of all tools, by their names
    functions: tuple[Function, ...]  # that may be called
    forced: bool  # the answer is a call
    parallel: bool  # more than one call is allowed

    @classmethod
    def of(
        cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None, dialect: Dialect
    ) -> ToolUse | None:
        """None: the answer is plain. Raises ``ApiError`` (400) and ``InvalidRequestError``.

        With ``tool_choice`` "none" the model does not even see the tools: that it calls none is then sure. The price is
        another prompt, and so a cache that is cold from there on.
        """
        if choice == "none" or not tools:
            if choice not in (None, "none", "auto"):
                raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
            return None
        if dialect.tools is None:
            raise bad_request(
                "how this model writes tool calls is not known, so tools cannot be used: the server's tool_parser may "
                'say it; tool_choice "none" ignores tools',
                "tools",
                "unsupported_parameter",
            )
        if not dialect.takes_tools:
            raise bad_request(
                "this model's chat template has no place for tools, so they cannot be used; "
                'tool_choice "none" ignores them',
                "tools",
                "unsupported_parameter",
            )
        functions = {tool.function.name: Function(tool.function.name, _schema(tool)) for tool in tools}
        if len(functions) < len(tools):
            raise bad_request("tools must have different names", "tools")
        schemas = {function.name: function.schema for function in functions.values()}
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in functions:
                raise bad_request(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
            functions = {name: functions[name]}
        return cls(
            format=dialect.tools,
            for_template=[tool.model_dump(exclude_none=True) for tool in tools],
            schemas=schemas,
            functions=tuple(functions.values()),
            forced=choice == "required" or isinstance(choice, NamedTool),
            # A named function is called once: OpenAI's own API does not call it twice either.
            parallel=parallel is not False and not isinstance(choice, NamedTool),
        )


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments. A function without parameters takes none, as OpenAI says.

    Raises ``InvalidRequestError``.
    """
    parameters = tool.function.parameters
    schema = {"type": "object"} | parameters if parameters else NO_ARGUMENTS
    Grammar("json_schema", json.dumps(schema), "tools")  # refuses what is nested too deep
    return schema


def constraint(
    structured: Grammar | None, tools: ToolUse | None, dialect: Dialect, opened: bool | None
) -> Grammar | None:
    """What the answer must match: a call, or what was asked of its words (``structured``), after reasoning.

    ``opened`` is ``Dialect.opened``'s. Raises ``ApiError`` (400) for what cannot be had together.
    """
    forced = tools is not None and tools.forced
    if forced and structured is not None:
        raise bad_request("tool_choice asks for a call, so the answer cannot have a format of its own", "tool_choice")
    if not forced and (structured is None or (tools is None and opened is None)):
        return structured
    field = structured.field if structured is not None else "tools"
    try:
        bodies = [] if structured is None else [("answer", _answer(structured))]
        if tools is not None:
            bodies.append(("calls", tools.format.grammar(tools.functions, tools.parallel, dialect.terminal)))
    except grammar.SchemaError as error:
        raise bad_request(f"{field}: a schema {error}", field.split(".")[0], "invalid_grammar") from None
    return Grammar("grammar", grammar.whole(bodies, dialect.terminal, opened=opened), field)


def _answer(structured: Grammar) -> str:
    match structured.kind:
        case "json_object":
            return grammar.json_rule("answer", {"type": "object"})
        case "json_schema":
            return grammar.json_rule("answer", json.loads(structured.text))
        case "choice":
            words = (json.dumps(word, ensure_ascii=False) for word in json.loads(structured.text))
            return f"answer: {' | '.join(words)}\n"
    raise bad_request(
        f"{structured.field} cannot be had together with tools, nor with a model that reasons before it answers; "
        "chat_template_kwargs.enable_thinking false may turn that off",
        structured.field.split(".")[0],
        "unsupported_parameter",
    )
