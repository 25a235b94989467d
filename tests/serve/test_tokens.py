"""/tokenize, /detokenize, and routes for other kinds of models."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.conversations import TOOLS, Conversation

USER = {"role": "user", "content": "Paris?"}


async def test_tokenize_and_back() -> None:
    service = Conversation("hermes")
    text = "ä<|eos|>"
    answer = await service.whole("/tokenize", prompt=text, return_token_strs=True)
    assert answer == {"count": 3, "max_model_len": 4096, "tokens": [195, 164, 257], "token_strs": ["�", "�", "<|eos|>"]}
    assert (await service.whole("/detokenize", tokens=answer["tokens"])) == {"prompt": text}
    without = (await service.http.post("/tokenize", json={"prompt": ""})).json()
    assert without == {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": None}


async def test_a_conversation_has_the_tokens_that_chat_gives_it() -> None:
    service = Conversation("hermes")
    call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for extra in ({}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}):
        service = Conversation("think")
        await service.whole(messages=messages, **extra)
        answer = await service.whole("/tokenize", messages=messages, **extra)
        assert answer["tokens"] == service.engines.calls[-1][0]
        prompt = (await service.whole("/detokenize", tokens=answer["tokens"]))["prompt"]
        assert prompt == service.prompt
        assert "None" not in prompt
        assert "null" not in prompt


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"promt": "a"}, "promt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [0, 262]}, "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_requests(path: str, body: dict[str, Any], param: str) -> None:
    service = Conversation("hermes")
    response = await service.post(path, **body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "") == param
    assert (await service.post("/tokenize", prompt="a")).status_code == 200
    assert service.api._admission.in_flight == 0
    assert (await service.post(path, model="x", prompt="a", tokens=[1])).status_code in (400, 404)


async def test_embeddings_are_refused() -> None:
    service = Conversation("hermes")
    client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=service.http, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="generate text") as raised:
        await client.embeddings.create(model="m", input="a")
    assert raised.value.code == "unsupported_model"
    for path in ("/v1/rerank", "/v1/score", "/classify", "/v1/audio/transcriptions"):
        response = await service.http.post(path, content=b"anything")
        assert response.status_code == 400
        assert path in response.json()["error"]["message"]
