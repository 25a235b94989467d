"""The official clients against a live server: what they parse, which errors they raise, when they try again."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.engine.structured_cases import random_schema, rooted, write_tiny_llm
from tests.serve.cluster import eventually
from tests.serve.fakes import dead_engine
from tests.serve.live import Server
from tests.serve.tiny_engine import TinyEngines

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engines = TinyEngines(write_tiny_llm(tmp_path_factory.mktemp("tiny")))
    server = Server(engines, max_inflight_requests=2, retry_after_s=1)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.alive()


@pytest.mark.parametrize("seed", range(4))
def test_structured_output_is_parsed(client: openai.OpenAI, seed: int) -> None:
    completion = client.chat.completions.parse(
        model="m", messages=MESSAGES, response_format=Person, temperature=1, seed=seed, max_tokens=400
    )
    assert isinstance(completion.choices[0].message.parsed, Person)
    assert completion.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="m", input="hi", text_format=Person, temperature=1, max_output_tokens=400)
    assert isinstance(response.output_parsed, Person)


def test_structured_output_is_parsed_from_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=MESSAGES, response_format=Person, temperature=1, seed=1, max_tokens=400
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked = {"model": "m", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=3)  # type: ignore[call-overload]
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token or "\ufffd" in entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.logprob == entry.top_logprobs[0].logprob
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, top_logprobs=3, stream=True)  # type: ignore[call-overload]
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content


def test_other_kinds_of_models_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="generate text"):
        client.embeddings.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError):
        client.moderations.create(input="hi")


def test_openai_error_classes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(model="m", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat(model="m", messages=MESSAGES, max_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="m", prompt="x" * (5 << 20))
    assert large.value.status_code == 413


def test_anthropic_error_classes(server: Server) -> None:
    with anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0) as client:
        hello: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=4, messages=hello)
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(model="m", max_tokens=4, messages=hello, extra_body={"temperature": 9})
        assert client.messages.count_tokens(model="m", messages=hello).input_tokens > 1
    server.alive()


def held(server: Server, stop: threading.Event) -> list[threading.Thread]:
    """Streams that take all places in flight until ``stop``."""
    ready = threading.Barrier(3)

    def hold() -> None:
        body = {"model": "m", "prompt": "A", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            ready.wait(10)
            while not stop.is_set():
                next(lines)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(10)
    return threads


def test_a_full_server_is_tried_again_when_it_says(server: Server) -> None:
    stop = threading.Event()
    threads = held(server, stop)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(model="m", prompt="A", max_tokens=2)
            assert int(full.value.response.headers["retry-after"]) >= 1
            assert full.value.code == "server_overloaded"
        with (
            anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0) as other,
            pytest.raises(anthropic.RateLimitError),
        ):
            other.messages.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "hi"}])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as patient:
            threading.Timer(0.5, stop.set).start()
            start = time.monotonic()
            answer = patient.completions.create(model="m", prompt="A", max_tokens=2)
            assert time.monotonic() - start >= 0.9, "the client did not wait as long as Retry-After says"
            assert answer.choices[0].finish_reason == "length"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


async def test_what_the_async_client_cancels_ends(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(stream: bool) -> None:
            answer = await client.completions.create(
                model="m", prompt="A", max_tokens=1500, extra_body={"ignore_eos": True}, stream=stream
            )
            if stream:
                async for _ in answer:
                    pass

        engine = server.engines.engine
        aborted = engine.load().finished["abort"]
        tasks = [asyncio.create_task(ask(stream)) for stream in (True, False)]
        await asyncio.to_thread(eventually, lambda: engine.load().running == 2, 5, "both running")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(eventually, lambda: engine.load().running == engine.load().blocks_used == 0, 5, "the end")
    assert engine.load().finished["abort"] == aborted + 2
    await asyncio.to_thread(server.alive)


def check_random_schemas(server: Server, seeds: range) -> None:
    """Answers to random schemas, through each API that takes one, streamed and whole, at temperature 1, are right."""
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0) as other,
    ):
        for seed in seeds:
            schema = rooted(random_schema(random.Random(seed)))
            asked: dict[str, Any] = {"model": "m", "temperature": 1.0}
            name = {"type": "json_schema", "name": "s", "schema": schema}
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
            match seed % 4:
                case 0:
                    whole = client.chat.completions.create(
                        **asked, messages=MESSAGES, response_format=form, max_tokens=1500, seed=seed
                    )
                    text, reason = whole.choices[0].message.content, whole.choices[0].finish_reason
                case 1:
                    text, reason = "", None
                    for chunk in client.chat.completions.create(
                        **asked, messages=MESSAGES, response_format=form, max_tokens=1500, seed=seed, stream=True
                    ):
                        text += chunk.choices[0].delta.content or ""
                        reason = chunk.choices[0].finish_reason or reason
                case 2:
                    answer = client.responses.create(**asked, input="hi", text={"format": name}, max_output_tokens=1500)
                    text, reason = answer.output_text, "stop" if answer.status == "completed" else answer.status
                case _:
                    hello: list[Any] = [{"role": "user", "content": "hi"}]
                    config: Any = {"format": {"type": "json_schema", "schema": schema}}
                    message = other.messages.create(
                        model="m",
                        max_tokens=1500,
                        messages=hello,
                        extra_body={"output_config": config, "temperature": 1.0},
                    )
                    text = message.content[0].text
                    reason = "stop" if message.stop_reason == "end_turn" else message.stop_reason
            assert reason == "stop", (seed, schema, text)
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_answers_to_random_schemas_are_right(server: Server) -> None:
    check_random_schemas(server, range(20))
    server.alive()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_300_answers_to_random_schemas_are_right(server: Server) -> None:
    check_random_schemas(server, range(1000, 1300))
    server.alive()


def test_a_server_without_an_engine_is_an_error_that_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def dead(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        attempts.append(time.monotonic())
        raise dead_engine()
        yield

    monkeypatch.setattr(server.engines, "generate", dead)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        client.completions.create(model="m", prompt="A", max_tokens=2)
    assert (raised.value.status_code, raised.value.code) == (503, "engine_unavailable")
    assert len(attempts) == 2
    assert attempts[1] - attempts[0] >= 0.9, "Retry-After is one second"
    with (
        anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0) as other,
        pytest.raises(anthropic.InternalServerError, match="overloaded_error"),
    ):
        other.messages.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("failure", [RuntimeError("secret"), dead_engine()])
def test_a_failure_in_a_stream_is_raised(server: Server, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """After the first byte there is no status any more: an event, which each client makes an exception of."""
    real = server.engines.generate

    async def failing(*args: Any, **fields: Any) -> AsyncGenerator[Any]:
        async with aclosing(real(*args, **fields)) as chunks:
            yield await anext(chunks)
            raise failure

    monkeypatch.setattr(server.engines, "generate", failing)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for stream in (
            client.completions.create(model="m", prompt="A", max_tokens=9, stream=True),
            client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=9, stream=True),
        ):
            with pytest.raises(openai.APIError) as raised:
                list(stream)
            assert "secret" not in str(raised.value)
        # Here the specification's events are flat, and the client hands them on.
        last = list(client.responses.create(model="m", input="hi", max_output_tokens=9, stream=True))[-2:]
        assert [event.type for event in last] == ["error", "response.failed"]
        assert "secret" not in str(last)
    with anthropic.Anthropic(api_key="none", base_url=server.url) as other:
        events = other.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(anthropic.APIStatusError):
            list(events)
    monkeypatch.undo()
    server.alive()
