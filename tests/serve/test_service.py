"""The whole service on a real Ray Serve: HTTP, ingress, router, replica, engine process, with the synthetic model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import psutil
import pytest
from ray import serve

from deployments.messages import Chunk, GenerateCall, decode
from nanoengine.sampling.params import SamplingParams
from tests.serve.cluster import NAME, Cluster, config, eventually

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


def fixed(replicas: int, **changes: Any) -> dict[str, Any]:
    """The configuration with so many engine replicas, no autoscaling."""
    data = config(**changes)
    engine = next(d for d in data["applications"][0]["deployments"] if d["name"] == "EngineReplica")
    del engine["autoscaling_config"]
    engine["num_replicas"] = replicas
    return data


@pytest.fixture(scope="module")
def one(cluster: Cluster) -> Cluster:
    """The service with one engine replica."""
    cluster.deploy(fixed(1, args__ingress__max_inflight_requests=250))
    return cluster


@pytest.fixture
def http(one: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=one.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(one: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def idle(cluster: Cluster) -> bool:
    load = cluster.load()
    return load.waiting == load.running == load.blocks_used == 0


def post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return http.post(path, json={"model": NAME, **body})


def test_the_memory_summary_over_http(one: Cluster) -> None:
    found = httpx.get(f"{one.url}/debug/memory", timeout=10).json()
    assert found["replica"]
    assert {"weights", "kv_pool", "growth"} <= set(found)


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8])
def test_chat_with_the_openai_client(client: openai.OpenAI, n: int) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "n": n, "seed": 1}
    whole = client.chat.completions.create(**asked)
    assert len(whole.choices) == n
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20 * n
    texts, reasons, usage = [""] * n, [None] * n, None
    for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["length"] * n
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
def test_two_turns_of_tools_with_the_openai_client(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"model": NAME, "tools": tools, "max_tokens": 400}
    for choice in ("required", named):
        if stream:
            with client.chat.completions.stream(**asked, messages=MESSAGES, tool_choice=choice) as events:
                answer = events.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(**asked, messages=MESSAGES, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert answer.message.tool_calls
        for call in answer.message.tool_calls:
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        results = [{"role": "tool", "tool_call_id": c.id, "content": "sun"} for c in answer.message.tool_calls]
        turns = [*MESSAGES, answer.message.model_dump(exclude_none=True), *results]
        again = client.chat.completions.create(**asked | {"max_tokens": 5}, messages=turns)
        assert again.choices[0].message.content
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 7}}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(**asked | {"tools": bad}, messages=MESSAGES, tool_choice="required")


@pytest.mark.parametrize("stream", [False, True])
def test_two_turns_of_tools_with_the_anthropic_client(one: Cluster, stream: bool) -> None:
    client = anthropic.Anthropic(api_key="none", base_url=one.url, max_retries=0)
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    one_call: Any = {"type": "tool", "name": "weather"}
    asked: dict[str, Any] = {"model": NAME, "tools": tools, "messages": MESSAGES, "max_tokens": 400}
    if stream:
        with client.messages.stream(**asked, tool_choice=one_call) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked, tool_choice=one_call)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**asked | {"messages": turns, "max_tokens": 5})
    assert again.content[0].text
    assert again.stop_reason == "max_tokens"
    assert again.usage.output_tokens == 5
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "none"})
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**asked | {"max_tokens": 3000})


def test_responses_with_the_openai_client(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "hi", "max_output_tokens": 8, "extra_body": {"seed": 1}}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert streamed == whole.output_text
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    with pytest.raises(openai.BadRequestError, match="context") as raised:
        client.responses.create(**asked | {"max_output_tokens": 3000})
    assert raised.value.param == "max_output_tokens"


def test_tokenize_knows_the_context(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": NAME, "prompt": "ab"}).json()
    assert answer == {"count": 2, "max_model_len": 2048, "tokens": [97, 98], "token_strs": None}


def test_completions_with_the_openai_client(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": ["one", "two"], "max_tokens": 20, "seed": 1}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for event in client.completions.create(**asked, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0]


def test_scores_and_token_ids_come_all_the_way(client: openai.OpenAI) -> None:
    """From the engine's process through the replica and its channel."""
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    asked: dict[str, Any] = {
        "model": NAME,
        "prompt": "a" * 100,
        "max_tokens": 5,
        "seed": 1,
        "echo": True,
        "logprobs": 1,
    }
    choice = client.completions.create(**asked, extra_body=extra).choices[0]
    assert choice.text.startswith("a" * 100)
    assert choice.logprobs is not None
    scores = (choice.logprobs.token_logprobs or [])[:100]
    assert scores[0] is None
    assert len(set(scores)) > 50
    found = choice.model_dump()
    assert (found["prompt_token_ids"], len(found["token_ids"])) == ([97] * 100, 5)
    assert [entry and entry["97"]["logprob"] for entry in found["prompt_logprobs"]] == scores


def test_answer_is_the_same_with_and_without_a_token_channel(http: httpx.Client) -> None:
    """This process has no channel to the replica, so its call's chunks come through Serve's stream."""
    handle = serve.get_deployment_handle("EngineReplica", "llm").options(method_name="generate", stream=True)
    params = SamplingParams(max_tokens=40, seed=3, temperature=1.0)
    prompt = np.frombuffer(b"hello", np.uint8).astype(np.int32)
    call = GenerateCall(ingress="test", number=0, prompt=prompt, params=params, model="synthetic@")
    replies = [decode(data) for data in handle.remote(call)]
    assert all(isinstance(reply, Chunk) for reply in replies)
    body = post(http, prompt="hello", max_tokens=40, seed=3, temperature=1).json()
    assert "".join(reply.text for reply in replies if isinstance(reply, Chunk)) == body["choices"][0]["text"] != ""


def test_load_report_names_only_ingresses_with_sequences(one: Cluster, http: httpx.Client) -> None:
    """It goes to every router, and would grow by a name with each ingress that ever was."""
    handle = serve.get_deployment_handle("EngineReplica", "llm")

    def ingresses() -> dict[str, list[int]]:
        return handle.record_routing_stats.remote().result(timeout_s=30).get("ingresses", {})

    eventually(lambda: ingresses() == {})  # a handle's first call takes a while: not while the stream below runs out
    with http.stream("POST", "/v1/completions", json={"model": NAME, "stream": True, **LONG}) as stream:
        chunks = stream.iter_bytes()  # kept: httpx closes the connection when the iterator goes
        next(chunks)
        assert [open_ for open_, _ in ingresses().values()] == [1]
    eventually(lambda: idle(one))
    eventually(lambda: ingresses() == {})


def test_models_and_errors_with_the_openai_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=MESSAGES, top_p=0)
    assert bad.value.param == "top_p"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": [65] * 2049, "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": [65] * 2048, "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": [65] * 2045, "max_tokens": 10}, "max_tokens", "context_length_exceeded"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": [99999]}, "prompt", "invalid_token"),
        ({"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids", "invalid_token"),
    ],
)
def test_what_the_engine_refuses_is_a_400(
    http: httpx.Client, body: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    response = post(http, stream=stream, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert post(http, prompt="x", max_tokens=2).status_code == 200


def test_default_max_tokens_takes_what_the_context_leaves(http: httpx.Client) -> None:
    for stream in (False, True):
        response = post(http, prompt=[65] * 2045, ignore_eos=True, stream=stream)
        assert response.status_code == 200
        if not stream:
            body = response.json()
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["total_tokens"] == 2048


def test_request_ids_are_echoed_once_and_are_no_keys(http: httpx.Client) -> None:
    def ask(prompt: str) -> httpx.Response:
        return http.post(
            "/v1/completions",
            json={"model": NAME, "prompt": prompt, "max_tokens": 50, "seed": 5, "request_id": "same"},
            headers={"x-request-id": "same"},
        )

    alone = {prompt: ask(prompt).json()["choices"] for prompt in ("one", "two")}
    answers: dict[str, httpx.Response] = {}
    threads = [threading.Thread(target=lambda p=p: answers.update({p: ask(p)})) for p in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, answer in answers.items():
        assert answer.headers.get_list("x-request-id") == ["same"]
        assert answer.json()["choices"] == alone[prompt]
    assert len(http.get("/health").headers.get_list("x-request-id")) == 1


def test_a_request_id_brings_in_no_header(http: httpx.Client) -> None:
    """Case A32, of the header: its percents stay percents, and a line break ends it."""
    for strange in ("a%0d%0ax-evil: 1", "a%0ax-evil: 1", "x" * 8000):
        answer = http.get("/v1/models", headers={"x-request-id": strange})
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == [strange]
        assert "x-evil" not in answer.headers
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), 10) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-request-id: a\r\nx-evil: 1\r\n\r\n")
        head = raw.makefile("rb").read().split(b"\r\n\r\n")[0].lower()
    assert b"x-request-id: a" in head.split(b"\r\n")
    assert b"x-evil" not in head


# -- leaving ---------------------------------------------------------------------------------------------------------


def leave(cluster: Cluster, body: dict[str, Any], after: float) -> socket.socket:
    """Send a request on a bare socket, to be closed whenever the test wants."""
    import json

    payload = json.dumps({"model": NAME, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", cluster.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    sock.sendall(head.encode() + b"\r\n\r\n" + payload)
    time.sleep(after)
    return sock


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_blocks(one: Cluster, stream: bool, n: int) -> None:
    eventually(lambda: idle(one), what="idle engine")
    sock = leave(one, LONG | {"stream": stream, "n": n}, after=0)
    eventually(lambda: one.load().running == n, what="running")
    sock.close()
    took = eventually(lambda: idle(one), what="freed blocks")
    assert took < 0.5  # 200 ms are the goal; a query of the load alone takes tens of them on a busy machine


def test_200_streams_with_a_third_cancelled_and_some_slow_readers(one: Cluster, http: httpx.Client) -> None:
    rng = random.Random(0)

    def body(number: int) -> dict[str, Any]:
        return {"model": NAME, "prompt": f"{number}", "max_tokens": 60, "ignore_eos": True, "seed": 1}

    async def stream(client: httpx.AsyncClient, number: int) -> str | None:
        text, stop_after = "", rng.randrange(1, 5) if number % 3 == 0 else None
        async with client.stream("POST", "/v1/completions", json=body(number) | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            events = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return text
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                events += 1
                if number % 10 == 1:
                    await asyncio.sleep(0.05)
                if events == stop_after:
                    return None
        return "ended without [DONE]"

    async def all_streams() -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=one.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(200)))

    before = engine_processes(one)
    results = asyncio.run(all_streams())
    assert engine_processes(one) == before
    for number, result in enumerate(results):
        if number % 3:
            assert len(result or "") == 60, (number, result)
    for number in (1, 31, 61, *range(100, 110, 3)):  # slow readers among them
        assert post(http, **body(number)).json()["choices"][0]["text"] == results[number]
    eventually(lambda: idle(one), what="free pool")
    logs = [path for end in ("log", "err", "out") for path in Path(one.folder).rglob(f"*.{end}")]
    said = "".join(path.read_text(errors="replace") for path in logs)
    assert "never retrieved" not in said, "a cancelled stream left an exception behind"


def test_what_clients_try_again_is_not_done_twice(one: Cluster) -> None:
    """Case D16, with the official client and its retries: a mistake is seen once, and of 50 who give up after a second
    and ask anew, three times each, no more than 50 requests are ever at work."""
    attempts: list[float] = []

    async def counted(request: httpx.Request) -> None:
        attempts.append(time.monotonic())

    async def run() -> tuple[int, list[Any]]:
        http = httpx.AsyncClient(event_hooks={"request": [counted]}, limits=httpx.Limits(max_connections=None))
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 7}}}}
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", http_client=http) as client:
            with pytest.raises(openai.BadRequestError, match="context"):
                await client.completions.create(model=NAME, prompt=[65] * 3000)
            with pytest.raises(openai.BadRequestError, match="tools"):
                await client.chat.completions.create(
                    model=NAME, messages=MESSAGES, tools=[tool], tool_choice="required"
                )
            assert len(attempts) == 2
            hasty = client.with_options(timeout=1, max_retries=2)
            asked: dict[str, Any] = {"model": NAME, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
            jobs = [asyncio.create_task(hasty.completions.create(**asked, prompt=f"{i}")) for i in range(50)]
            most = 0
            while not all(job.done() for job in jobs):
                load = await asyncio.to_thread(one.load)
                most = max(most, load.running + load.waiting)
            return most, await asyncio.gather(*jobs, return_exceptions=True)

    eventually(lambda: idle(one), what="idle engine")
    before = one.load().generated_tokens
    most, results = asyncio.run(run())
    assert {type(result) for result in results} == {openai.APITimeoutError}
    assert len(attempts) == 2 + 50 * 3
    assert 0 < most <= 50
    took = eventually(lambda: idle(one), what="nothing at work")
    assert took < 0.5
    # A second of each is the client's own doing; what is made beyond that nobody is there for.
    assert one.load().generated_tokens - before < 1.2 * 150 * 1 / 0.005


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(cluster: Cluster) -> Cluster:
    """One replica with two places and two in the queue."""
    cluster.deploy(
        fixed(
            1,
            EngineReplica__max_ongoing_requests=2,
            EngineReplica__max_queued_requests=2,
            args__engine__synthetic={"step_seconds": 0.01, "max_model_len": 2048},
        )
    )
    return cluster


def test_overload_is_429_at_once_with_retry_after(small: Cluster) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> tuple[httpx.Response, float]:
        await asyncio.sleep(0.05 * number)
        start = time.monotonic()
        body = {"model": NAME, "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": number % 2 == 0}
        response = await client.post("/v1/completions", json=body)
        return response, time.monotonic() - start

    async def flood() -> list[tuple[httpx.Response, float]]:
        async with httpx.AsyncClient(base_url=small.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    answers = asyncio.run(flood())
    statuses = [response.status_code for response, _ in answers]
    assert statuses.count(200) == 4, statuses
    assert statuses.count(429) == 8, statuses
    for response, seconds in answers:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "server_overloaded"
            assert seconds < 1
    eventually(lambda: idle(small), what="idle engine")


def test_those_who_are_told_to_wait_are_served_later_and_those_who_left_hold_no_place(small: Cluster) -> None:
    """Case D16: of six, four fit; the others come back when they are told. Then all places are taken by clients that
    have left, and the next one needs not wait for what those had asked."""
    attempts: list[float] = []

    async def counted(request: httpx.Request) -> None:
        attempts.append(time.monotonic())

    async def run() -> None:
        hooks = httpx.AsyncClient(event_hooks={"request": [counted]}, limits=httpx.Limits(max_connections=None))
        asked: dict[str, Any] = {"model": NAME, "prompt": "x", "extra_body": {"ignore_eos": True}}
        async with openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none", http_client=hooks) as client:
            start = time.monotonic()
            answers = await asyncio.gather(*(client.completions.create(**asked, max_tokens=90) for _ in range(6)))
            assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [90] * 6
            first = [at for at in attempts if at - start < 0.7]
            assert len(first) == 6, "none of those who were refused came back before it was told to"
            assert 8 <= len(attempts) <= 6 + 2 * 2, "and each of them once or twice"
            hasty = client.with_options(timeout=0.5, max_retries=0)
            lost = await asyncio.gather(
                *(hasty.completions.create(**asked, max_tokens=1500) for _ in range(4)), return_exceptions=True
            )
            assert {type(error) for error in lost} == {openai.APITimeoutError}
            start = time.monotonic()
            await client.completions.create(**asked, max_tokens=2)
            assert time.monotonic() - start < 3, "1,500 tokens take 15 s, and four times that in two places"

    asyncio.run(run())
    eventually(lambda: idle(small), what="idle engine")


# -- routing ---------------------------------------------------------------------------------------------------------


def test_prompts_go_where_their_prefix_is_by_way_of_several_ingresses(cluster: Cluster) -> None:
    """Whichever ingress gets a prompt again, it knows from the engines' events who has it."""
    cluster.deploy(fixed(2, Ingress__num_replicas=2))
    eventually(lambda: cluster.replicas() == 2, 30, "two replicas")
    rng = random.Random(0)
    prompts = ["".join(rng.choice("abcdefghij ") for _ in range(1200)) for _ in range(16)]

    def cached(client: httpx.Client, prompt: str) -> int:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def ask_all(end: str) -> list[int]:
        found = []
        for prompt in prompts:
            with httpx.Client(base_url=cluster.url, timeout=60) as client:
                found.append(cached(client, prompt + end))
        return found

    ask_all("")
    assert min(ask_all("a")) >= 1152, "whichever replica had it before, the router knew"
    time.sleep(0.5)  # beyond what the router only expected
    assert min(ask_all("b")) >= 1152
    handle = serve.get_deployment_handle("EngineReplica", "llm")
    computed = [handle.load.remote().result(timeout_s=5).prompt_tokens for _ in range(20)]
    assert 0 < max(computed) < 3 * 16 * 1200, "both replicas had prompts"


# -- death -----------------------------------------------------------------------------------------------------------


def engine_processes(cluster: Cluster) -> list[psutil.Process]:
    """The engine processes of this cluster, and of no other on this machine."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if "nanoengine.process" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_engine_death(cluster: Cluster) -> None:
    """Nobody sees it: open streams go on at the other replica, token for token, and the dead one is replaced."""
    cluster.deploy(fixed(2))
    eventually(lambda: cluster.replicas() == 2, 30, "two replicas")
    engines = engine_processes(cluster)
    assert len(engines) == 2
    texts: dict[int, str] = {}
    body = {"model": NAME, **LONG, "max_tokens": 800}

    def stream(number: int) -> None:
        asked = {**body, "prompt": f"{number}", "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=asked, timeout=60) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]", lines[-1]
        texts[number] = "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    engines[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    with httpx.Client(base_url=cluster.url, timeout=30) as http:
        while time.monotonic() - killed < 2:  # while routers may not know yet
            response = post(http, prompt="x", max_tokens=2)
            assert response.status_code == 200, response.text
    for thread in threads:
        thread.join(60)
    with httpx.Client(base_url=cluster.url, timeout=30) as http:
        for number in range(8):
            whole = post(http, **body | {"prompt": f"{number}"}).json()["choices"][0]
            assert texts.get(number) == whole["text"], f"stream {number}"
    eventually(lambda: len(engine_processes(cluster)) == 2, 30, "a new engine")
    eventually(lambda: cluster.replicas() == 2, 30, "two replicas")


@pytest.mark.soak  # half a minute, for what test_engine_death shows in part
def test_last_engine_death(cluster: Cluster) -> None:
    """With no other replica: 503 with Retry-After, /health red, then all well again; but who had begun waits for it."""
    cluster.deploy(fixed(1, args__ingress__replica_wait_s=0.5))
    eventually(lambda: cluster.replicas() == 1 and len(engine_processes(cluster)) == 1, 30, "one replica")
    (engine,) = engine_processes(cluster)
    with httpx.Client(base_url=cluster.url, timeout=30) as http:
        whole = post(http, **LONG).json()["choices"][0]["text"]
        found: list[str] = []
        begun = threading.Thread(target=lambda: found.append(post(http, **LONG).json()["choices"][0]["text"]))
        begun.start()
        time.sleep(1)
        engine.send_signal(signal.SIGKILL)
        engine.wait(5)
        eventually(lambda: not cluster.healthy(), 5, "red health")
        response = post(http, prompt="x", max_tokens=2)
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        eventually(lambda: post(http, prompt="x", max_tokens=2).status_code == 200, 60, "recovery")
        assert cluster.healthy()
        begun.join(60)
        assert found == [whole]


@pytest.mark.soak  # half a minute, for what test_engine_death shows in part
def test_frozen_engine(cluster: Cluster) -> None:
    """A process that stands still is found out and replaced; what it had taken goes on at the new one."""
    cluster.deploy(fixed(1))
    eventually(lambda: cluster.replicas() == 1 and len(engine_processes(cluster)) == 1, 30, "one replica")
    (engine,) = engine_processes(cluster)
    with httpx.Client(base_url=cluster.url, timeout=30) as http:
        assert post(http, prompt="x", max_tokens=2).status_code == 200
        engine.send_signal(signal.SIGSTOP)
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(post(http, prompt="x", max_tokens=2).status_code))
        asking.start()
        eventually(lambda: not cluster.healthy(), 6, "red health")  # five, and the time that asking takes
        asking.join(60)
        assert statuses == [200]
    eventually(lambda: not engine.is_running(), 15, "its end")


# -- several models ----------------------------------------------------------------------------------------------------


def test_two_models_of_one_application(cluster: Cluster) -> None:
    """Each has its own deployment; what one does is nothing to the other."""
    data = fixed(1)
    app = data["applications"][0]
    engine = app["args"].pop("engine")
    del app["args"]["served_model_names"]
    slow = {**engine, "synthetic": {**engine["synthetic"], "step_seconds": 0.05}}
    app["args"]["models"] = [
        {"served_model_names": ["fast"], "engine": engine},
        {"served_model_names": ["slow"], "engine": slow, "deployment": "SlowReplica"},
    ]
    block = next(d for d in app["deployments"] if d["name"] == "EngineReplica")
    app["deployments"].append({**block, "name": "SlowReplica"})
    cluster.deploy(data)
    with httpx.Client(base_url=cluster.url, timeout=30) as http:
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "temperature": 0}

        def ask(model: str) -> tuple[float, httpx.Response]:
            start = time.monotonic()
            response = http.post("/v1/completions", json={"model": model, **body})
            return time.monotonic() - start, response

        for model in ("fast", "slow"):
            eventually(lambda name=model: ask(name)[1].status_code == 200, 30, model)  # type: ignore[misc]
        fast, slowly = ask("fast"), ask("slow")
        assert [answer.json()["model"] for _, answer in (fast, slowly)] == ["fast", "slow"]
        assert slowly[0] > 20 * 0.05 > fast[0]
        assert ask("other")[1].status_code == 404
