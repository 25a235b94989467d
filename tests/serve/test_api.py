"""The HTTP API over stand-in engines: shapes, errors, equality of the streamed and the whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import pytest
from ray.exceptions import TaskCancelledError

from deployments.config import AppArgs
from deployments.ingress.errors import overloaded
from deployments.ingress.text import TextFrontend
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model
from tests.serve.fakes import FakeEngines, FakeMetrics, api_of, dead_engine

TOKENIZER = load_tokenizer(resolve_model("synthetic"))  # a token is a byte
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # of MESSAGES
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


class Service:
    def __init__(self) -> None:
        self.engines, self.metrics = FakeEngines(), FakeMetrics()
        args = AppArgs.model_validate(
            {
                "served_model_names": ["m", "alias"],
                "ingress": {"max_inflight_requests": 4, "max_body_bytes": 4096, "max_choices": 8},
            }
        )
        self.api = api_of(args, self.engines, TextFrontend(TOKENIZER, threads=1), self.metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api.app()), base_url="http://test")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "m", **body})

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(event, parse_constant=lambda c: pytest.fail(f"{c} in JSON")) for event in events[:-2]]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    async with service.http:
        yield service
    assert service.engines.open == 0, "a sequence was left open"


def envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response's body, whose envelope must be OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert all(error[key] is None or isinstance(error[key], str) for key in ("type", "param", "code"))
    return dict(error)


async def test_chat(service: Service) -> None:
    response = await service.post(CHAT, messages=MESSAGES, max_tokens=20, temperature=0)
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    (prompt, params, clip) = service.engines.calls[0]
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == PROMPT
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (params.max_tokens, params.temperature, clip) == (20, 0, False)
    assert service.metrics.seen["finished:stop"] == 1


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize("n", [1, 3])
async def test_chat_streamed_equals_whole(service: Service, n: int, logprobs: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "n": n, "seed": 1, **logprobs}
    whole = (await service.post(CHAT, **asked)).json()
    events = await service.stream(CHAT, stream_options={"include_usage": True}, **asked)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert [c["delta"].get("role") for c in mine] == ["assistant", None, None]
        assert [c["finish_reason"] for c in mine] == [None, None, choice["finish_reason"]]
        if logprobs:
            assert [entry for c in mine for entry in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        else:
            assert all(c["logprobs"] is None for c in mine)
            assert choice["logprobs"] is None
    assert all(event["usage"] is None for event in events[:-1])
    seeds = [params.seed for _, params, _ in service.engines.calls[:n]]
    assert len(set(seeds)) == n, "choices of a seeded request need different seeds"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_completion_streamed_equals_whole(service: Service, logprobs: int | None) -> None:
    asked = {"prompt": ["ab", "c"], "n": 2, "logprobs": logprobs}
    whole = (await service.post(COMPLETION, **asked)).json()
    assert whole["object"] == "text_completion"
    assert whole["usage"]["prompt_tokens"] == 3, "a prompt counts once, whatever n"
    assert whole["usage"]["completion_tokens"] == 4 * 12
    events = await service.stream(COMPLETION, **asked)
    assert not any("usage" in event for event in events)
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"] == "Hello wörld"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for key, values in choice["logprobs"].items():
            assert len(values) == 12
            assert [value for c in mine for value in c["logprobs"][key]] == values
        assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
        assert choice["logprobs"]["tokens"][:3] == ["H", "e", "l"]
        assert choice["logprobs"]["tokens"][7] == "bytes:\\xc3", "half a character is written as its byte"
        assert all(len(top) == logprobs for top in choice["logprobs"]["top_logprobs"])
    if logprobs == 2:
        assert whole["choices"][0]["logprobs"]["top_logprobs"][0]["y"] == -9999.0, "JSON has no infinity"


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
async def test_no_usage_chunk_unless_asked(service: Service, options: dict[str, Any]) -> None:
    events = await service.stream(CHAT, messages=MESSAGES, **options)
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)


async def test_no_header_of_one_answer_gets_into_another(service: Service) -> None:
    """Serve's HTTP server appends to the headers that it is given, so no two answers may share a list."""
    app = service.api.app()
    given: list[int] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        async def append(message: Any) -> None:
            if message["type"] == "http.response.start":
                given.append(len(message["headers"]))
                message["headers"].append((b"x-request-id", b"1"))
            await send(message)

        await app(scope, receive, append)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://test") as http:
        for stream in (True, False):
            given.clear()
            for _ in range(3):
                await http.post(CHAT, json={"model": "m", "messages": MESSAGES, "stream": stream})
            assert len(set(given)) == 1, given


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        (["a", [98]], [b"a", b"b"]),
    ],
)
async def test_all_forms_of_prompt(service: Service, prompt: Any, expected: list[bytes]) -> None:
    assert (await service.post(COMPLETION, prompt=prompt)).status_code == 200
    assert [bytes(ids) for ids, _, _ in service.engines.calls] == expected


async def test_null_is_absent(service: Service) -> None:
    fields = [
        *("top_p", "n", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "presence_penalty"),
        *("frequency_penalty", "response_format", "tools", "tool_choice", "stream", "stream_options", "user"),
        *("max_completion_tokens", "temperature", "top_k", "min_p"),
    ]
    plain = (await service.post(CHAT, messages=MESSAGES)).json()
    nulls = (await service.post(CHAT, messages=MESSAGES, **dict.fromkeys(fields))).json()
    assert nulls["choices"] == plain["choices"]
    assert service.engines.calls[0] == service.engines.calls[1]


async def test_sampling_fields_reach_the_engine(service: Service) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": 7,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": 9,
    }
    await service.post(COMPLETION, prompt="a", stop="\n", **fields)
    (_, params, _) = service.engines.calls[0]
    assert {name: getattr(params, name) for name in fields} == fields | {"stop_token_ids": (3,)}
    assert params.stop == ("\n",)


async def test_default_max_tokens_is_clipped_but_an_explicit_one_is_not(service: Service) -> None:
    await service.post(COMPLETION, prompt="a")
    await service.post(COMPLETION, prompt="a", max_tokens=5)
    await service.post(CHAT, messages=MESSAGES)
    await service.post(CHAT, messages=MESSAGES, max_completion_tokens=5)
    assert [(params.max_tokens, clip) for _, params, clip in service.engines.calls] == [
        (16, True),
        (5, False),
        (None, True),
        (5, False),
    ]


async def test_messages_reach_the_template(service: Service) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": '{"a": 1}'}}
    written = '<tool_call>\n{"name": "pick", "arguments": {"a": 1}}\n</tool_call>'
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": "number?"},
            {"role": "assistant", "tool_calls": [call], "refusal": None, **content},
            {"role": "tool", "tool_call_id": "c1", "content": "17"},
        ]
        response = await service.post(CHAT, messages=messages, add_generation_prompt=False)
        assert response.status_code == 200, response.text
        (prompt, _, _) = service.engines.calls.pop()
        assert TOKENIZER.decode(prompt, skip_special_tokens=False) == "".join(
            f"<|im_start|>{role}\n{text}<|im_end|>\n"
            for role, text in [("system", "be brief"), ("user", "number?"), ("assistant", written), ("tool", "17")]
        )


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
BAD = [
    # path, body beside the model, param, part of the message
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": "hello"}, "messages", "list"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages", "messages[0]"),
    (CHAT, {"messages": IMAGE}, "messages", "image_url"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "no option 'x'"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature", "number"),
    (CHAT, {"messages": MESSAGES, "temperature": 5}, "temperature", "2"),
    (CHAT, {"messages": MESSAGES, "temperature": True}, "temperature", "number"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p", "greater than 0"),
    (CHAT, {"messages": MESSAGES, "top_p": 1.01}, "top_p", "at most 1"),
    (CHAT, {"messages": MESSAGES, "top_k": -2}, "top_k", "top_k"),
    (CHAT, {"messages": MESSAGES, "top_k": 1.5}, "top_k", "integer"),
    (CHAT, {"messages": MESSAGES, "n": 0}, "n", "1"),
    (CHAT, {"messages": MESSAGES, "n": 9}, "n", "most choices"),
    (CHAT, {"messages": MESSAGES, "n": 2, "temperature": 0}, "n", "temperature 0"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"messages": MESSAGES, "max_tokens": -1}, "max_tokens", "at least 1"),
    (CHAT, {"messages": MESSAGES, "max_token": 5}, "max_token", "max_tokens"),
    (CHAT, {"messages": MESSAGES, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most"),
    (CHAT, {"messages": MESSAGES, "seed": "x"}, "seed", "integer"),
    (CHAT, {"messages": MESSAGES, "seed": 2**70}, "seed", "64-bit"),
    (CHAT, {"messages": MESSAGES, "stop": [1]}, "stop", "string"),
    (CHAT, {"messages": MESSAGES, "stop": ""}, "stop", "non-empty"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, "stop", "16"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [None]}, "stop_token_ids", "stop_token_ids[0]"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format", "needs"),
    (CHAT, {"messages": MESSAGES, "response_format": SCHEMA | {"type": "text"}}, "response_format", "no other type"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
     "response_format", "response_format.json_schema.schema is required"),
    (CHAT, {"messages": MESSAGES, "response_format": SCHEMA, "guided_regex": "a"}, "guided_regex", "cannot both"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"xml": "a"}}, "structured_outputs", "structured_outputs.xml"),
    (CHAT, {"messages": MESSAGES, "guided_json": "{"}, "guided_json", "not valid JSON"),
    (CHAT, {"messages": MESSAGES, "guided_choice": []}, "guided_choice", "list of 1 to"),
    (CHAT, {"messages": MESSAGES, "guided_grammar": ""}, "guided_grammar", "not be empty"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "tools[0].function is required"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"-5": 1}}, "logit_bias", "not a token id"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": None}}, "logit_bias", "number"),
    (CHAT, {"messages": MESSAGES, "logit_bias": [5]}, "logit_bias", "dictionary"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [-1]}, "allowed_token_ids", "token ids"),
    (CHAT, {"messages": MESSAGES, "bad_words": [" "]}, "bad_words", "strings of 1 to"),
    (CHAT, {"messages": MESSAGES, "priority": 1}, "priority", "first come"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tools": 5}}, "tools", "list of objects"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"documents": [5]}}, "documents", "list of objects"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages", "messages[0].tool_calls"),
    (CHAT, {"messages": MESSAGES, "priority": 2**31}, "priority", "less than"),
    (COMPLETION, {}, "prompt", "required"),
    (COMPLETION, {"prompt": []}, "prompt", "empty"),
    (COMPLETION, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETION, {"prompt": [1.5]}, "prompt", "item 0"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt", "item 0"),
    (COMPLETION, {"prompt": [-1]}, "prompt", "item 0"),
    (COMPLETION, {"prompt": [True]}, "prompt", "item 0"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt", "must be a string"),
    (COMPLETION, {"prompt": ["a"] * 9}, "n", "most choices"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    (COMPLETION, {"prompt": "a", "best_of": 1, "n": 2}, "best_of", "at least n"),
    (COMPLETION, {"prompt": "a", "best_of": 9, "stream": False}, "best_of", "most choices"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "temperature": 0, "stream": False}, "best_of", "temperature 0"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "max_tokens": 0, "stream": False}, "best_of", "max_tokens 0"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix", "fill in the middle"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "not streamed"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "20"),
    (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    (CHAT, {"messages": MESSAGES, "echo": True}, "echo", "not supported"),
    (CHAT, {"messages": MESSAGES, "best_of": 2}, "best_of", "not supported"),
    (CHAT, {"messages": MESSAGES, "functions": [{}]}, "functions", "use tools"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message", "role assistant"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", "set one of them"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "says"), BAD)
async def test_bad_requests(
    service: Service, path: str, body: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    body = {"stream": stream, **body} if stream else body
    if stream and param == "stream_options" and body["stream_options"] == {"include_usage": True}:
        pytest.skip("right in a stream")
    error = envelope(await service.post(path, **body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert service.engines.calls == []
    assert (await service.post(CHAT, messages=MESSAGES)).status_code == 200, "the next request works"
    assert sum(service.metrics.seen[key] for key in service.metrics.seen if key.startswith("rejected")) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"model": NaN}', b"[" * 4000])
async def test_bodies_that_are_no_json_object(service: Service, body: bytes) -> None:
    assert envelope(await service.http.post(CHAT, content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"messages": MESSAGES, "x" * 3000: 1}, "xxx..."),
        ({"messages": MESSAGES, "model": "x" * 3000}, "xxx..."),
        ({"messages": MESSAGES, "chat_template_kwargs": {"x" * 3000: 1}}, "xxx..."),
        ({"messages": [{"role": "user", "content": [{"type": {"x": ["y" * 3000]}}]}]}, "yyy..."),
        ({"messages": [{"role": "user", "content": [{"type": "x" * 3000}]}]}, "xxx..."),
    ],
)
async def test_no_error_sends_all_that_the_client_sent_back(service: Service, body: dict[str, Any], shown: str) -> None:
    response = await service.post(CHAT, **body)
    error = envelope(response, response.status_code)
    assert response.status_code in (400, 404)
    assert len(response.content) < 1500
    assert shown in error["message"]


async def test_arguments_nested_beyond_the_parser_are_a_400(service: Service) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 3000}}
    response = await service.post(CHAT, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert envelope(response, 400)["param"] == "messages"


async def test_no_redirects(service: Service) -> None:
    """One to http:// would lead past a gateway that ends TLS."""
    assert envelope(await service.http.get("/health/"), 404)["code"] == "unknown_url"
    assert envelope(await service.post(f"{CHAT}/", messages=MESSAGES), 404)["code"] == "unknown_url"


async def test_what_asks_for_nothing_is_accepted(service: Service) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for extra in (
        {"tools": []},
        {"tools": tools, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
        {"logit_bias": {}},
    ):
        response = await service.post(CHAT, messages=MESSAGES, **extra)
        assert response.status_code == 200, response.text
        assert "tool_calls" not in response.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({}, {}, ""),
        ({"user": "u"}, {}, "u"),
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k"),
        ({"user": "u", "prompt_cache_key": "k"}, {"x-session-id": "s"}, "s"),
        ({"user": "u" * 2000}, {}, "u" * 256),
    ],
)
async def test_the_narrowest_session_that_a_request_names(
    service: Service, body: dict[str, str], headers: dict[str, str], session: str
) -> None:
    for path, asked in (
        (CHAT, {"messages": MESSAGES, "n": 2}),
        (COMPLETION, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ):
        response = await service.http.post(path, json={"model": "m", **asked, **body}, headers=headers)
        assert response.status_code == 200, response.text
    assert service.engines.sessions == [session] * 4
    if list(body) == ["user"]:
        asked = {"messages": MESSAGES, "max_tokens": 5, "metadata": {"user_id": body["user"], "other": 1}}
        assert (await service.post("/v1/messages", **asked)).status_code == 200
        assert service.engines.sessions[-1] == session


async def test_unknown_model_route_and_method(service: Service) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "a"})):
        error = envelope(await service.post(path, **body | {"model": "x"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert envelope(await service.http.get("/v1/models/x/y"), 404)["code"] == "model_not_found"
    assert envelope(await service.http.get("/v1/nope"), 404)["code"] == "unknown_url"
    assert envelope(await service.http.get(CHAT), 405)["code"] == "method_not_allowed"


async def test_models_health_version(service: Service) -> None:
    models = (await service.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["m", "alias"]
    model = (await service.http.get("/v1/models/alias")).json()
    assert model["object"] == "model"
    assert isinstance(model["created"], int)
    assert (await service.post(CHAT, messages=MESSAGES, model="alias")).json()["model"] == "alias"
    assert (await service.http.get("/health")).status_code == 200
    service.engines.up = False
    for path in ("/health", "/v1/models", "/v1/models/m"):  # clients take any of them for readiness
        response = await service.http.get(path)
        assert envelope(response, 503)["code"] == "engine_unavailable"
        assert response.headers["retry-after"] == "1"
    envelope(await service.http.get("/v1/models/x"), 404)
    assert (await service.http.get("/version")).json()["version"]
    assert (await service.http.get("/debug/memory")).json() == {"replica": "r1", "weights": 5}


async def test_body_too_long(service: Service) -> None:
    for headers in ({}, {"transfer-encoding": "chunked"}):
        body = json.dumps({"model": "m", "prompt": "x" * 5000}).encode()
        error = envelope(await service.http.post(COMPLETION, content=body, headers=headers), 413)
        assert error["code"] == "request_too_large"


async def serve_raw(service: Service, receive: Callable[[], Awaitable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the application sends for a chat request whose body ``receive`` gives."""
    sent: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [],
    }
    await service.api.app()(scope, receive, send)
    return sent


async def test_body_that_never_ends_gives_its_place_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.api.BODY_TIMEOUT_S", 0.05)

    async def drip() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    start, body = await serve_raw(service, drip)
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"
    assert service.api._admission.in_flight == 0


@pytest.mark.parametrize("by_serve", [False, True])
async def test_client_that_leaves_in_its_body_is_an_abort_and_no_error(
    service: Service, by_serve: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> dict[str, Any]:
        if by_serve:  # as Serve's proxy says it
            raise TaskCancelledError()
        return {"type": "http.disconnect"}

    assert await serve_raw(service, leave) == []
    assert service.metrics.seen == {"finished:abort": 1}
    assert service.api._admission.in_flight == 0
    assert not caplog.records


async def test_what_is_open_ends_while_a_drained_service_takes_nothing_new(service: Service) -> None:
    service.engines.hold = asyncio.Event()
    held = [asyncio.create_task(service.post(CHAT, messages=MESSAGES, stream=i % 2 == 0)) for i in range(2)]
    await service.engines.until_open(2)
    assert service.api.drain() == 2
    for response in (
        *[await service.http.get(path) for path in ("/health", "/v1/models", "/v1/models/m")],
        await service.post(CHAT, messages=MESSAGES),
        await service.post(CHAT, messages=MESSAGES, stream=True),
        await service.post("/tokenize", prompt="a"),
    ):
        envelope(response, 503)
        assert int(response.headers["retry-after"]) >= 1
    assert service.api.drain() == 2, "none of those is open"
    service.engines.hold.set()
    assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 2
    assert service.api.drain() == 0


async def test_limit_of_requests_in_flight(service: Service) -> None:
    service.engines.hold = asyncio.Event()
    held = [asyncio.create_task(service.post(CHAT, messages=MESSAGES, stream=i % 2 == 0)) for i in range(4)]
    await service.engines.until_open(4)
    for stream in (False, True):
        response = await service.post(CHAT, messages=MESSAGES, stream=stream)
        assert envelope(response, 429)["code"] == "server_overloaded"
        assert int(response.headers["retry-after"]) >= 1
    assert len(service.engines.calls) == 4, "a refused request never reaches an engine"
    service.engines.hold.set()
    assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 4
    assert (await service.post(CHAT, messages=MESSAGES)).status_code == 200, "places are given back"


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelled_request_gives_everything_back(service: Service, n: int) -> None:
    service.engines.hold = asyncio.Event()
    for stream in (False, True) * 4:
        task = asyncio.create_task(service.post(CHAT, messages=MESSAGES, stream=stream, n=n))
        await service.engines.until_open(n)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.engines.open == 0
    assert service.metrics.seen["finished:abort"] == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(dead_engine(), 503), (overloaded("busy", 2.5), 429), (RuntimeError("secret"), 500)]
)
async def test_failure_before_the_first_token_has_a_status(
    service: Service, error: Exception, status: int, stream: bool
) -> None:
    service.engines.error = error
    for n in (1, 3):
        response = await service.post(CHAT, messages=MESSAGES, stream=stream, n=n)
        assert "secret" not in envelope(response, status)["message"]
        if status != 500:
            assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("error", [dead_engine(), RuntimeError("secret")])
async def test_failure_after_the_first_token_is_an_event(service: Service, error: Exception, n: int) -> None:
    service.engines.error, service.engines.error_after = error, 2
    response = await service.post(CHAT, messages=MESSAGES, stream=True, n=n)
    assert response.status_code == 200
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert "error" in json.loads(events[-1].removeprefix("data: "))
    assert "[DONE]" not in response.text
    assert '"finish_reason":"stop"' not in response.text
    assert "secret" not in response.text
    assert service.metrics.seen["finished:error"] == 1
