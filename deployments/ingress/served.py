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
from deployments.ingress.beam import MAX_BEAMS, Rules
from deployments.ingress.dialect import TAIL, Dialect
from deployments.ingress.errors import bad_request
from deployments.ingress.reading import Reading
from deployments.ingress.streaming import CompletionFormat, Extras, Format, Prompt
from deployments.ingress.tools.use import ToolUse, constraint
from deployments.messages import Chunk
from nanoengine.sampling.params import SamplingParams

MAX_SESSION = 256  # characters: it travels with every call, and is only a hint
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

NOT_WITH_BEAMS = (
    *("stream", "logprobs", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "response_format", "tools", "structured_outputs", "allowed_token_ids"),
    *("bad_words", "best_of", "echo", "prompt_logprobs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""What draws tokens (temperature, top_p, seed and the like) has no effect either, but clients always send that."""


class Engines(Protocol):
    """What the API needs of the engines; ``EngineClient`` in production."""

    @property
    def max_model_len(self) -> int | None: ...

    def available(self) -> bool: ...

    def retry_after_s(self) -> float: ...

    async def memory(self) -> dict[str, Any]: ...

    def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool,
        priority: int,
        cache_salt: str,
        session: str,
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

    def spent(self, spans: Mapping[str, float]) -> None: ...

    def finished(self, reason: str, seconds: float) -> None: ...

    def rejected(self, reason: str) -> None: ...


NewFormat = Callable[[str, int, str, Extras], Format]
"""Makes a format of: id, time of creation, model, and what the answer has beside text."""


@dataclass(slots=True)
class Job:
    """A checked request: what to generate, and in which shape to answer."""

    model: ServedModel
    prompts: list[npt.NDArray[np.int32]]
    n: int  # choices of each prompt
    best_of: int  # sequences of each prompt, of which the n likeliest become choices
    params: SamplingParams
    clip: bool
    priority: int
    cache_salt: str
    session: str  # what the caller says belongs together
    stream: bool
    format: Format
    beams: Rules | None = None  # of a search with ``n`` beams; None: the choices are sampled
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
            prompt_logprobs=request.prompt_logprobs,
        )
        dialect, tools = self.text.dialect, self._tools(request)
        prompt = self._truncated(await self._prompt(request, tools), request, params)
        opened = dialect.opened([self.text.token_bytes(int(i)) for i in prompt[-TAIL:]])
        reading = Reading(tools, opened, include_reasoning=request.include_reasoning is not False)
        if not reading.plain:
            structured = constraint(params.structured, tools, dialect, opened)
            params = replace(params, structured=structured, visible_special_tokens=dialect.visible)
        extras = self._extras(request, [Prompt(prompt)], params)
        return self._job(request, extras, params, clip=limit is None, format=format(reading), id=id)

    async def prompt(self, request: protocol.ChatRequest) -> npt.NDArray[np.int32]:
        """The token ids of a conversation. Raises ``InvalidRequestError``."""
        return await self._prompt(request, self._tools(request))

    def _tools(self, request: protocol.ChatRequest) -> ToolUse | None:
        return ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls, self.text.dialect)

    async def _prompt(self, request: protocol.ChatRequest, tools: ToolUse | None) -> npt.NDArray[np.int32]:
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            options["add_generation_prompt"] = request.add_generation_prompt
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise bad_request(
                    "continue_final_message continues the last message, and add_generation_prompt begins another one: "
                    "set one of them",
                    "continue_final_message",
                )
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        if tools is not None:
            options["tools"] = tools.for_template
        return await self.text.chat([message.for_template() for message in request.messages], options)

    async def completion(self, request: protocol.CompletionRequest) -> Job:
        """The job of a completion request. Raises ``ApiError`` or ``InvalidRequestError``."""
        self._check(request, prompts=len(request.prompt))
        limit, logprobs = request.max_tokens, request.logprobs
        echoed = [k for k in (logprobs, 0 if limit == 0 else None) if k is not None] if request.echo else []
        scored = [k for k in (request.prompt_logprobs, *echoed) if k is not None]
        params = request.sampling(
            self.text.sampling_defaults,
            max_tokens=limit if limit is not None else COMPLETION_MAX_TOKENS,
            logprobs=0 if logprobs is None and request.sequences > (request.n or 1) else logprobs,
            prompt_logprobs=max(scored, default=None),
        )
        special = request.add_special_tokens is not False
        prompts = []
        for prompt in request.prompt:
            text = prompt if isinstance(prompt, str) else None
            ids = np.asarray(prompt, np.int32) if text is None else await self.text.encode(text, special)
            kept = self._truncated(ids, request, params)
            prompts.append(Prompt(kept, text if len(kept) == len(ids) else None))
        extras = replace(self._extras(request, prompts, params), logprobs=logprobs, echo=bool(request.echo))
        return self._job(request, extras, params, clip=limit is None, format=CompletionFormat, id="cmpl-")

    def _truncated(
        self, ids: npt.NDArray[np.int32], request: protocol.Request, params: SamplingParams
    ) -> npt.NDArray[np.int32]:
        """The end of a prompt, where the request wants no more; -1 is what the context leaves beside the answer."""
        most = request.truncate_prompt_tokens
        if most is None:
            return ids
        if most == 0:
            raise bad_request("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
        if most == -1:
            context = self.engines.max_model_len
            most = len(ids) if context is None else max(1, context - (params.max_tokens or 1))
        return ids[-most:]

    def _check(self, request: protocol.Request, prompts: int = 1) -> None:
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not streamed: leave stream out", "prompt_logprobs")
        self._check_choices(request, prompts)
        if request.priority and not self._by_priority:  # silence would promise what is not kept
            raise bad_request(
                "priority has no effect here: this model's requests are taken first come, first served "
                "(engine.scheduling_policy: priority changes that)",
                "priority",
            )

    def _check_choices(self, request: protocol.Request, prompts: int) -> None:
        n, sequences, most = request.n or 1, request.sequences, self._config.max_choices
        name = "n" if sequences == n else "best_of"
        if sequences < n:
            raise bad_request(f"best_of must be at least n ({n}): the choices are taken from so many", "best_of")
        if sequences > n and request.stream:
            raise bad_request("best_of cannot be streamed: which is best is known when all are complete", "best_of")
        if prompts * sequences > most:
            raise bad_request(
                f"{prompts} prompts times {name} = {sequences} is more than {most}, the most choices of a request", name
            )
        if request.use_beam_search:
            _check_beams(request)
        elif sequences > 1 and request.temperature == 0:
            raise bad_request(f"{name} must be 1 at temperature 0: all choices would be the same", name)
        if sequences > 1 and request.max_tokens == 0:
            raise bad_request(f"{name} must be 1 with max_tokens 0: all choices would be the same", name)

    def _extras(self, request: protocol.Request, prompts: Sequence[Prompt], params: SamplingParams) -> Extras:
        options = request.stream_options or protocol.StreamOptions()
        return Extras(
            self.text,
            prompts,
            n=request.n or 1,
            usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            logprobs=params.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        )

    def _job(
        self,
        request: protocol.Request,
        extras: Extras,
        params: SamplingParams,
        *,
        clip: bool,
        format: NewFormat,
        id: str,
    ) -> Job:
        return Job(
            model=self,
            prompts=[prompt.ids for prompt in extras.prompts],
            n=request.n or 1,
            best_of=request.sequences,
            params=params,
            clip=clip,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            session=request.session[:MAX_SESSION],
            stream=bool(request.stream),
            beams=_rules(request),
            format=format(id + uuid.uuid4().hex, int(time.time()), request.model, extras),
        )


def _rules(request: protocol.Request) -> Rules | None:
    if not request.use_beam_search:
        return None
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return Rules(penalty, request.early_stopping or False)


def _check_beams(request: protocol.Request) -> None:
    """Raises ``ApiError`` for what beam search, which knows log-probabilities alone, would ignore."""
    if (n := request.n or 1) > MAX_BEAMS:
        raise bad_request(f"n = {n} is more than {MAX_BEAMS}, the most beams of a search", "n")
    for name in NOT_WITH_BEAMS:
        if getattr(request, name, None) not in (None, False, [], {}, 0):
            raise bad_request(f"{name} cannot be combined with use_beam_search", name)
