"""Bodies of every endpoint with one node replaced by anything: refused or served, never a 5xx, nothing left behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.conversations import CALLS, TOOLS, WEATHER, Conversation

ANYTHING = [
    *(None, True, 0, -1, 2**70, 1.5, "", "x", "\x00", "é" * 50, [], {}, [None], [[]], [{}], {"type": "text"}, [5]),
    *({"type": "function"}, {"a": {"b": [{}]}}, {"type": "text", "text": "a"}, "required", "none", ["a", 5]),
]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "17"},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "include_reasoning": True,
        "continue_final_message": False,
    },
    "/v1/completions": {
        "model": "m",
        "prompt": ["q", [65, 66]],
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "best_of": 2,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 2,
        "return_token_ids": True,
        "stop": ["a"],
        "logit_bias": {"5": 1},
    },
    "/v1/responses": {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "17"}]},
        ],
        "instructions": "i",
        "tools": [{"type": "function", **WEATHER}],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "max_output_tokens": 9,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "17"}]},
        ],
        "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["#"],
    },
    "/tokenize": {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
}


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything within."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield value, key
        yield from nodes(child)


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_are_right_before_they_are_mutated(path: str) -> None:
    service = Conversation("think")
    service.says(CALLS["think"])
    response = await service.http.post(path, json=BODIES[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", BODIES)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
async def test_no_mutation_is_a_server_error(path: str, data: st.DataObject) -> None:
    body = copy.deepcopy(BODIES[path])
    for _ in range(data.draw(st.integers(1, 3))):
        where = list(nodes(body))
        if not where:
            break
        container, key = data.draw(st.sampled_from(where))
        container[key] = copy.deepcopy(data.draw(st.sampled_from(ANYTHING)))
    service = Conversation("think")
    service.says(CALLS["think"])
    response = await service.http.post(path, content=json.dumps(body).encode())
    assert response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
    assert service.engines.open == service.api._admission.in_flight == 0
