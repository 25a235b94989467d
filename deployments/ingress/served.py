"""ServedModel: one model as the API sees it, and the way from a checked request to what its engines have to do."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deployments.config import IngressConfig, ModelArgs
from deployments.ingress import protocol
from deployments.ingress.dialect import TAIL, Dialect
from deployments.ingress.errors import bad_request
from deployments.ingress.reading import Reading
from deployments.ingress.streaming import CompletionFormat, Format, Pieces
from deployments.ingress.tools.use import ToolUse, constraint
from deployments.messages import Chunk
from nanoengine.sampling.params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

MAX_BEAMS = 10  # an engine gives 20 likeliest tokens, and each beam needs twice as many as there are beams
NOT_WITH_BEAMS = (
    *("stream", "logprobs", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "response_format", "tools", "structured_outputs", "allowed_token_ids"),
    *("bad_words", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""What draws tokens (temperature, top_p, seed and the like) has no effect either, but clients always send that."""


class Engines(Protocol):
    """What the API needs of the engines; ``EngineClient`` in production."""

    @property
    def max_model_len(self) -> int | None: ...

    def available(self) -> bool: ...

    async def memory(self) -> dict[str, Any]: ...

    def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool,
        priority: int,
        cache_salt: str,
    ) -> AsyncGenerator[Chunk]: ...


class Text(Protocol):
    """What the API needs of a tokenizer; ``TextFrontend`` in production."""

    sampling_defaults: Mapping[str, Any]

    async def chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> npt.NDArray[np.int32]: ...

    async def encode(self, text: str, add_special_tokens: bool) -> npt.NDArray[np.int32]: ...

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def dialect(self) -> Dialect: ...


class Metrics(Protocol):
    """What the API counts; ``RequestMetrics`` in production."""

    def first_token(self, seconds: float) -> None: ...

    def next_tokens(self, seconds: float, tokens: int) -> None: ...

    def finished(self, reason: str, seconds: float) -> None: ...

    def rejected(self, reason: str) -> None: ...


NewFormat = Callable[[str, int, str, bool, Pieces | None], Format]
"""Makes a format of: id, time of creation, model, include_usage, and a tokenizer if there are logprobs."""


@dataclass(slots=True)
class Job:
    """A checked request: what to generate, and in which shape to answer."""

    model: ServedModel
    prompts: list[npt.NDArray[np.int32]]
    n: int  # choices of each prompt
    params: SamplingParams
    clip: bool
    priority: int
    cache_salt: str
    stream: bool
    format: Format
    length_penalty: float | None = None  # of beam search with ``n`` beams; None: the choices are sampled
    names: Mapping[str, str] = field(default_factory=dict)  # of fields, where a client knows them by other names


class ServedModel:
    """Its deployment's engines, its tokenizer, its counters, and the limits of this ingress replica."""

    def __init__(self, args: ModelArgs, config: IngressConfig, engines: Engines, text: Text, metrics: Metrics) -> None:
        self.names = args.model_names
        self.engines, self.text, self.metrics = engines, text, metrics
        self._root = args.engine.model
        self._by_priority = args.engine.scheduling_policy == "priority"
        self._config = config

    def card(self, name: str, created: int) -> dict[str, Any]:
        """What /v1/models says of it under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "nanoserve",
            "root": self._root,
            "max_model_len": self.engines.max_model_len,
            "sampling_defaults": dict(self.text.sampling_defaults),
        }

    async def conversation(self, request: protocol.ChatRequest, format: Callable[[Reading], NewFormat], id: str) -> Job:
        """The job of a chat request. Raises ``ApiError`` or ``InvalidRequestError``."""
        self._check(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        params = request.sampling(
            self.text.sampling_defaults,
            max_tokens=limit if limit is not None else self._config.default_max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        dialect, tools = self.text.dialect, self._tools(request)
        prompt = await self._prompt(request, tools)
        opened = dialect.opened([self.text.token_bytes(int(i)) for i in prompt[-TAIL:]])
        reading = Reading(tools, opened, include_reasoning=request.include_reasoning is not False)
        if not reading.plain:
            structured = constraint(params.structured, tools, dialect, opened)
            params = replace(params, structured=structured, visible_special_tokens=dialect.visible)
        return self._job(request, [prompt], params, clip=limit is None, format=format(reading), id=id)

    async def prompt(self, request: protocol.ChatRequest) -> npt.NDArray[np.int32]:
        """The token ids of a conversation. Raises ``InvalidRequestError``."""
        return await self._prompt(request, self._tools(request))

    def _tools(self, request: protocol.ChatRequest) -> ToolUse | None:
        return ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls, self.text.dialect)

    async def _prompt(self, request: protocol.ChatRequest, tools: ToolUse | None) -> npt.NDArray[np.int32]:
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            options["add_generation_prompt"] = request.add_generation_prompt
        if tools is not None:
            options["tools"] = tools.for_template
        return await self.text.chat([message.for_template() for message in request.messages], options)

    async def completion(self, request: protocol.CompletionRequest) -> Job:
        """The job of a completion request. Raises ``ApiError`` or ``InvalidRequestError``."""
        self._check(request, prompts=len(request.prompt))
        limit = request.max_tokens
        params = request.sampling(
            self.text.sampling_defaults,
            max_tokens=limit if limit is not None else COMPLETION_MAX_TOKENS,
            logprobs=request.logprobs,
        )
        special = request.add_special_tokens is not False
        prompts = [
            await self.text.encode(prompt, special) if isinstance(prompt, str) else np.asarray(prompt, np.int32)
            for prompt in request.prompt
        ]
        return self._job(request, prompts, params, clip=limit is None, format=CompletionFormat, id="cmpl-")

    def _check(self, request: protocol.Request, prompts: int = 1) -> None:
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        n, most = request.n or 1, self._config.max_choices
        if prompts * n > most:
            raise bad_request(
                f"{prompts} prompts times n = {n} is more than {most}, the most choices of a request", "n"
            )
        if request.use_beam_search:
            _check_beams(request)
        elif n > 1 and request.temperature == 0:
            raise bad_request("n must be 1 at temperature 0: all choices would be the same", "n")
        if request.priority and not self._by_priority:  # silence would promise what is not kept
            raise bad_request(
                "priority has no effect here: this model's requests are taken first come, first served "
                "(engine.scheduling_policy: priority changes that)",
                "priority",
            )

    def _job(
        self,
        request: protocol.Request,
        prompts: list[npt.NDArray[np.int32]],
        params: SamplingParams,
        *,
        clip: bool,
        format: NewFormat,
        id: str,
    ) -> Job:
        pieces = self.text if params.logprobs is not None else None
        return Job(
            model=self,
            prompts=prompts,
            n=request.n or 1,
            params=params,
            clip=clip,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            stream=bool(request.stream),
            length_penalty=_length_penalty(request),
            format=format(id + uuid.uuid4().hex, int(time.time()), request.model, request.include_usage, pieces),
        )


def _length_penalty(request: protocol.Request) -> float | None:
    if not request.use_beam_search:
        return None
    return 1.0 if request.length_penalty is None else request.length_penalty


def _check_beams(request: protocol.Request) -> None:
    """Raises ``ApiError`` for what beam search, which knows log-probabilities alone, would ignore."""
    if (n := request.n or 1) > MAX_BEAMS:
        raise bad_request(f"n = {n} is more than {MAX_BEAMS}, the most beams of a search", "n")
    for name in NOT_WITH_BEAMS:
        if getattr(request, name, None) not in (None, False, [], {}, 0):
            raise bad_request(f"{name} cannot be combined with use_beam_search", name)
