"""POST /v1/messages, Anthropic's API: a translation to a chat request, and of its answer back.

What it cannot translate it refuses by name: pictures and documents, server tools, and an answer that is begun for the
model (a last turn of the assistant), which no current model of Anthropic's takes either.

``thinking`` is off unless it is asked for, as the API says: then templates that can are told not to think, and what a
model reasons all the same is left out. ``budget_tokens`` bounds nothing: max_tokens bounds reasoning and answer
together. A thinking block has an empty signature, because there is nobody here to whom it could prove anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.ingress.bodies import Many, Strict
from deployments.ingress.chat import read
from deployments.ingress.dialect import Dialect
from deployments.ingress.errors import ANTHROPIC, ApiError, bad_request
from deployments.ingress.parts import Arguments, Call, Item, Part, Reasoning, Text
from deployments.ingress.protocol import MAX_TOOLS, ChatRequest, chat_request
from deployments.ingress.reading import Reader, Reading
from deployments.ingress.streaming import Choice, Extras, Usage
from deployments.messages import Chunk

_json = msgspec.json.encode

_IGNORED = {"cache_control", "citations", "signature"}  # of blocks: they ask for nothing that changes the answer


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class ToolDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class Choosing(Strict):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: str | None = None


def _blocks(value: Any) -> Any:
    """Content as blocks: a string is one of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_AS_SENT = str | list[dict[str, Any]]
Blocks = Annotated[Many[dict[str, Any]], BeforeValidator(_blocks, json_schema_input_type=_AS_SENT)]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Blocks


class Prompt(Strict):
    """What the tokens of a prompt depend on: POST /v1/messages/count_tokens."""

    model: str
    messages: Many[Turn] = Field(min_length=1)
    system: Annotated[Many[dict[str, Any]] | None, BeforeValidator(_blocks, json_schema_input_type=_AS_SENT | None)] = (
        None
    )
    tools: Many[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None  # every prompt is cached
    output_config: OutputConfig | None = None

    def to_chat(self, dialect: Dialect) -> ChatRequest:
        """The chat request that means the same. Raises ``ApiError`` (400)."""
        return chat_request(self._translated(dialect), NAMES)

    def _translated(self, dialect: Dialect) -> dict[str, Any]:
        if self.messages[-1].role == "assistant":
            raise bad_request("the last of messages must be the user's: an answer cannot be begun for the model")
        system = _text(self.system or [], "system")
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}] if system else [],
            "include_reasoning": self.thinks,
        }
        for index, turn in enumerate(self.messages):
            translate = _user if turn.role == "user" else _assistant
            chat["messages"] += translate(turn.content, f"messages[{index}]")
        if self.thinks and not dialect.thinks:
            raise bad_request("thinking: this model does not write its reasoning apart from its answer")
        if dialect.switches_thinking:
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        if self.tools:
            chat["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            chat |= _choice(self.tool_choice)
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"


class Metadata(BaseModel):
    user_id: str | None = None


class MessagesRequest(Prompt):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def _translated(self, dialect: Dialect) -> dict[str, Any]:
        chat = super()._translated(dialect)
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        user = self.metadata and self.metadata.user_id
        return chat | same | {"stop": self.stop_sequences, "user": user}


NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "user": "metadata.user_id",
}
"""Fields of a chat request, and the fields here that they come from."""


def _user(blocks: Sequence[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before the words: they answer the turn before."""
    words: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content[{index}]"
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                yield {"role": "tool", "tool_call_id": id, "content": _text(_blocks(block.get("content") or []), at)}
            case _:
                words.append(_text_block(block, at))
    if words:
        yield {"role": "user", "content": words}


def _assistant(blocks: Sequence[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for index, block in enumerate(blocks):
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case {"type": "redacted_thinking"}:
                pass  # encrypted by another server: nothing to read
            case _:
                message["content"].append(_text_block(block, f"{where}.content[{index}]"))
    yield message


def _text_block(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block:
        case {"type": "text", "text": str(text)} if block.keys() <= {"type", "text", *_IGNORED}:
            return {"type": "text", "text": text}
    raise bad_request(
        f"{where}: this model reads text only, and a block of type {str(block.get('type'))!r} with the fields "
        f"{', '.join(block) or 'none'} is not one that can be read here"
    )


def _text(blocks: Any, where: str) -> str:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise bad_request(f"{where} must be a string or a list of blocks")
    return "\n".join(_text_block(block, f"{where}[{index}]")["text"] for index, block in enumerate(blocks))


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: Choosing) -> dict[str, Any]:
    chat: dict[str, Any] = {"tool_choice": "required" if choice.type == "any" else choice.type}
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name is required with type tool")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


# -- the answer -------------------------------------------------------------------------------------------------------


class MessagesFormat:
    """message, whole and as events."""

    def __init__(self, id: str, created: int, model: str, extras: Extras, reading: Reading) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._reading = reading
        self._reader = Reader(reading)
        self._started = False
        self._block = -1  # index of the open content block
        self._ends: tuple[str | None, str | int | None] = (None, None)

    def event(self, index: int, chunk: Chunk) -> bytes:
        events = []
        if not self._started:
            self._started = True
            usage = _usage(Usage(chunk.prompt_tokens, chunk.cached_tokens, 0))
            message: dict[str, Any] = self._head | {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            events = [_event("message_start", message=message), _event("ping")]
        last = chunk.finish_reason is not None
        for part, begins in self._reader.read(chunk.text, chunk.completion_tokens, last=last):
            if begins:
                if self._block >= 0:
                    events.append(_event("content_block_stop", index=self._block))
                self._block += 1
                events.append(_event("content_block_start", index=self._block, content_block=_opening(part)))
            if (delta := _delta(part)) is not None:
                events.append(_event("content_block_delta", index=self._block, delta=delta))
        if last:
            self._ends = (chunk.finish_reason, chunk.stop_reason)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        stop = [] if self._block < 0 else [_event("content_block_stop", index=self._block)]
        return b"".join(
            (
                *stop,
                _event("message_delta", delta=_stop(*self._ends, self._reader), usage=_usage(usage)),
                _event("message_stop"),
            )
        )

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body(ANTHROPIC) + b"\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        reader = read(self._reading, choice)
        content = {"content": [_block(item) for item in reader.items.items]}
        stop = _stop(choice.finish_reason, choice.stop_reason, reader)
        return _json(self._head | content | stop | {"usage": _usage(usage)})


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), _json({"type": type, **fields}))


def _usage(usage: Usage) -> dict[str, Any]:
    """``input_tokens`` are those that were not in the cache: the API counts the three kinds apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(reason: str | None, stop: str | int | None, reader: Reader) -> dict[str, Any]:
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "tool_use" if reader.items.calls() else "end_turn", "stop_sequence": None}


def _opening(part: Part) -> dict[str, Any]:
    """A content block as it starts."""
    match part:
        case Call(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: Part) -> dict[str, Any] | None:
    match part:
        case Text(text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case Arguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}
    return None


def _block(item: Item) -> dict[str, Any]:
    if item.call is not None:
        return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": _input(item.text)}
    if item.kind is Reasoning:
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "text", "text": item.text}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that the API wants. Ones that are none, cut by max_tokens mostly, come under the name
    that Anthropic's documents give to invalid JSON."""
    try:
        value = json.loads(arguments)
        if isinstance(value, dict):
            _json(value)
            return value
    except (ValueError, RecursionError, UnicodeEncodeError):
        pass
    return {"INVALID_JSON": arguments}
