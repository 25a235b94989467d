"""The official clients against a live server: what they parse, which errors they raise, when they try again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.engine.structured_cases import write_tiny_llm
from tests.serve.cluster import eventually
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

        tasks = [asyncio.create_task(ask(stream)) for stream in (True, False)]
        engine = server.engines.engine
        await asyncio.to_thread(eventually, lambda: engine.load().running == 2, 5, "both running")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(eventually, lambda: engine.load().running == engine.load().blocks_used == 0, 5, "the end")
    await asyncio.to_thread(server.alive)
