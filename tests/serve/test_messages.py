"""/v1/messages: the events add up to the whole answer, errors are Anthropic's, and Anthropic's client uses it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import pytest

from deployments.ingress.errors import overloaded
from tests.serve.conversations import CALLS, WEATHER, Conversation
from tests.serve.fakes import dead_engine

PATH = "/v1/messages"
TOOLS = [{"name": WEATHER["name"], "description": "The weather.", "input_schema": WEATHER["parameters"]}]
USER = {"role": "user", "content": "Paris?"}
ASKED: dict[str, Any] = {"messages": [USER], "max_tokens": 99}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = dict(events[0]["message"])
    assert message["content"] == []
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[2:-2]:
        kind = event["type"]
        assert event["index"] == len(blocks) - (kind != "content_block_start")
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
            json_text = ""
        elif kind == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(json_text)
        else:
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case "input_json_delta":
                    json_text += delta["partial_json"]
    assert not is_open
    return message | events[-2]["delta"] | {"content": blocks, "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"id": "", "content": [b | ({"id": ""} if "id" in b else {}) for b in message["content"]]}


@pytest.mark.parametrize("kind", ["hermes", "think", "opened", "llama3"])
async def test_streamed_equals_whole_at_every_cut(kind: str) -> None:
    service = Conversation(kind)
    text = CALLS[kind].replace("</think>\n\n", "</think>\n\nSo:\n") if "think" in CALLS[kind] else CALLS[kind]
    asked = ASKED | {"tools": TOOLS} | (THINKING if kind in ("think", "opened") else {})
    service.says(text, [])
    whole = await service.whole(PATH, **asked)
    assert whole["content"][-1]["input"] == {"city": "Paris"}
    assert whole["stop_reason"] == "tool_use"
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == (["thinking", "text", "tool_use"] if kind in ("think", "opened") else ["tool_use"])
    for cut in [None, *([at] for at in range(1, len(text)))]:
        service.says(text, cut)
        assert without_ids(added_up(await service.stream(PATH, **asked))) == without_ids(whole)


async def test_stop_reasons_and_usage() -> None:
    service = Conversation("hermes")
    service.says("Hello")
    service.engines.cached_tokens = 4
    answer = await service.whole(PATH, **ASKED)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    prompt = len("<user>Paris?<assistant>")
    assert answer["usage"] == {
        "input_tokens": prompt - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }
    service.engines.stop_reason = "###"
    for message in (await service.whole(PATH, **ASKED), added_up(await service.stream(PATH, **ASKED))):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")
    service.engines.stop_reason, service.engines.finish_reason = None, "length"
    for message in (await service.whole(PATH, **ASKED), added_up(await service.stream(PATH, **ASKED))):
        assert message["stop_reason"] == "max_tokens"
    service.says('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    cut = await service.whole(PATH, **ASKED, tools=TOOLS)
    assert cut["content"][0]["input"] == {"INVALID_JSON": '{"city": "Pa'}


async def test_fields_reach_the_engine() -> None:
    service = Conversation("hermes")
    service.says("ok")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    await service.whole(PATH, **ASKED, **fields, stop_sequences=["#"], metadata={"user_id": "u"}, system="Be brief.")
    params = service.engines.calls[-1][1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.max_tokens, params.stop) == (99, ("#",))
    assert service.prompt == "<system>Be brief.<user>Paris?<assistant>"


async def test_thinking_is_off_unless_asked_for() -> None:
    service = Conversation("think")
    service.says("<think>hm</think>yes")
    for extra in ({}, {"thinking": {"type": "disabled"}}):
        await service.whole(PATH, **ASKED, **extra)
        assert service.prompt.endswith("<assistant><think>\n\n</think>\n\n")
    answer = await service.whole(PATH, **ASKED, **THINKING)
    assert service.prompt.endswith("<assistant>")
    assert answer["content"][0] == {"type": "thinking", "thinking": "hm", "signature": ""}
    # A template that always opens the reasoning: it is left out of the answer.
    service = Conversation("opened")
    service.says("hm</think>yes")
    answer = await service.whole(PATH, **ASKED)
    assert answer["content"] == [{"type": "text", "text": "yes"}]
    assert without_ids(added_up(await service.stream(PATH, **ASKED))) == without_ids(answer)


async def test_blocks_are_turns() -> None:
    service = Conversation("think")
    service.says("ok")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"é": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "17"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    await service.whole(PATH, messages=turns, max_tokens=5, **THINKING)
    assert service.prompt == ('<user>q<assistant>(think:hm)a[t1:f:{"é": 1}][t2:f:{}]<tool>17<tool><user>so?<assistant>')
    counted = await service.whole(f"{PATH}/count_tokens", messages=turns, **THINKING)
    assert counted == {"input_tokens": len(service.engines.calls[-1][0])}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
BAD = [
    ({"messages": [USER]}, "max_tokens is required"),
    ({"max_tokens": 5}, "messages is required"),
    ({"messages": [], "max_tokens": 5}, "messages"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 5}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}], "max_tokens": 5}, "content[0]"),
    ({"messages": [{"role": "user", "content": 5}], "max_tokens": 5}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": "So"}], "max_tokens": 5}, "must be the user's"),
    ({"messages": [USER], "max_tokens": 5, "temperature": 1.5}, "temperature"),
    ({"messages": [USER], "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences must be"),
    ({"messages": [USER], "max_tokens": 5, "stop": ["x"]}, "unknown field 'stop'"),
    ({"messages": [USER], "max_tokens": 5, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]"),
    ({"messages": [USER], "max_tokens": 5, "tools": TOOLS, "tool_choice": {"type": "tool"}}, "name is required"),
    ({"messages": [USER], "max_tokens": 5, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "not among"),
    ({"messages": [USER], "max_tokens": 5, "tool_choice": {"type": "any"}}, "no tools"),
    ({"messages": [USER], "max_tokens": 5, **THINKING}, "thinking"),
    ({"messages": [USER], "max_tokens": 5, "system": [IMAGE]}, "system[0]"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "says"), BAD)
async def test_bad_requests(body: dict[str, Any], says: str, stream: bool) -> None:
    service = Conversation("hermes")
    response = await service.post(PATH, **body, stream=stream)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"type", "error"}
    error = response.json()["error"]
    assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
    assert says in error["message"]
    assert service.engines.calls == []


async def test_errors_are_anthropics() -> None:
    service = Conversation("hermes")
    for response, status, kind in (
        (await service.post(PATH, **ASKED | {"model": "x"}), 404, "not_found_error"),
        (await service.post(f"{PATH}/count_tokens", messages=[USER], model="x"), 404, "not_found_error"),
        (await service.http.get(PATH), 405, "invalid_request_error"),
        (await service.http.get(f"{PATH}/batches"), 404, "not_found_error"),
        (await service.http.post(PATH, content=b"{"), 400, "invalid_request_error"),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
    for error, status, kind in (
        (dead_engine(), 503, "overloaded_error"),
        (overloaded("busy", 2), 429, "rate_limit_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ):
        service.engines.error = error
        for stream in (False, True):
            response = await service.post(PATH, **ASKED, stream=stream)
            assert response.status_code == status
            assert response.json()["error"]["type"] == kind
            assert "secret" not in response.text
    service.says("Hello")
    service.engines.error, service.engines.error_after = dead_engine(), 2
    events = await service.stream(PATH, **ASKED)
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "the engine has ended"}}
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_the_official_client(stream: bool) -> None:
    service = Conversation("think")
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(service.api.app()))
    client = anthropic.AsyncAnthropic(api_key="x", base_url="http://test", http_client=http, max_retries=0)
    service.says(CALLS["think"])
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 2000, "tools": TOOLS, **THINKING}
    if stream:
        async with client.messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**asked)
    thought, call = message.content
    assert thought.thinking == "Where?"
    assert call.input == {"city": "Paris"}
    assert message.stop_reason == "tool_use"
    turns = [
        USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]},
    ]
    service.says("Sunny.")
    answer = await client.messages.create(**asked | {"messages": turns})
    assert answer.content[0].text == "Sunny."
    assert f'(think:Where?)[{call.id}:weather:{{"city": "Paris"}}]<tool>sun' in service.prompt
    assert (await client.messages.count_tokens(model="m", messages=[USER])).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**asked | {"model": "x"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.create(**asked | {"max_tokens": 0})


async def test_forced_choices() -> None:
    service = Conversation("hermes")
    service.says(CALLS["hermes"])
    for choice, forced in (
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
    ):
        await service.whole(PATH, **ASKED, tools=TOOLS, tool_choice=choice)
        assert (service.engines.calls[-1][1].structured is not None) == forced
    answer = await service.whole(PATH, **ASKED, tools=TOOLS, tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": CALLS["hermes"]}]
    service.says(CALLS["hermes"] * 2)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await service.whole(PATH, **ASKED, tools=TOOLS, tool_choice=one))["content"]) == 1
