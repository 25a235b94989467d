"""OpenAI's request bodies, with vLLM's extra sampling fields under vLLM's names.

What is done with a field: one we serve is checked strictly (a number sent as a string is an error, ``null`` means
absent); one we know and do not serve is a 400 that names it, unless its value asks for nothing; one that only informs
the server (``metadata``) is accepted; any other is a 400 with the nearest name, as OpenAI's own API does,
because a mistyped ``max_token`` that is ignored costs its user more than an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deployments.ingress.bodies import Many, Strict
from deployments.ingress.errors import MAX_PARAM, ApiError, bad_request, from_invalid_request
from deployments.ingress.structured import StructuredFields
from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams

INFORMATIVE = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "parallel_tool_calls",
    }
)
"""Accepted and without effect on the answer. ``request_id`` is never an engine's key."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: the values (beside null) that ask for nothing, so that clients which always send it work
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "echo_prompt": (False,),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}

INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "text is only ever continued at its end; for a model that was trained to fill in the middle, put its own "
    "marks into the prompt",
}
"""What to do about a field that is refused. OpenAI's names of 2023 for what it has replaced are not mapped: the answer
would have to be in the old shape too, which no client of today reads."""

MAX_TOOLS = 128  # OpenAI's limit
MAX_BIASES = 1024  # as many as an engine takes
MAX_STOP_STRINGS = 16  # OpenAI allows 4, vLLM any number; each is searched for in every delta


_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that are SamplingParams' own, by the same name."""


_Stop = str | list[str] | None  # as it is sent


def _stop(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return value


def _biases(value: Any) -> Any:
    """Token ids are the keys of a JSON object, so they come as text."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} token ids, and there are {len(value)}")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"{key[:20]!r} is not a token id: keys are integers from 0, written as strings")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Request(StructuredFields):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = None
    temperature: float | None = Field(None, le=2)
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[Many[str] | None, BeforeValidator(_stop, json_schema_input_type=_Stop)] = Field(
        None, max_length=MAX_STOP_STRINGS
    )

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        dict[int, float] | None, BeforeValidator(_biases, json_schema_input_type=dict[str, float] | None)
    ] = None
    allowed_token_ids: Many[int] | None = None
    bad_words: Many[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None  # n beams, and the n best answers
    length_penalty: float | None = Field(None, ge=-10, le=10)  # above 1 for longer answers
    early_stopping: bool | Literal["never"] | None = None  # of beam search, as in transformers
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    prompt_cache_key: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def sequences(self) -> int:
        """How many are generated for each prompt."""
        return self.n or 1

    @property
    def session(self) -> str:
        """What the caller says belongs together, from the narrower to the broader; "" where it says nothing."""
        return self.prompt_cache_key or self.user or ""

    def sampling(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The engine's parameters, of ``defaults`` what the request does not set.

        Raises ``InvalidRequestError`` naming the field that is out of range.
        """
        asked = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **(dict(defaults) | asked),
            logit_bias=self.logit_bias,
            structured=self.structured(),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class Message(BaseModel):
    """One turn. All that is not the role goes to the chat template's renderer, which knows what the model reads.

    It checks content and tool calls. What else is known to be text is checked here: a template would print the number.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message without its nulls, ``developer`` under the older name that templates know."""
        message = {name: value for name, value in self if value is not None and name != "role"}
        if "reasoning" in message:  # the other of the two names that answers have it under; templates know the first
            message.setdefault("reasoning_content", message.pop("reasoning"))
        return {"role": "system" if self.role == "developer" else self.role} | message


class FunctionDefinition(BaseModel):
    """What a function is. What else it says goes to the template, as the model was trained on tools that say more."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required" | {"type": "function", "function": {"name": str()}}:
            return value
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _prompts(value: Any) -> Any:
    """All four forms (text, texts, ids, lists of ids) as a list of texts and id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be an empty list")
    if _are_ids(value):
        return [value]
    for index, item in enumerate(value):
        if isinstance(item, str):
            continue
        if item == []:
            raise ValueError(f"item {index} must not be an empty list")
        if not isinstance(item, list) or not _are_ids(item):
            raise ValueError(f"item {index} must be a string or a list of token ids (integers from 0)")
    return value


def _are_ids(items: list[Any]) -> bool:
    # No loop of ours over what may be a million: numbers decoded from JSON are int or float, and bool is neither.
    return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**31


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str | list[int]]),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None

    @property
    def sequences(self) -> int:
        return self.best_of or self.n or 1


R = TypeVar("R", bound=BaseModel)


def parse(model: type[R], body: bytes) -> R:
    """Check a request body. Raises ``ApiError`` (400) that names the field and says what is expected of it."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    for name in list(data):
        if name in model.model_fields:
            continue
        if name in UNSUPPORTED:
            if data[name] is not None and data[name] not in UNSUPPORTED[name]:
                hint = f": {INSTEAD[name]}" if name in INSTEAD else ""
                raise bad_request(f"{name} is not supported by this server{hint}", name, "unsupported_parameter")
        elif name not in INFORMATIVE:
            near = difflib.get_close_matches(name[:MAX_PARAM], model.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise bad_request(f"unknown field {name!r}{hint}", name, "unknown_parameter")
        del data[name]
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explained(error) from None


def chat_request(body: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request that a body of another API was translated to; nulls are absent.

    Raises ``ApiError`` (400) in that API's words: ``names`` has its name for a field, where it is another.
    """
    with renaming(names):
        try:
            return ChatRequest.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise _explained(error) from None


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat request leave the block in the words of the API that it was translated from."""
    try:
        yield
    except InvalidRequestError as error:
        raise renamed(from_invalid_request(error), names) from error
    except ApiError as error:
        raise renamed(error, names) from error


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    if (name := names.get(error.param or "")) is None:
        return error
    message = error.message.replace(error.param or "", name, 1)
    return ApiError(error.status, message, type=error.type, param=name, code=error.code)


def _explained(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = first["loc"]
    field = str(location[0]) if location else None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return bad_request(f"{path} is required", field, "missing_required_parameter")
    return bad_request(
        f"{path}: {reason[:1].lower()}{reason[1:]}",
        field,
        "invalid_type" if "type" in first["type"] else "invalid_value",
    )
