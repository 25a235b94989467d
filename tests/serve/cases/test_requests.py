"""What clients send and others have got wrong: faults that users of other servers have reported, over real HTTP."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.engine.test_equality import generate
from tests.serve.cases.http import CHAT, COMPLETION, PATHS, Http, asking, strict, text_of
from tests.serve.live import Server
from tests.serve.test_api import envelope

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": "{}"}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
def test_no_usage_event_unless_asked_for(tiny: Http, path: str, options: dict[str, Any]) -> None:
    """Case A02."""
    stream = tiny.stream(path, max_tokens=3, **asking(path, "hi"), **options)
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in stream.events)
    assert stream.done


NULLS: dict[str, list[str]] = {
    CHAT: ["max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"],
    COMPLETION: ["suffix", "echo", "best_of"],
}
BOTH = [
    *("top_p", "n", "stop", "seed", "logit_bias", "logprobs", "presence_penalty", "frequency_penalty", "stream"),
    *("response_format", "stream_options", "user", "metadata", "top_k", "min_p", "repetition_penalty", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "priority", "cache_salt", "bad_words", "allowed_token_ids"),
]


@pytest.mark.parametrize("path", PATHS)
def test_null_is_absent(tiny: Http, path: str) -> None:
    """Case A04."""
    body = {"max_tokens": 4, "temperature": 0, **asking(path, "hi")}
    plain = tiny.answer(path, **body)
    fields = BOTH + NULLS[path]
    for nulls in (fields, *([field] for field in fields)):
        answer = tiny.answer(path, **body, **dict.fromkeys(nulls))
        assert (answer["choices"], answer["usage"]["completion_tokens"]) == (plain["choices"], 4), nulls


def test_top_p_at_its_edges(tiny: Http) -> None:
    """Case A06."""
    body: dict[str, Any] = {"prompt": "A B C", "max_tokens": 8}
    for top_p in (0, 1.01, -0.5):
        assert envelope(tiny.post(COMPLETION, top_p=top_p, **body), 400)["param"] == "top_p"
    greedy = tiny.text(COMPLETION, temperature=0, **body)
    assert tiny.text(COMPLETION, temperature=1, top_p=1e-9, **body) == greedy


def test_no_likeliest_tokens_is_not_no_log_probabilities(tiny: Http, tiny_server: Server) -> None:
    """Case A08, of an answer in ASCII."""
    letters = tiny_server.engines.tokenizer.encode("abcdefgh", add_special_tokens=False)
    body = {"prompt": "A B", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "allowed_token_ids": letters}
    for top in (0, 2):
        (choice,) = tiny.answer(COMPLETION, logprobs=top, **body)["choices"]
        found = choice["logprobs"]
        assert {key: len(values) for key, values in found.items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 3
        )
        assert all(len(each) == top for each in found["top_logprobs"])
        assert "".join(found["tokens"]) == choice["text"]
        assert found["text_offset"][0] == 0
        assert found["text_offset"] == sorted(found["text_offset"])
    assert tiny.answer(COMPLETION, logprobs=None, **body)["choices"][0]["logprobs"] is None


def test_stop_token_ids_outside_the_vocabulary(tiny: Http, tiny_server: Server) -> None:
    """Case A16: they would be an index into a row of logits, and a neighbour's row is next to it."""
    long = {"prompt": "once", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    alone = tiny.text(COMPLETION, **long)
    victim: list[str] = []
    thread = threading.Thread(target=lambda: victim.append(tiny.stream(COMPLETION, **long).text))
    thread.start()
    size = tiny_server.engines.engine.info.vocab_size
    for ids in ([size], [-1], [2**31], [2**40], [None], [1.5], ["3"]):
        response = tiny.post(COMPLETION, prompt="A", max_tokens=6, min_tokens=3, stop_token_ids=ids)
        assert envelope(response, 400)["param"] == "stop_token_ids"
    padding = {"stop_token_ids": [size - 1], "min_tokens": 3}  # a row of the logits, though no token
    assert tiny.post(COMPLETION, prompt="A", max_tokens=6, **padding).status_code == 200
    thread.join()
    assert victim == [alone]


def test_an_assistant_turn_without_content(tiny: Http) -> None:
    """Case A18."""
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [
            {"role": "user", "content": "number?"},
            {"role": "assistant", "tool_calls": [CALL], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "17"},
        ]
        tokens = tiny.client.post("/tokenize", json={"model": "m", "messages": messages}).json()
        usage = tiny.answer(CHAT, messages=messages, max_tokens=4)["usage"]
        assert usage["prompt_tokens"] == tokens["count"]
        prompts.append(rendered(tiny, messages))
    assert prompts[0] == prompts[1] == prompts[2]
    assert "assistant" in prompts[0]
    assert "17" in prompts[0]
    assert "None" not in prompts[0]
    assert "null" not in prompts[0]


def rendered(tiny: Http, messages: list[dict[str, Any]]) -> str:
    """The prompt that a conversation becomes."""
    tokens = tiny.client.post("/tokenize", json={"model": "m", "messages": messages}).json()["tokens"]
    return str(tiny.client.post("/detokenize", json={"model": "m", "tokens": tokens}).json()["prompt"])


def test_content_in_parts(tiny: Http) -> None:
    """Case A20."""

    def user(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    alpha, beta = {"type": "text", "text": "ALPHA"}, {"type": "text", "text": "BETA"}
    both, one, plain = rendered(tiny, user([alpha, beta])), rendered(tiny, user([alpha])), rendered(tiny, user("ALPHA"))
    assert one == plain
    assert "ALPHA\nBETA" in both
    counts = [
        tiny.answer(CHAT, messages=user(content), max_tokens=1)["usage"]["prompt_tokens"]
        for content in ([alpha, beta], [alpha], "ALPHA")
    ]
    assert counts[0] > counts[1] == counts[2]
    for part in ({"type": "image_url", "image_url": {"url": "data:,x"}}, {"type": "input_audio"}, {}, 5):
        assert envelope(tiny.post(CHAT, messages=user([part])), 400)["param"] == "messages"


def test_empty_lists_of_tools_are_none(tiny: Http) -> None:
    """Case A22, of a model without tools; test_tools.py has it of one that takes them."""
    plain = tiny.answer(CHAT, messages=MESSAGES, max_tokens=2)
    answer = tiny.answer(CHAT, messages=MESSAGES, max_tokens=2, tools=[])
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    echoed = [*MESSAGES, {"role": "assistant", "content": "b", "tool_calls": []}, {"role": "user", "content": "c"}]
    for each in (answer, tiny.answer(CHAT, messages=echoed, max_tokens=2)):
        assert each["choices"][0]["message"].get("tool_calls") is None


def test_every_error_is_in_the_envelope(tiny: Http) -> None:
    """Case A25."""
    for body, param in (
        ({"messages": "hello there"}, "messages"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "temperature": 5}, "temperature"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": MESSAGES, "nonsense": {"a": [1]}}, "nonsense"),
    ):
        error = envelope(tiny.post(CHAT, **body), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert envelope(tiny.client.post(CHAT, content=b"{"), 400)["param"] is None
    envelope(tiny.client.get("/v1/nope"), 404)
    envelope(tiny.client.get(CHAT), 405)
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="m", messages=[], temperature=5)
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="x", messages=MESSAGES)  # type: ignore[arg-type]
    for caught in (bad, missing):
        assert isinstance(caught.value.body, dict)
        assert isinstance(caught.value.param, str)


def test_a_wrong_name_is_found_nowhere(tiny: Http) -> None:
    """Case A26."""
    for path, body in (
        (CHAT, {"messages": MESSAGES}),
        (COMPLETION, {"prompt": "A", "max_tokens": 1}),
        ("/v1/responses", {"input": "A"}),
        ("/v1/embeddings", {"input": "A"}),
        ("/tokenize", {"prompt": "A"}),
        ("/detokenize", {"tokens": [65]}),
    ):
        error = envelope(tiny.post(path, **body | {"model": "x"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    envelope(tiny.client.get("/v1/models/x"), 404)
    model = tiny.client.get("/v1/models/m").json()
    assert (model["id"], model["object"], type(model["created"])) == ("m", "model", int)
    assert isinstance(model["owned_by"], str)
    assert envelope(tiny.client.post(CHAT, json={"messages": MESSAGES}), 400)["param"] == "model"
    assert tiny.answer(CHAT, messages=MESSAGES, max_tokens=1)["model"] == "m"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_longer_than_the_context(tiny: Http, tiny_server: Server, stream: bool) -> None:
    """Case A30: decided before the first header goes out; without a max_tokens, the context is filled."""
    longest = tiny_server.engines.engine.info.max_model_len
    for length, most in ((longest + 1, 1), (longest - 3, 10), (longest, 1), (longest, None)):
        limit = {} if most is None else {"max_tokens": most}
        error = envelope(tiny.post(COMPLETION, prompt=[65] * length, stream=stream, **limit), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(longest) in error["message"]
    fits = {"prompt": [65] * (longest - 3), "ignore_eos": True}
    if stream:
        streamed = tiny.stream(COMPLETION, stream_options={"include_usage": True}, **fits)
        usage = streamed.usage
        assert streamed.finish_reason == "length"
    else:
        answer = tiny.answer(COMPLETION, **fits)
        usage = answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length"
    assert (usage["completion_tokens"], usage["total_tokens"]) == (3, longest)


def test_request_ids_are_no_keys(tiny: Http) -> None:
    """Case A32; test_service.py has the header, which Serve's HTTP server gives back."""
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "request_id": "same"}
    alone = [tiny.text(COMPLETION, prompt=prompt, **body) for prompt in ("one", "two")]
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        response = tiny.client.post(
            COMPLETION, json={"model": "m", "prompt": prompt, **body}, headers={"x-request-id": "same"}
        )
        found[prompt] = text_of(strict(response.text))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found["one"], found["two"]] == alone
    short = {"prompt": "A", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    plain = tiny.text(COMPLETION, **short)
    for field in ("request_id", "user", "prompt_cache_key", "safety_identifier"):
        for strange in ("x" * (1 << 20), "a\r\nb: c", "%0d%0ab: c", "\x00", ""):
            response = tiny.post(COMPLETION, **short, **{field: strange})
            assert text_of(strict(response.text)) == plain
            assert "b" not in response.headers
            events = tiny.stream(COMPLETION, **short, **{field: strange}).events
            assert len(events) == 4
            assert len(str(events)) < 4000, "what a client calls itself is repeated in no event"


def test_presence_and_frequency_do_not_see_the_prompt(tiny: Http) -> None:
    """Case A34; test_sampler.py has the arithmetic."""
    prompt = "the the the the"
    plain = tiny.text(COMPLETION, prompt=prompt, max_tokens=1, temperature=0)
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert tiny.text(COMPLETION, prompt=prompt, max_tokens=1, temperature=0, **fields) == plain
    repeated = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert tiny.text(COMPLETION, **repeated, frequency_penalty=2) != tiny.text(COMPLETION, **repeated)


def test_top_k_at_its_edges(tiny: Http) -> None:
    """Case C20, all at once."""
    base = {"prompt": "A", "max_tokens": 8, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [{"top_k": 12345678}, {"top_k": 0}, {"top_k": -1}, {}]
    bodies += [{"top_k": 1}, {"temperature": 0}, {"min_p": 1.0}]
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        texts[index] = tiny.text(COMPLETION, **base | bodies[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({texts[i] for i in range(4)}) == len({texts[i] for i in range(4, 7)}) == 1
    assert texts[0] != texts[4]
    assert envelope(tiny.post(COMPLETION, **base | {"top_k": -7}), 400)["param"] == "top_k"


def test_http_says_what_the_engine_says(tiny: Http, tiny_server: Server) -> None:
    """Nothing between client and engine changes a token: ids in, text out, on both routes of the same prompt."""
    engine, tokenizer = tiny_server.engines.engine, tiny_server.engines.tokenizer
    ids = tiny.client.post("/tokenize", json={"model": "m", "messages": MESSAGES}).json()["tokens"]
    (expected,) = generate(engine, [ids], 30, first_key=1 << 40)
    body = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    assert tiny.text(CHAT, messages=MESSAGES, **body) == tokenizer.decode(expected)
    assert tiny.text(COMPLETION, prompt=ids, **body) == tokenizer.decode(expected)


def test_who_asks_for_everything_neutral_gets_it(tiny: Http) -> None:
    """Case C28, with test_sampling_defaults.py: nothing is left on that would make answers alike."""
    neutral = {"temperature": 1.4, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    texts = {tiny.text(COMPLETION, prompt="A", max_tokens=8, **neutral) for _ in range(10)}
    assert len(texts) > 1
    assert tiny.client.get("/v1/models/m").json()["sampling_defaults"] == {}
