"""A service over scripted engines, for models that write tool calls and reasoning in each of the known ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deployments.config import AppArgs
from deployments.ingress.text import TextFrontend
from nanoengine.text.token_bytes import BYTE_LEVEL
from nanoengine.text.tokenizer import Tokenizer
from tests.serve.fakes import FakeEngines, FakeMetrics, api_of

CHAT = "/v1/chat/completions"
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLS = {
    "hermes": HERMES_CALL,
    "llama3": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    "pythonic": '[weather(city="Paris")]',
    "qwen_coder": ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
    "think": f"<think>\nWhere?\n</think>\n\n{HERMES_CALL}",
    "opened": f"Where?\n</think>\n\n{HERMES_CALL}",
}
ARGUMENTS = {
    # of the calls above, and none
    "pythonic": ('city="Paris"', ""),
    "qwen_coder": ("<parameter=city>\nParis\n</parameter>\n", ""),
    **dict.fromkeys(("hermes", "llama3", "mistral", "think", "opened"), ('{"city": "Paris"}', "{}")),
}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]

_TURNS = """\
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}(think:{{ m.reasoning_content }}){% endif %}\
{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments }}]\
{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<assistant>"""
TEMPLATES = {
    "hermes": "{# <tool_call> #}" + _TURNS,
    "llama3": "{# <|python_tag|> #}" + _TURNS,
    "mistral": "{# [TOOL_CALLS] [ARGS] #}" + _TURNS,
    "pythonic": "{# [func_name1(params_name1=params_value1), func_name2(params)] #}" + _TURNS,
    "qwen_coder": "{# <tool_call>\n<function= #}" + _TURNS,
    "think": "{# <tool_call> </think> #}"
    + _TURNS
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    "opened": "{# <tool_call> </think> #}" + _TURNS + "<think>\n",
    "plain": "{%- for m in messages %}{{ m.content }}{% endfor %}",
}
SPECIAL = ("<|bos|>", "<|eos|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|python_start|>")  # ids from 256 on


def tokenizer(kind: str) -> Tokenizer:
    """One token per byte, and the special tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, eos_token="<|eos|>", chat_templates={"default": TEMPLATES[kind]})


class Conversation:
    """One model ``m``, of a kind; its engine answers with what it is told to."""

    def __init__(self, kind: str) -> None:
        self.engines, self.metrics = FakeEngines(), FakeMetrics()
        self.tokenizer = tokenizer(kind)
        self.text = TextFrontend(self.tokenizer, threads=1)
        self.api = api_of(AppArgs.model_validate({"served_model_names": ["m"]}), self.engines, self.text, self.metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api.app()), base_url="http://test")

    def says(self, text: str, cuts: Sequence[int] | None = None) -> None:
        """The next answers are this, a character at a time or cut at ``cuts``."""
        ends = list(range(1, len(text) + 1)) if cuts is None else [*cuts, len(text)]
        self.engines.pieces = [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.engines.calls[-1][0], skip_special_tokens=False)

    async def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "m", **body})

    async def whole(self, path: str = CHAT, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def stream(self, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
        """The events' data; [DONE] is cut off, event names must be the data's types."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        events = response.text.split("\n\n")
        assert events.pop() == ""
        if path == CHAT:
            assert events.pop() == "data: [DONE]"
        found = []
        for event in events:
            *head, data = event.split("\n")
            value = json.loads(data.removeprefix("data: "), parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
            if path != CHAT:
                assert head == [f"event: {value['type']}"]
            found.append(value)
        return found


def put_together(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that a stream of chat chunks adds up to, as a client adds it up."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    finish = None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "nothing follows the finish reason"
            delta, finish = dict(choice["delta"]), choice["finish_reason"]
            if "role" in delta:
                assert message["role"] is None, "the role comes once"
                message["role"] = delta.pop("role")
            for call in delta.pop("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            for name, words in delta.items():
                if words is not None:
                    message[name] = (message.get(name) or "") + words
    return {"message": message, "finish_reason": finish}
