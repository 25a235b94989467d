"""The OpenAPI document's bodies and answers: what FastAPI cannot see, as both are handled by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.ingress.errors import speaks_anthropic
from deployments.ingress.protocol import INFORMATIVE

_TEMPLATE = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}
_OPENAI_ERROR = {
    "type": "object",
    "properties": {"message": _TEXT, "type": _TEXT, "param": _OPTIONAL, "code": _OPTIONAL},
    "required": ["message", "type", "param", "code"],
}
_ANTHROPIC_ERROR = {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]}
# Of each event: so readers of OpenAPI 3.1 take the schema of a stream, of which it says nothing.
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
_RETRY_AFTER = {
    "Retry-After": {"description": "With 429 and 503: seconds after which to try again.", "schema": {"type": "integer"}}
}


def schemas(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The components of these bodies and all that they are made of. Equal names get longer ones."""
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)
    components: dict[str, Any] = found["$defs"]
    return components


def body(model: type[BaseModel], names: Sequence[str], components: dict[str, Any]) -> dict[str, Any]:
    """The request body of ``model``, for a server of models with these names; its component is completed."""
    schema = components[model.__name__]
    schema["properties"]["model"]["enum"] = [*names] if "model" in schema.get("required", ()) else [*names, None]
    for name in sorted(INFORMATIVE - schema["properties"].keys()):
        schema["properties"][name] = {"description": "Accepted, and without effect on the answer."}
    return {
        "content": {"application/json": {"schema": {"$ref": _TEMPLATE.format(model=model.__name__)}}},
        "required": True,
    }


def answers(path: str, answer: dict[str, Any], streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of a route; ``answer`` is the schema of a whole one. ``streams``: it may answer with events."""
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    error = _ANTHROPIC_ERROR if speaks_anthropic(path) else _OPENAI_ERROR
    envelope = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    failure = {"headers": _RETRY_AFTER, "content": {"application/json": {"schema": envelope}}}
    return {
        200: {"description": "The answer.", "content": content},
        "4XX": {"description": "What the client has to mend; 408 and 429 pass by themselves.", **failure},
        "5XX": {"description": "No engine is up (503), or a fault of the server's.", **failure},
    }


def _object(**properties: Any) -> dict[str, Any]:
    """An object with these, all of them, and perhaps more."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_COUNT = {"type": "integer", "minimum": 0}
_LENGTH = {"type": ["integer", "null"]}
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_LOGPROBS = {"type": ["object", "null"]}
_MESSAGE = _object(role={"const": "assistant"}, content=_OPTIONAL)


def _choices(kind: str, **properties: Any) -> dict[str, Any]:
    """An answer of OpenAI's with choices."""
    choice = _object(index=_COUNT, **properties, logprobs=_LOGPROBS, finish_reason=_TEXT)
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=_list(choice), usage=_USAGE)


_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_LENGTH)

ANSWERS = {
    "/v1/chat/completions": _choices("chat.completion", message=_MESSAGE),
    "/v1/completions": _choices("text_completion", text=_TEXT),
    "/v1/responses": _object(
        id=_TEXT, object={"const": "response"}, created_at=_COUNT, model=_TEXT, status=_TEXT, usage={"type": "object"},
        output=_list(_object(type=_TEXT)),
    ),
    "/v1/messages": _object(
        id=_TEXT, type={"const": "message"}, role={"const": "assistant"}, model=_TEXT, stop_reason=_OPTIONAL,
        content=_list(_object(type=_TEXT)), usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=_COUNT),
    "/tokenize": _object(count=_COUNT, max_model_len=_LENGTH, tokens=_list(_COUNT)),
    "/detokenize": _object(prompt=_TEXT),
    "/v1/models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "/v1/models/{name:path}": _MODEL,
    "/health": _object(status={"const": "ok"}),
    "/debug/memory": {"type": "object"},
    "/version": _object(version=_TEXT),
}  # fmt: skip
"""Whole answers by route: the fields that every one has."""
