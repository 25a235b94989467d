"""/v1/responses: the events add up to the whole answer, and OpenAI's client uses it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.conversations import CALLS, WEATHER, Conversation
from tests.serve.fakes import dead_engine

PATH = "/v1/responses"
TOOLS = [{"type": "function", **WEATHER}]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "output": output}


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas add up to; every item and part must be opened and closed around them."""
    output: list[dict[str, Any]] = []
    open_item = None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(output)
            open_item = event["item"]["id"]
            assert event["item"]["status"] == "in_progress"
            output.append(dict(event["item"]))
            continue
        if kind in ("created", "in_progress", "completed", "incomplete"):
            assert open_item is None
            continue
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", open_item) == open_item
        match kind:
            case "content_part.added":
                assert event["part"]["text"] == ""
                item["content"] = [dict(event["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "content_part.done":
                assert event["part"] == item["content"][0]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert event["item"] == item
                open_item = None
            case _:
                pytest.fail(f"unknown event {kind}")
    return output


@pytest.mark.parametrize("kind", ["hermes", "think", "opened", "mistral"])
@pytest.mark.parametrize("length", [False, True])
async def test_streamed_equals_whole_at_every_cut(kind: str, length: bool) -> None:
    service = Conversation(kind)
    service.engines.finish_reason = "length" if length else "stop"
    text = CALLS[kind].replace("</think>\n\n", "</think>\n\nSo:\n") if "think" in CALLS[kind] else CALLS[kind]
    asked: dict[str, Any] = {"input": "Paris?", "tools": TOOLS, "metadata": {"a": "b"}, "temperature": 0.5}
    service.says(text, [])
    whole = await service.whole(PATH, **asked)
    assert whole["status"] == ("incomplete" if length else "completed")
    assert whole["output"][-1]["type"] == "function_call"
    for cut in [None, *([at] for at in range(1, len(text)))]:
        service.says(text, cut)
        events = await service.stream(PATH, **asked)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == ("response.incomplete" if length else "response.completed")
        final = events[-1]["response"]
        assert added_up(events) == final["output"]
        usage = {"output_tokens_details": whole["usage"]["output_tokens_details"]}  # its grain is a chunk
        assert without_ids(final) | {"usage": final["usage"] | usage} == without_ids(whole)


async def test_the_answer_says_what_was_asked() -> None:
    service = Conversation("hermes")
    service.says("Hello")
    answer = await service.whole(PATH, input="hi", instructions="Be brief.", max_output_tokens=9, store=True, top_p=0.5)
    assert service.prompt == "<system>Be brief.<user>hi<assistant>"
    assert service.engines.calls[-1][1].max_tokens == 9
    assert (answer["store"], answer["top_p"], answer["max_output_tokens"]) == (False, 0.5, 9)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 5


async def test_items_are_turns() -> None:
    service = Conversation("think")
    service.says("ok")
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "17"},
    ]
    await service.whole(PATH, input=items)
    assert service.prompt == "<system>d<user>q<assistant>(think:hm)a[c1:f:{}]<tool>17<assistant>"


BAD = [
    ({}, "input", "required"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
    ({"input": "a", "previous_response_id": "r"}, "previous_response_id", "nothing is stored"),
    ({"input": "a", "conversation": "c"}, "conversation", "nothing is stored"),
    ({"input": "a", "background": True}, "background", "False"),
    ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "not supported"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
    ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    ({"input": "a", "temperature": 5}, "temperature", "2"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "schema is required"),
    ({"input": "a", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"input": "a", "truncation": "auto"}, "truncation", "disabled"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "says"), BAD)
async def test_bad_requests(body: dict[str, Any], param: str, says: str, stream: bool) -> None:
    service = Conversation("hermes")
    response = await service.post(PATH, **body, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert service.engines.calls == []


async def test_failure_after_the_first_token_is_an_event() -> None:
    service = Conversation("hermes")
    service.says("Hello")
    service.engines.error, service.engines.error_after = dead_engine(), 2
    events = await service.stream(PATH, input="hi")
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_the_official_client(stream: bool) -> None:
    service = Conversation("think")
    client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=service.http)
    service.says(CALLS["think"])
    items: list[Any] = [{"role": "user", "content": "Paris?"}]
    if stream:
        async with client.responses.stream(model="m", input=items, tools=TOOLS) as events:
            seen = [event.type async for event in events]
            response = await events.get_final_response()
        assert "response.function_call_arguments.delta" in seen
    else:
        response = await client.responses.create(model="m", input=items, tools=TOOLS)
    thought, call = response.output
    assert thought.content[0].text == "Where?"
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += [item.model_dump(exclude_none=True) for item in response.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    service.says("Sunny.")
    answer = await client.responses.create(model="m", input=items, tools=TOOLS)
    assert answer.output_text == "Sunny."
    assert f'(think:Where?)[{call.call_id}:weather:{{"city": "Paris"}}]<tool>sun' in service.prompt


async def test_schema_reaches_the_engine() -> None:
    service = Conversation("hermes")
    service.says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await service.whole(PATH, input="a", text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    structured = service.engines.calls[-1][1].structured
    assert structured is not None
    assert json.loads(structured.text) == schema
