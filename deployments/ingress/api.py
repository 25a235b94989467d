"""The HTTP API: what an OpenAI client calls.

Every answer has an ``x-request-id``, the client's own or a new one: Serve's HTTP server sees to that, and puts it into
the log lines of the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from ray.exceptions import RayError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.config import IngressConfig
from deployments.ingress import beam, document, messages, protocol, responses
from deployments.ingress.chat import ChatPartsFormat
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
from deployments.ingress.served import MAX_SESSION, Job, NewFormat, ServedModel
from deployments.ingress.streaming import (
    ChatFormat,
    Choice,
    usage_of,
)
from deployments.ingress.timings import HEADER, Stopwatch
from deployments.ingress.tokens import DetokenizeRequest, TokenizeRequest, spelled
from deployments.messages import Chunk
from nanoengine import __version__
from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")

BODY_TIMEOUT_S = 30.0  # for the whole body: a client that never ends it would keep its place in flight for ever

SESSION_HEADER = "x-session-id"  # Serve's name for it, which its own routers go by too

NO_GENERATION = (
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
    *("/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
)
"""Routes of OpenAI's API, and vLLM's, for other kinds of models."""


class _Naming(msgspec.Struct):
    """Any body that may name a model."""

    model: str | None = None


class Api:
    """The routes. One instance per ingress replica."""

    def __init__(self, config: IngressConfig, models: Sequence[ServedModel]) -> None:
        """The first of ``models`` is that of requests that may leave it out, and counts those that name none."""
        self._config = config
        self._models = {name: model for model in models for name in model.names}
        self._first = models[0]
        self._admission = Admission(config.max_inflight_requests, self._retry_after_s)
        self._created = int(time.time())

    def _retry_after_s(self) -> float:
        return max(model.engines.retry_after_s() for model in self._models.values())

    def app(self) -> FastAPI:
        """The ASGI application."""
        # Redirects off: one that says http:// behind a gateway that ends TLS sends the next request past it.
        app = FastAPI(title="nanoserve", version=__version__, redirect_slashes=False)
        install(app)

        bodies = (
            *(protocol.ChatRequest, protocol.CompletionRequest, ResponsesRequest, MessagesRequest, messages.Prompt),
            *(TokenizeRequest, DetokenizeRequest),
        )
        components, openapi = document.schemas(bodies), app.openapi

        def documented() -> dict[str, Any]:
            openapi().setdefault("components", {}).setdefault("schemas", {}).update(components)
            return openapi()

        app.openapi = documented  # type: ignore[method-assign]

        def get(path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
            answers = document.answers(path, document.ANSWERS[path])
            app.add_api_route(path, endpoint, methods=["GET"], response_model=None, responses=answers)

        def post(
            path: str, model: type[BaseModel], endpoint: Callable[..., Awaitable[Response]], streams: bool = False
        ) -> None:
            app.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                name=path.rsplit("/", 1)[-1],
                response_model=None,
                responses=document.answers(path, document.ANSWERS[path], streams),
                openapi_extra={"requestBody": document.body(model, [*self._models], components)},
            )

        def generation(path: str, model: type[BaseModel], prepare: Callable[[bytes], Awaitable[Job]]) -> None:
            async def endpoint() -> Response:
                return _Answer(self, prepare)

            post(path, model, endpoint, streams=True)

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
            app.add_api_route(path, self._other_kind, methods=["POST"], response_model=None, include_in_schema=False)
        get("/v1/models", self.models)
        get("/v1/models/{name:path}", self.model)
        get("/health", self.health)
        get("/debug/memory", self.memory)
        get("/version", self.version)
        return app

    def drain(self) -> int:
        """Take nothing new; returns how many requests are in flight."""
        self._admission.close()
        return self._admission.in_flight

    # Routes without a body.

    async def models(self) -> Response:
        """The names that requests may give as ``model`` now. Raises ``ApiError`` (503) where there is none."""
        ready = self._ready(*self._models.values())
        cards = [model.card(name, self._created) for name, model in self._models.items() if model in ready]
        return _json({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """One of them. Raises ``ApiError``: 404 where there is none such, 503 while it could not be served."""
        (model,) = self._ready(self._named(name))
        return _json(model.card(name, self._created))

    async def health(self) -> Response:
        """200 while a request could be served, else 503."""
        self._ready(*self._models.values())
        return _json({"status": "ok"})

    def _ready(self, *models: ServedModel) -> list[ServedModel]:
        """Those that have an engine that is known to be up; none is asked. Where they may be scaled to zero a request
        can always be served, if late. Raises ``ApiError`` (503) where there is none, or the service is being stopped.
        """
        self._admission.check_open()
        ready = [model for model in models if self._config.start_wait_s is not None or model.engines.available()]
        if not ready:
            raise unavailable("no engine replica is up", self._config.retry_after_s)
        return ready

    async def memory(self, model: str | None = None) -> Response:
        """Where the memory of one of a model's engine replicas went, in bytes: asked again, perhaps another's."""
        return _json(await self._named(model).engines.memory())

    async def version(self) -> Response:
        return _json({"version": __version__})

    def _named(self, name: str | None) -> ServedModel:
        """The model of a request. Raises ``ApiError`` (404)."""
        if name is None:
            return self._first
        if (model := self._models.get(name)) is None:
            known = ", ".join(self._models)
            raise ApiError(
                404, f"no model {name!r} is served here; there is: {known}", param="model", code="model_not_found"
            )
        return model

    # From a body to a job.

    async def _chat(self, body: bytes) -> Job:
        def format(reading: Reading) -> NewFormat:
            return ChatFormat if reading.plain else partial(ChatPartsFormat, reading=reading)

        request = protocol.parse(protocol.ChatRequest, body)
        return await self._named(request.model).conversation(request, format, "chatcmpl-")

    async def _completion(self, body: bytes) -> Job:
        request = protocol.parse(protocol.CompletionRequest, body)
        return await self._named(request.model).completion(request)

    async def _responses(self, body: bytes) -> Job:
        request = protocol.parse(ResponsesRequest, body)

        def format(reading: Reading) -> NewFormat:
            return partial(ResponsesFormat, reading=reading, request=request)

        model = self._named(request.model)
        chat = request.to_chat(model.text.dialect.switches_thinking)
        return await _translated(model, chat, format, "resp_", responses.NAMES)

    async def _messages(self, body: bytes) -> Job:
        def format(reading: Reading) -> NewFormat:
            return partial(MessagesFormat, reading=reading)

        request = protocol.parse(MessagesRequest, body)
        model = self._named(request.model)
        return await _translated(model, request.to_chat(model.text.dialect), format, "msg_", messages.NAMES)

    # Bodies that ask for no generation.

    async def _count_tokens(self, body: bytes) -> dict[str, Any]:
        request = protocol.parse(messages.Prompt, body)
        model = self._named(request.model)
        chat = request.to_chat(model.text.dialect)
        with renaming(messages.NAMES):
            return {"input_tokens": len(await model.prompt(chat))}

    async def _tokenize(self, body: bytes) -> dict[str, Any]:
        request = protocol.parse(TokenizeRequest, body)
        model = self._named(request.model)
        conversation = request.conversation(model.names[0])
        if conversation is None:
            ids = await model.text.encode(request.prompt or "", request.add_special_tokens is not False)
        else:
            ids = await model.prompt(conversation)
        tokens = ids.tolist()
        strings = None
        if request.return_token_strs:  # a second or two for a million tokens
            strings = await asyncio.to_thread(lambda: spelled([model.text.token_bytes(i) for i in tokens]))
        return {
            "count": len(tokens),
            "max_model_len": model.engines.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    async def _detokenize(self, body: bytes) -> dict[str, Any]:
        request = protocol.parse(DetokenizeRequest, body)
        text = self._named(request.model).text
        size = text.vocab_size
        if unknown := next((i for i in request.tokens if not 0 <= i < size), None):
            raise bad_request(f"tokens must be from 0 to {size - 1}, and {unknown} is among them", "tokens")
        return {"prompt": await text.decode(request.tokens)}

    async def _other_kind(self, request: Request) -> Response:
        async def refuse(body: bytes) -> None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # audio routes take forms
                self._named(msgspec.json.decode(body, type=_Naming).model)
            raise bad_request(
                f"{request.url.path} is for another kind of model: those served here generate text, with "
                "/v1/chat/completions and /v1/completions",
                "model",
                "unsupported_model",
            )

        return await self._reply(refuse, request)

    async def _reply(self, compute: Callable[[bytes], Awaitable[Any]], request: Request) -> Response:
        """Serve one request that needs no engine."""
        try:
            with self._admission.slot():
                return _json(await compute(await _read(request, self._config.max_body_bytes)))
        except ClientDisconnect:
            return Response(status_code=499)  # and nobody to read it
        except Exception as error:
            failure = self._failure(error)
            if failure.status < 500:
                self._first.metrics.rejected(failure.code or "invalid")
            return failure.response(request.url.path)

    # From a job to an answer.

    async def answer(self, prepare: Callable[[bytes], Awaitable[Job]], request: Request, send: Send) -> None:
        """Serve one request from its first byte to its last, and count it once."""
        start = time.monotonic()
        begun = False  # whether the status has been sent
        reason = "error"
        names: Mapping[str, str] = {}
        metrics = self._first.metrics

        async def respond(response: Response) -> None:
            nonlocal begun
            begun = True
            await response(request.scope, request.receive, send)

        try:
            with self._admission.slot():
                body = await _read(request, self._config.max_body_bytes)
                job = await prepare(body)
                job.session = request.headers.get(SESSION_HEADER, "")[:MAX_SESSION] or job.session
                names, metrics = job.names, job.model.metrics
                choices = [Choice() for _ in range(len(job.prompts) * job.best_of)]
                watch = Stopwatch(metrics, start, len(choices))
                timed = HEADER in (name for name, _ in request.scope["headers"])
                async with aclosing(self._chunks(job)) as chunks:
                    async for index, chunk in chunks:
                        watch.observe(index, chunk)
                        choices[index].add(chunk)
                        if not job.stream:
                            continue
                        if not begun:  # only now: until the first token a failure has a status of its own
                            begun = True
                            await send(_stream_start(watch.server_timing() if timed else None))
                        if events := job.format.event(index, chunk):
                            await send(_body(events))
                watch.stop()
                reason = "length" if all(choice.finish_reason == "length" for choice in choices) else "stop"
                usage = usage_of(choices, job.best_of)
                if not job.stream:
                    # Aside: a long prompt's log-probabilities would hold up everybody's streams.
                    whole = partial(job.format.whole, _chosen(job, choices), usage)
                    answer = whole() if job.params.prompt_logprobs is None else await asyncio.to_thread(whole)
                    response = Response(answer, media_type="application/json")
                    if timed:
                        response.headers["server-timing"] = watch.server_timing().decode()
                    await respond(response)
                    return
                comment = b": server-timing %b\n\n" % watch.server_timing() if timed else b""
                await send(_body(comment + job.format.end(usage), more=False))
        except ClientDisconnect:
            reason = "abort"  # and nobody to answer
        except asyncio.CancelledError:
            reason = "abort"
            raise
        except Exception as error:
            failure = renamed(self._failure(error), names)
            if failure.status < 500:
                reason = ""
                metrics.rejected(failure.code or "invalid")
            if begun:
                await send(_body(job.format.error(failure), more=False))
            else:
                await respond(failure.response(request.url.path))
        finally:
            if reason:
                metrics.finished(reason, time.monotonic() - start)

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InvalidRequestError):
            return from_invalid_request(error)
        logger.error("internal error", exc_info=error)
        return internal()

    async def _chunks(self, job: Job) -> AsyncGenerator[tuple[int, Chunk]]:
        """The chunks of all choices, as they come, each with its choice's index. Closing it aborts all of them."""
        if job.beams is not None:
            async with aclosing(beam.chunks(job)) as chosen:
                async for choice in chosen:
                    yield choice
            return
        streams = [
            job.model.engines.generate(
                prompt,
                _params(job, i),
                clip=job.clip,
                priority=job.priority,
                cache_salt=job.cache_salt,
                session=job.session,
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


async def _translated(
    model: ServedModel,
    request: protocol.ChatRequest,
    format: Callable[[Reading], NewFormat],
    id: str,
    names: Mapping[str, str],
) -> Job:
    """The job of a body of another API, whose errors come back in that API's words."""
    with renaming(names):
        job = await model.conversation(request, format, id)
    job.names = names
    return job


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


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _stream_start(timing: bytes | None) -> dict[str, Any]:
    # Made anew for each: servers append their own headers to the list that they are given.
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    if timing is not None:
        headers.append((b"server-timing", timing))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
