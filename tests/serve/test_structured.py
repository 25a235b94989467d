"""What structured output, biases and filters do to an answer, over HTTP and with a real (tiny, random) model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.engine.structured_cases import write_tiny_llm
from tests.serve.live import Server
from tests.serve.test_api import CHAT, COMPLETION, MESSAGES, envelope
from tests.serve.tiny_engine import TinyEngines

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(TinyEngines(write_tiny_llm(tmp_path_factory.mktemp("tiny"))), default_max_tokens=400)
    yield server
    server.stop()


class Service:
    def __init__(self, server: Server) -> None:
        self.engines = server.engines
        self.tokenizer = server.engines.tokenizer
        self.http = httpx.AsyncClient(base_url=server.url, timeout=60)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "m", **body})

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The whole answer, which must be JSON without NaN or Infinity."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return dict(strict(response.text))

    async def texts(self, path: str, **body: Any) -> list[tuple[str, str]]:
        """(text, finish reason) of each choice; the streamed answer has to be the same."""
        whole = await self.answer(path, **body)
        found = [(c["message"]["content"] if path == CHAT else c["text"], c["finish_reason"]) for c in whole["choices"]]
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        streamed: dict[int, tuple[str, str]] = {}
        for event in response.text.split("\n\n")[:-2]:
            (choice,) = strict(event.removeprefix("data: "))["choices"]
            piece = choice["delta"]["content"] if path == CHAT else choice["text"]
            text, _ = streamed.get(choice["index"], ("", ""))
            streamed[choice["index"]] = (text + piece, choice["finish_reason"])
        assert [streamed[i] for i in range(len(found))] == found
        return found


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


@pytest.fixture
async def service(server: Server) -> AsyncIterator[Service]:
    service = Service(server)
    async with service.http:
        yield service
    # Whatever was sent: the engine is idle, whole, and answers.
    server.alive()
    server.engines.engine.check()
    assert not len(server.engines.engine._constraints)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": json_schema(PERSON, strict=True)}, None),
        ({"structured_outputs": {"json": PERSON}}, None),
        ({"guided_json": json.dumps(PERSON)}, None),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]+"}}, "[ab]{3}-[0-9]+"),
        ({"guided_regex": "^x+y$"}, "x+y"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["<|im_end|>", "é"]}, r"<\|im_end\|>|é"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")+'}}, "a[bc]+"),
        ({"guided_grammar": 'start: "a" /[0-9]/'}, r"a\d"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_answers_match(
    service: Service, path: str, fields: dict[str, Any], pattern: str | None, seed: int
) -> None:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "A B"}
    asked |= {"n": 2, "seed": seed, "max_tokens": 200, "ignore_eos": seed == 2}
    for text, reason in await service.texts(path, **asked, **fields):
        if pattern is None:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), PERSON)
        elif reason == "stop":
            assert re.fullmatch(pattern, text), text
        else:
            assert seed == 2, "what ignores an end only comes to one where nothing else is left"


async def test_json_object(service: Service) -> None:
    bias = {str(token): 8 for token in service.tokenizer.encode('}"', add_special_tokens=False)}
    fields = {"response_format": {"type": "json_object"}, "logit_bias": bias, "max_tokens": 1500, "seed": 1}
    ((text, reason),) = await service.texts(CHAT, messages=MESSAGES, **fields)
    assert reason == "stop"
    assert isinstance(json.loads(text), dict)
    ((text, reason),) = await service.texts(CHAT, messages=MESSAGES, **fields | {"max_tokens": 1})
    assert reason == "length"
    assert text.startswith("{")


async def test_constrained_and_free_requests_side_by_side(service: Service) -> None:
    bodies = [
        {"prompt": "A", "seed": i, "max_tokens": 60, **({"structured_outputs": {"regex": "[a-z]{9}"}} if i % 2 else {})}
        for i in range(8)
    ]
    together = await asyncio.gather(*(service.answer(COMPLETION, **body) for body in bodies))
    alone = [await service.answer(COMPLETION, **body) for body in bodies]
    assert [a["choices"] for a in together] == [a["choices"] for a in alone]


INVALID = [
    json_schema({"type": "object", "properties": {"a": 7}}),
    json_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(["}}}),
    json_schema({"type": "array", "uniqueItems": True}),
    json_schema({"type": "object", "not": {}}),
    {"type": "json_schema"},
    {"type": "yaml"},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", INVALID)
async def test_an_invalid_schema_is_a_400_that_names_it(service: Service, form: dict[str, Any], stream: bool) -> None:
    error = envelope(await service.post(CHAT, messages=MESSAGES, response_format=form, n=2, stream=stream), 400)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format")
    if "json_schema" in form:
        assert error["message"].startswith("response_format.json_schema.schema: ")
        assert error["code"] == "invalid_grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 999983}}}, "structured_outputs"),
        ({"logit_bias": {"PADDING": 1}}, "logit_bias"),
        ({"allowed_token_ids": ["PADDING"]}, "allowed_token_ids"),
        ({"stop_token_ids": ["VOCAB"], "min_tokens": 3}, "stop_token_ids"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -7}, "top_k"),
    ],
)
async def test_bad_values_are_400s(service: Service, fields: dict[str, Any], param: str, stream: bool) -> None:
    info = service.engines.engine.info
    text = json.dumps(fields).replace('["PADDING"]', f"[{info.num_tokens}]").replace('"VOCAB"', str(info.vocab_size))
    fields = json.loads(text.replace("PADDING", str(info.num_tokens)))
    error = envelope(await service.post(COMPLETION, prompt="A", stream=stream, **fields), 400)
    assert error["param"] == param


async def test_a_dead_end_is_an_error(service: Service) -> None:
    (a,) = service.tokenizer.encode("a", add_special_tokens=False)
    error = envelope(await service.post(COMPLETION, prompt="A", guided_choice=["ab"], allowed_token_ids=[a]), 400)
    assert error["param"] == "guided_choice"


async def test_no_log_probability_is_infinite(service: Service) -> None:
    """Case A10: filters, bans and masks leave alternatives that cannot come."""
    logprobs = {"logprobs": 5, "max_tokens": 2, "temperature": 1}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 3}
    for path, body in (
        (COMPLETION, {"prompt": "A B C", "top_k": 1, **logprobs}),
        (CHAT, {"logit_bias": {"5": -100, "6": -100}, "response_format": {"type": "json_object"}, **chat}),
        (CHAT, {"allowed_token_ids": [9], **chat}),
        (CHAT, {"guided_choice": ["é"], **chat}),
    ):
        whole = await service.answer(path, **body)
        await service.texts(path, seed=1, **body)
        values = re.findall(r'"logprob":(-?[\d.e-]+)', json.dumps(whole, separators=(",", ":")))
        assert all(-1000 < float(value) <= 0 for value in values), "the sampled and the likeliest are finite by nature"


async def test_logit_bias_bans_and_forces(service: Service) -> None:
    """Case A14."""

    async def tokens(**fields: Any) -> list[list[int]]:
        body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True, "ignore_eos": True, **fields}
        return [entry["bytes"] for entry in (await service.answer(CHAT, **body))["choices"][0]["logprobs"]["content"]]

    first = (await tokens())[0]
    ids = [i for i in range(service.tokenizer.vocab_size) if list(service.tokenizer.token_bytes(i)) == first]
    assert first not in await tokens(logit_bias={str(i): -100 for i in ids})
    x = service.tokenizer.encode("x", add_special_tokens=False)[0]
    body = {"prompt": "A B C", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logit_bias": {str(x): 100}}
    answer = await service.answer(COMPLETION, **body)
    assert answer["choices"][0]["text"] == "xxxxxx"
    assert answer["usage"]["completion_tokens"] == 6


async def test_top_p_and_top_k_at_their_edges_in_one_batch(service: Service) -> None:
    """Cases A06 and C20."""
    base = {"prompt": "A B C", "max_tokens": 8, "temperature": 1.0, "seed": 1}
    free = [{"top_k": 12345678}, {"top_k": 0}, {"top_k": -1}, {}]
    greedy = [{"top_k": 1}, {"temperature": 0}, {"min_p": 1.0}, {"top_p": 1e-9}]
    answers = await asyncio.gather(*(service.answer(COMPLETION, **base | fields) for fields in free + greedy))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts[:4])) == 1
    assert len(set(texts[4:])) == 1
    assert texts[0] != texts[4]


async def test_padding_is_never_sampled(service: Service) -> None:
    """Case C30."""
    info = service.engines.engine.info
    body = {
        "max_tokens": 64,
        "temperature": 2.0,
        "seed": 5,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
    for prompt in ("A", [info.num_tokens]):
        answer = await service.answer(COMPLETION, **body | {"prompt": prompt})
        assert answer["usage"]["completion_tokens"] == 64
        assert max(answer["choices"][0]["token_ids"]) < info.num_tokens
        assert all(len(top) == 5 and "" not in top for top in answer["choices"][0]["logprobs"]["top_logprobs"])


async def test_ignored_ends_and_own_stop_tokens(service: Service) -> None:
    """Case C26: what a request names stops it, the model's own ends do not, and the last token can be sampled."""
    last = service.engines.engine.info.num_tokens - 1
    eos = service.tokenizer.eos_token_ids[0]
    body = {"prompt": "A", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    for token, fields, count, reason in (
        (eos, {}, 20, "length"),
        (last, {"stop_token_ids": [last - 1]}, 20, "length"),
        (last, {"stop_token_ids": [last]}, 1, "stop"),
        (last, {"stop_token_ids": [last], "min_tokens": 5}, 6, "stop"),
    ):
        asked = body | {"logit_bias": {str(token): 100}, **fields}
        answer = await service.answer(COMPLETION, **asked)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (count, reason)
