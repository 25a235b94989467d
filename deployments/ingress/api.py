"""The HTTP API: what an OpenAI client calls.

Every answer has an ``x-request-id``, the client's own or a new one: Serve's HTTP server sees to that, and puts it into
the log lines of the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from ray.exceptions import RayError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.config import AppArgs
from deployments.ingress import messages, protocol, responses
from deployments.ingress.chat import ChatPartsFormat
from deployments.ingress.dialect import TAIL, Dialect
from deployments.ingress.errors import (
    ApiError,
    bad_request,
    from_invalid_request,
    install,
    internal,
    unavailable,
)
from deployments.ingress.limits import Admission
from deployments.ingress.messages import MessagesFormat, MessagesRequest
from deployments.ingress.protocol import renamed, renaming
from deployments.ingress.reading import Reading
from deployments.ingress.responses import ResponsesFormat, ResponsesRequest
from deployments.ingress.streaming import (
    ChatFormat,
    Choice,
    CompletionFormat,
    Extras,
    Format,
    Prompt,
    usage_of,
)
from deployments.ingress.tokens import DetokenizeRequest, TokenizeRequest, spelled
from deployments.ingress.tools.use import ToolUse, constraint
from deployments.messages import Chunk
from nanoengine import __version__
from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
BODY_TIMEOUT_S = 30.0  # for the whole body: a client that never ends it would keep its place in flight for ever


NO_GENERATION = (
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
    *("/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
)
"""Routes of OpenAI's API, and vLLM's, for other kinds of models."""


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
        token_ids: bool,
    ) -> AsyncGenerator[Chunk]: ...


class Text(Protocol):
    """What the API needs of a tokenizer; ``TextFrontend`` in production."""

    async def chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> npt.NDArray[np.int32]: ...

    async def encode(self, text: str, add_special_tokens: bool) -> npt.NDArray[np.int32]: ...

    async def decode(self, ids: Sequence[int]) -> str: ...

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


NewFormat = Callable[[str, int, str, Extras], Format]
"""Makes a format of: id, time of creation, model, and what the answer has beside text."""


@dataclass(slots=True)
class Job:
    """A checked request: what to generate, and in which shape to answer."""

    prompts: list[npt.NDArray[np.int32]]
    n: int  # choices of each prompt
    best_of: int  # sequences of each prompt, of which the n likeliest become choices
    params: SamplingParams
    clip: bool
    priority: int
    cache_salt: str
    stream: bool
    token_ids: bool
    format: Format
    names: Mapping[str, str] = field(default_factory=dict)  # of fields, where a client knows them by other names


class Api:
    """The routes. One instance per ingress replica."""

    def __init__(self, args: AppArgs, engines: Engines, text: Text, metrics: Metrics) -> None:
        self._args = args
        self._engines = engines
        self._text = text
        self._metrics = metrics
        self._admission = Admission(args.ingress.max_inflight_requests, args.ingress.retry_after_s)
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application."""
        # Redirects off: one that says http:// behind a gateway that ends TLS sends the next request past it.
        app = FastAPI(title="nanoserve", version=__version__, redirect_slashes=False)
        install(app)

        def post(path: str, model: type[BaseModel], endpoint: Callable[..., Awaitable[Response]]) -> None:
            schema = {"content": {"application/json": {"schema": model.model_json_schema()}}, "required": True}
            app.add_api_route(
                path, endpoint, methods=["POST"], response_model=None, openapi_extra={"requestBody": schema}
            )

        def generation(path: str, model: type[BaseModel], prepare: Callable[[bytes], Awaitable[Job]]) -> None:
            async def endpoint() -> Response:
                return _Answer(self, prepare)

            post(path, model, endpoint)

        def computation(path: str, model: type[BaseModel], compute: Callable[[bytes], Awaitable[Any]]) -> None:
            async def endpoint(request: Request) -> Response:
                return await self._reply(compute, request)

            post(path, model, endpoint)

        generation("/v1/chat/completions", protocol.ChatRequest, self._chat)
        generation("/v1/completions", protocol.CompletionRequest, self._completion)
        generation("/v1/responses", ResponsesRequest, self._responses)
        generation("/v1/messages", MessagesRequest, self._messages)
        computation("/v1/messages/count_tokens", messages.Prompt, self._count_tokens)
        computation("/tokenize", TokenizeRequest, self._tokenize)
        computation("/detokenize", DetokenizeRequest, self._detokenize)
        for path in NO_GENERATION:
            app.add_api_route(path, _no_generation, methods=["POST"], response_model=None, include_in_schema=False)
        app.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_model=None)
        app.add_api_route("/health", self.health, methods=["GET"], response_model=None)
        app.add_api_route("/debug/memory", self.memory, methods=["GET"], response_model=None)
        app.add_api_route("/version", self.version, methods=["GET"], response_model=None)
        return app

    # Routes without a body.

    async def models(self) -> Response:
        """Every name that requests may give as ``model``."""
        return _json({"object": "list", "data": [self._model(name) for name in self._args.model_names]})

    async def model(self, name: str) -> Response:
        """One of them. Raises ``ApiError`` (404)."""
        self._check_model(name)
        return _json(self._model(name))

    async def health(self) -> Response:
        """200 while a request could be served, 503 while no engine is known to be up. No engine is asked."""
        if not self._engines.available():
            raise unavailable("no engine replica is up", self._args.ingress.retry_after_s)
        return _json({"status": "ok"})

    async def memory(self) -> Response:
        """Where the memory of one engine replica went, in bytes: another one's perhaps, if asked again."""
        return _json(await self._engines.memory())

    async def version(self) -> Response:
        return _json({"version": __version__})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nanoserve",
            "root": self._args.engine.model,
            "max_model_len": self._engines.max_model_len,
        }

    def _check_model(self, name: str) -> None:
        if name not in self._args.model_names:
            known = ", ".join(self._args.model_names)
            raise ApiError(
                404, f"no model {name!r} is served here; there is: {known}", param="model", code="model_not_found"
            )

    # From a body to a job.

    async def _chat(self, body: bytes) -> Job:
        def format(reading: Reading) -> NewFormat:
            return ChatFormat if reading.plain else partial(ChatPartsFormat, reading=reading)

        return await self._conversation(protocol.parse(protocol.ChatRequest, body), format, "chatcmpl-")

    async def _responses(self, body: bytes) -> Job:
        request = protocol.parse(ResponsesRequest, body)

        def format(reading: Reading) -> NewFormat:
            return partial(ResponsesFormat, reading=reading, request=request)

        chat = request.to_chat(self._text.dialect.switches_thinking)
        return await self._translated(chat, format, "resp_", responses.NAMES)

    async def _messages(self, body: bytes) -> Job:
        def format(reading: Reading) -> NewFormat:
            return partial(MessagesFormat, reading=reading)

        chat = protocol.parse(MessagesRequest, body).to_chat(self._text.dialect)
        return await self._translated(chat, format, "msg_", messages.NAMES)

    async def _translated(
        self,
        request: protocol.ChatRequest,
        format: Callable[[Reading], NewFormat],
        id: str,
        names: Mapping[str, str],
    ) -> Job:
        """The job of a body of another API, whose errors come back in that API's words."""
        with renaming(names):
            job = await self._conversation(request, format, id)
        job.names = names
        return job

    async def _conversation(
        self, request: protocol.ChatRequest, format: Callable[[Reading], NewFormat], id: str
    ) -> Job:
        self._check(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        params = request.sampling(
            max_tokens=limit if limit is not None else self._args.ingress.default_max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        dialect, tools = self._text.dialect, self._tools(request)
        prompt = self._truncated(await self._prompt(request, tools), request, params)
        opened = dialect.opened([self._text.token_bytes(int(i)) for i in prompt[-TAIL:]])
        reading = Reading(tools, opened, include_reasoning=request.include_reasoning is not False)
        if not reading.plain:
            structured = constraint(params.structured, tools, dialect, opened)
            params = replace(params, structured=structured, visible_special_tokens=dialect.visible)
        extras = self._extras(request, [Prompt(prompt)], params)
        return self._job(request, extras, params, clip=limit is None, format=format(reading), id=id)

    def _tools(self, request: protocol.ChatRequest) -> ToolUse | None:
        return ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls, self._text.dialect)

    async def _prompt(self, request: protocol.ChatRequest, tools: ToolUse | None) -> npt.NDArray[np.int32]:
        """The prompt of a conversation. Raises ``InvalidRequestError``."""
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
        return await self._text.chat([message.for_template() for message in request.messages], options)

    async def _completion(self, body: bytes) -> Job:
        request = protocol.parse(protocol.CompletionRequest, body)
        self._check(request, prompts=len(request.prompt))
        limit, logprobs = request.max_tokens, request.logprobs
        echoed = [k for k in (logprobs, 0 if limit == 0 else None) if k is not None] if request.echo else []
        scored = [k for k in (request.prompt_logprobs, *echoed) if k is not None]
        params = request.sampling(
            max_tokens=limit if limit is not None else COMPLETION_MAX_TOKENS,
            logprobs=0 if logprobs is None and request.sequences > (request.n or 1) else logprobs,
            prompt_logprobs=max(scored, default=None),
        )
        special = request.add_special_tokens is not False
        prompts = []
        for prompt in request.prompt:
            text = prompt if isinstance(prompt, str) else None
            ids = np.asarray(prompt, np.int32) if text is None else await self._text.encode(text, special)
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
            context = self._engines.max_model_len
            most = len(ids) if context is None else max(1, context - (params.max_tokens or 1))
        return ids[-most:]

    def _check(self, request: protocol.Request, prompts: int = 1) -> None:
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not streamed: leave stream out", "prompt_logprobs")
        self._check_choices(request, prompts)
        if request.priority:  # no scheduling policy reads it yet; silence would promise what is not kept
            raise bad_request("priority is not served: requests are taken first come, first served", "priority")

    def _check_choices(self, request: protocol.Request, prompts: int) -> None:
        n, sequences, most = request.n or 1, request.sequences, self._args.ingress.max_choices
        name = "n" if sequences == n else "best_of"
        if sequences < n:
            raise bad_request(f"best_of must be at least n ({n}): the choices are taken from so many", "best_of")
        if sequences > n and request.stream:
            raise bad_request("best_of cannot be streamed: which is best is known when all are complete", "best_of")
        if prompts * sequences > most:
            raise bad_request(
                f"{prompts} prompts times {name} = {sequences} is more than {most}, the most choices of a request", name
            )
        if sequences > 1 and request.temperature == 0:
            raise bad_request(f"{name} must be 1 at temperature 0: all choices would be the same", name)
        if sequences > 1 and request.max_tokens == 0:
            raise bad_request(f"{name} must be 1 with max_tokens 0: all choices would be the same", name)

    def _extras(self, request: protocol.Request, prompts: Sequence[Prompt], params: SamplingParams) -> Extras:
        options = request.stream_options or protocol.StreamOptions()
        return Extras(
            self._text,
            prompts,
            n=request.n or 1,
            usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            logprobs=params.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
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
            prompts=[prompt.ids for prompt in extras.prompts],
            n=request.n or 1,
            best_of=request.sequences,
            params=params,
            clip=clip,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            stream=bool(request.stream),
            token_ids=extras.token_ids,
            format=format(id + uuid.uuid4().hex, int(time.time()), request.model, extras),
        )

    # Bodies that ask for no generation.

    async def _count_tokens(self, body: bytes) -> dict[str, Any]:
        chat = protocol.parse(messages.Prompt, body).to_chat(self._text.dialect)
        self._check_model(chat.model)
        with renaming(messages.NAMES):
            return {"input_tokens": len(await self._prompt(chat, self._tools(chat)))}

    async def _tokenize(self, body: bytes) -> dict[str, Any]:
        request = protocol.parse(TokenizeRequest, body)
        self._check_model(model := request.model if request.model is not None else self._args.model_names[0])
        conversation = request.conversation(model)
        if conversation is None:
            ids = await self._text.encode(request.prompt or "", request.add_special_tokens is not False)
        else:
            ids = await self._prompt(conversation, self._tools(conversation))
        tokens = ids.tolist()
        strings = spelled([self._text.token_bytes(i) for i in tokens]) if request.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._engines.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    async def _detokenize(self, body: bytes) -> dict[str, Any]:
        request = protocol.parse(DetokenizeRequest, body)
        self._check_model(request.model if request.model is not None else self._args.model_names[0])
        size = self._text.vocab_size
        if unknown := next((i for i in request.tokens if not 0 <= i < size), None):
            raise bad_request(f"tokens must be from 0 to {size - 1}, and {unknown} is among them", "tokens")
        return {"prompt": await self._text.decode(request.tokens)}

    async def _reply(self, compute: Callable[[bytes], Awaitable[Any]], request: Request) -> Response:
        """Serve one request that needs no engine."""
        try:
            with self._admission.slot():
                return _json(await compute(await _read(request, self._args.ingress.max_body_bytes)))
        except ClientDisconnect:
            return Response(status_code=499)  # and nobody to read it
        except Exception as error:
            failure = self._failure(error)
            if failure.status < 500:
                self._metrics.rejected(failure.code or "invalid")
            return failure.response(request.url.path)

    # From a job to an answer.

    async def answer(self, prepare: Callable[[bytes], Awaitable[Job]], request: Request, send: Send) -> None:
        """Serve one request from its first byte to its last, and count it once."""
        start = time.monotonic()
        begun = False  # whether the status has been sent
        reason = "error"
        names: Mapping[str, str] = {}

        async def respond(response: Response) -> None:
            nonlocal begun
            begun = True
            await response(request.scope, request.receive, send)

        try:
            with self._admission.slot():
                body = await _read(request, self._args.ingress.max_body_bytes)
                job = await prepare(body)
                choices = [Choice() for _ in range(len(job.prompts) * job.best_of)]
                watch = _Stopwatch(self._metrics, start, len(choices))
                names = job.names
                async with aclosing(self._chunks(job)) as chunks:
                    async for index, chunk in chunks:
                        watch.observe(index, chunk.completion_tokens)
                        choices[index].add(chunk)
                        if not job.stream:
                            continue
                        if not begun:  # only now: until the first token a failure has a status of its own
                            begun = True
                            await send(_stream_start())
                        if events := job.format.event(index, chunk):
                            await send(_body(events))
                reason = "length" if all(choice.finish_reason == "length" for choice in choices) else "stop"
                usage = usage_of(choices, job.best_of)
                if not job.stream:
                    # Aside: a long prompt's log-probabilities would hold up everybody's streams.
                    whole = partial(job.format.whole, _chosen(job, choices), usage)
                    answer = whole() if job.params.prompt_logprobs is None else await asyncio.to_thread(whole)
                    await respond(Response(answer, media_type="application/json"))
                    return
                await send(_body(job.format.end(usage), more=False))
        except ClientDisconnect:
            reason = "abort"  # and nobody to answer
        except asyncio.CancelledError:
            reason = "abort"
            raise
        except Exception as error:
            failure = renamed(self._failure(error), names)
            if failure.status < 500:
                reason = ""
                self._metrics.rejected(failure.code or "invalid")
            if begun:
                await send(_body(job.format.error(failure), more=False))
            else:
                await respond(failure.response(request.url.path))
        finally:
            if reason:
                self._metrics.finished(reason, time.monotonic() - start)

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InvalidRequestError):
            return from_invalid_request(error)
        logger.error("internal error", exc_info=error)
        return internal()

    async def _chunks(self, job: Job) -> AsyncGenerator[tuple[int, Chunk]]:
        """The chunks of all choices, as they come, each with its choice's index. Closing it aborts all of them."""
        streams = [
            self._engines.generate(
                prompt,
                _params(job, i),
                clip=job.clip,
                priority=job.priority,
                cache_salt=job.cache_salt,
                token_ids=job.token_ids,
            )
            for prompt in job.prompts
            for i in range(job.best_of)
        ]
        if len(streams) == 1:
            async with aclosing(streams[0]) as stream:
                async for chunk in stream:
                    yield 0, chunk
            return
        arrived: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()  # None: one stream has ended
        pumps = [asyncio.create_task(_pump(index, stream, arrived)) for index, stream in enumerate(streams)]
        try:
            ended = 0
            while ended < len(pumps):
                if (item := await arrived.get()) is not None:
                    yield item
                    continue
                ended += 1
                for pump in pumps:
                    if pump.done():
                        pump.result()  # raises what its stream raised: one failed choice fails the request
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: AsyncGenerator[Chunk], arrived: asyncio.Queue[tuple[int, Chunk] | None]) -> None:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                arrived.put_nowait((index, chunk))
    finally:
        # Called back when this task is done, so that who reads it finds the task's exception.
        asyncio.get_running_loop().call_soon(arrived.put_nowait, None)


class _Answer(Response):
    """A response that does all of the request's work while it is sent: whatever happens, one ``finally`` sees it."""

    def __init__(self, api: Api, prepare: Callable[[bytes], Awaitable[Job]]) -> None:
        super().__init__()
        self._api = api
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.answer(self._prepare, Request(scope, receive), send)


class _Stopwatch:
    """Observes first-token and inter-token times of one request."""

    def __init__(self, metrics: Metrics, start: float, choices: int) -> None:
        self._metrics = metrics
        self._last = [start] * choices
        self._tokens = [0] * choices
        self._start: float | None = start

    def observe(self, index: int, tokens: int) -> None:
        """Choice ``index`` has so many tokens now."""
        now = time.monotonic()
        if self._start is not None:
            self._metrics.first_token(now - self._start)
            self._start = None
        if self._tokens[index]:
            self._metrics.next_tokens(now - self._last[index], tokens - self._tokens[index])
        self._last[index] = now
        self._tokens[index] = tokens


def _params(job: Job, sequence: int) -> SamplingParams:
    """Each sequence of a prompt has a seed of its own, or a seeded request would return equal texts.

    One scores the prompt for all of them, but in a stream, where none waits for another.
    """
    params = job.params
    if sequence == 0:
        return params
    seed = params.seed if params.seed is None else (params.seed + sequence) % 2**63
    return replace(params, seed=seed, prompt_logprobs=params.prompt_logprobs if job.stream else None)


def _chosen(job: Job, sequences: list[Choice]) -> list[Choice]:
    """The choices of a whole answer: of each prompt's sequences the n likeliest, best first, where there are more."""
    choices: list[Choice] = []
    for begin in range(0, len(sequences), job.best_of):
        some = sequences[begin : begin + job.best_of]
        for choice in some[1:]:
            choice.prompt_scores = some[0].prompt_scores
        if job.best_of > job.n:
            some = sorted(some, key=lambda choice: choice.mean_logprob, reverse=True)
        choices += some[: job.n]
    return choices


async def _read(request: Request, limit: int) -> bytes:
    """The body. Raises ``ApiError``: 413 as soon as it is known to be too long, 408 if it doesn't arrive in time; and
    ``ClientDisconnect``."""
    too_long = ApiError(413, f"the body is longer than {limit} bytes", code="request_too_large")
    if (declared := request.headers.get("content-length", "")).isdecimal() and int(declared) > limit:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_long
                parts.append(part)
    except (
        RayError
    ) as error:  # Serve asks its proxy for the body by a task, which ends like this when the client leaves
        raise ClientDisconnect from error
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again", code="request_timeout"
        ) from None
    return b"".join(parts)


async def _no_generation(request: Request) -> Response:
    raise ApiError(
        400,
        f"{request.url.path} is for another kind of model: those served here generate text, with /v1/chat/completions "
        "and /v1/completions",
        param="model",
        code="unsupported_model",
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _stream_start() -> dict[str, Any]:
    # Made anew for each: servers append their own headers to the list that they are given.
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
