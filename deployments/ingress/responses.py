"""POST /v1/responses, OpenAI's newer API: a translation to a chat request, and of its answer back.

Nothing is stored, so ``store`` has no effect (the answer says ``"store": false``), and what would need a store is
refused by name: ``previous_response_id``, ``conversation``, ``background``, ``item_reference``. A client sends the
conversation as ``input`` instead, with the items of earlier answers in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from deployments.ingress.bodies import Many, Strict
from deployments.ingress.chat import read
from deployments.ingress.errors import ApiError, bad_request
from deployments.ingress.parts import Arguments, Call, Item, Part, Reasoning, Text
from deployments.ingress.protocol import MAX_TOOLS, ChatRequest, chat_request
from deployments.ingress.reading import Reader, Reading
from deployments.ingress.streaming import Choice, Extras, Usage
from deployments.messages import Chunk

_json = msgspec.json.encode

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "chat_template_kwargs": "reasoning",
}
"""Fields of a chat request, and the fields here that they come from."""

MAX_METADATA = 16  # OpenAI's limit

_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs"),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt"),
    *("prompt_cache_key", "user"),
)
"""Fields of a chat request by the same name; the second line is not OpenAI's, but of use here as there."""


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the default


class ReasoningConfig(Strict):
    """``effort`` "none" turns the reasoning off where the model's template can; others are the model's to choose."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool | None = None  # padding against who reads sizes; none is sent


def _choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required" | {"type": "function", "name": str()}:
            return value
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"must have at most {MAX_METADATA} entries, and there are {len(value)}")
    return value


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Strict):
    """The body. ``metadata`` comes back in the answer."""

    model: str
    input: Annotated[
        Many[dict[str, Any]], BeforeValidator(_items, json_schema_input_type=str | list[dict[str, Any]])
    ] = Field(min_length=1)
    instructions: str | None = None
    tools: Many[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[str | dict[str, Any] | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Many[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_few)] = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None  # a prompt that is too long is refused, never cut
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    def to_chat(self, switches_thinking: bool) -> ChatRequest:
        """The chat request that means the same. Raises ``ApiError`` (400)."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise bad_request(
                    f"{name} is not supported: nothing is stored here; send the conversation as input",
                    name,
                    "unsupported_parameter",
                )
        # Encrypted reasoning is asked for by clients that store nothing; what reasoning there is comes in the open.
        if unknown := set(self.include or ()) - {"reasoning.encrypted_content"}:
            raise bad_request(f"include: {min(unknown)!r} is not supported", "include", "unsupported_parameter")
        chat: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat["messages"] = [*instructions, *_messages(self.input)]
        chat["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        chat["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, dict):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice["name"]}}
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None and switches_thinking:
            thinks = {"enable_thinking": self.reasoning.effort != "none"}
            chat["chat_template_kwargs"] = thinks | (self.chat_template_kwargs or {})
        return chat_request(chat, NAMES)


def _response_format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    if format.schema_ is None:
        raise bad_request("text.format.schema is required with type json_schema", "text")
    fields = {"name": format.name, "description": format.description, "strict": format.strict}
    return {"type": "json_schema", "json_schema": {"schema": format.schema_, **fields}}


def _messages(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chat messages of items: what the model wrote in a row (reasoning, words, calls) is one message."""
    turn: dict[str, Any] | None = None  # the assistant's, while it goes on
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item:
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                turn = turn or {"role": "assistant", "content": []}
                function = {"name": name, "arguments": arguments}
                turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
                continue
            case {"type": "reasoning"}:
                turn = turn or {"role": "assistant", "content": []}
                thought = "".join(_texts(item.get("content") or [], where))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
                continue
            case {"role": "assistant"} if item.get("type", "message") == "message":
                turn = turn or {"role": "assistant", "content": []}
                turn["content"] += [{"type": "text", "text": text} for text in _texts(item.get("content"), where)]
                continue
        if turn is not None:
            yield turn
            turn = None
        match item:
            case {"role": "user" | "system" | "developer"} if item.get("type", "message") == "message":
                content = [{"type": "text", "text": text} for text in _texts(item.get("content"), where)]
                yield {"role": item["role"], "content": content}
            case {"type": "function_call_output", "call_id": str(id)}:
                yield {"role": "tool", "tool_call_id": id, "content": "\n".join(_texts(item.get("output"), where))}
            case _:
                kind = item.get("type", "message")
                raise bad_request(
                    f"{where}: an item of type {str(kind)!r} with these fields cannot be read here; items are messages "
                    "(role and content), function_call, function_call_output and reasoning",
                    "input",
                )
    if turn is not None:
        yield turn


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message's, result's or reasoning's content."""
    texts = []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else [None]:
        match part:
            case str(text):
                texts.append(text)
            case {"type": "input_text" | "output_text" | "reasoning_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise bad_request(
                    f"{where}: this model reads text only, and there is a part of type {str(kind)!r}", "input"
                )
    return texts


# -- the answer -------------------------------------------------------------------------------------------------------


class ResponsesFormat:
    """response, whole and as events."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        extras: Extras,
        reading: Reading,
        request: ResponsesRequest,
    ) -> None:
        self._answer = {
            "id": id,
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _echoed(request.text)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_echoed_tool(tool) for tool in request.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
        self._reading = reading
        self._reader = Reader(reading)
        self._items: list[dict[str, Any]] = []  # of the output, as they were when they began
        self._number = 0  # of the next event
        self._finish_reason: str | None = None

    def event(self, index: int, chunk: Chunk) -> bytes:
        events = []
        if self._number == 0:
            begun = self._answer | {"status": "in_progress", "output": [], "usage": None}
            events = [self._event("response.created", response=begun)]
            events.append(self._event("response.in_progress", response=begun))
        last = chunk.finish_reason is not None
        for part, begins in self._reader.read(chunk.text, chunk.completion_tokens, last=last):
            if begins:
                events += self._close("completed")
                events += self._open(part)
            if (delta := self._delta(part)) is not None:
                events.append(delta)
        self._finish_reason = chunk.finish_reason
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        response = self._response(self._reader, [item["id"] for item in self._items], self._finish_reason, usage)
        closing = self._close(response["output"][-1]["status"]) if self._items else []
        return b"".join((*closing, self._event(f"response.{response['status']}", response=response)))

    def error(self, error: ApiError) -> bytes:
        fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
        failed = self._answer | {"status": "failed", "output": [], "usage": None}
        failed["error"] = {
            "code": "server_error" if error.status >= 500 else "invalid_prompt",
            "message": error.message,
        }
        return self._event("error", **fields) + self._event("response.failed", response=failed)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        reader = read(self._reading, choice)
        ids = [_id(item.kind) for item in reader.items.items]
        return _json(self._response(reader, ids, choice.finish_reason, usage))

    def _response(self, reader: Reader, ids: Sequence[str], reason: str | None, usage: Usage) -> dict[str, Any]:
        cut = reason == "length"
        items = reader.items.items
        output = [
            _item(item, id, "incomplete" if cut and item is items[-1] else "completed")
            for item, id in zip(items, ids, strict=True)
        ]
        return self._answer | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": _usage(usage, reader.reasoning_tokens),
        }

    def _event(self, type: str, **fields: Any) -> bytes:
        data = _json({"type": type, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)

    def _open(self, part: Part) -> list[bytes]:
        """An item of the output begins."""
        kind = type(part)
        item = Item(Text if kind is Text else Reasoning if kind is Reasoning else Call)
        item.call = part if isinstance(part, Call) else None
        began = _item(item, _id(item.kind), "in_progress")
        if item.call is None:
            began["content"] = []
        self._items.append(began)
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=began)]
        if item.call is None:
            part_ = _content(item)
            events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part_))
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _delta(self, part: Part) -> bytes | None:
        match part:
            case Text(text):
                fields = {"content_index": 0, "delta": text, "logprobs": []}
                return self._event("response.output_text.delta", **self._place(), **fields)
            case Reasoning(text):
                return self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
            case Arguments(_, text):
                return self._event("response.function_call_arguments.delta", **self._place(), delta=text)
        return None

    def _close(self, status: str) -> list[bytes]:
        """The last item of the output ends, if there is one."""
        if not self._items:
            return []
        place = self._place()
        item = self._reader.items.items[len(self._items) - 1]
        if item.call is not None:
            name = {"name": item.call.name, "arguments": item.text}
            events = [self._event("response.function_call_arguments.done", **place, **name)]
        else:
            text = {"text": item.text, **({"logprobs": []} if item.kind is Text else {})}
            kind = "output_text" if item.kind is Text else "reasoning_text"
            events = [
                self._event(f"response.{kind}.done", **place, content_index=0, **text),
                self._event("response.content_part.done", **place, content_index=0, part=_content(item)),
            ]
        done = _item(item, place["item_id"], status)
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item=done))
        return events


def _id(kind: type[Part]) -> str:
    prefix = {Text: "msg_", Reasoning: "rs_", Call: "fc_"}[kind]
    return prefix + uuid.uuid4().hex


def _item(item: Item, id: str, status: str) -> dict[str, Any]:
    """An item of the output."""
    if item.call is not None:
        call = {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
        return {"type": "function_call", "id": id, "status": status, **call}
    if item.kind is Reasoning:
        return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": [_content(item)]}
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": [_content(item)]}


def _content(item: Item) -> dict[str, Any]:
    if item.kind is Reasoning:
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _echoed(text: TextConfig | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_none=True)


def _echoed_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": False} | tool.model_dump(exclude_none=True)
