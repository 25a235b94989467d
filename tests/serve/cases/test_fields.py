"""Fields of chat and completions over HTTP, with a real (tiny, random) model: what each does to the answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.serve.cases.http import CHAT, COMPLETION, Http
from tests.serve.live import Server
from tests.serve.test_api import MESSAGES, envelope
from tests.serve.tiny_engine import TinyEngines

BLOCK = 16  # tokens


@pytest.fixture
def engines(tiny_server: Server) -> TinyEngines:
    return tiny_server.engines


@pytest.fixture
def live(tiny: Http, engines: TinyEngines) -> Http:
    engines.engine.reset_prefix_cache()
    return tiny


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, count).tolist()


# -- what comes with the answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(("path", "n"), [(CHAT, 1), (CHAT, 3), (COMPLETION, 2)])
def test_continuous_usage(live: Http, path: str, n: int, include_usage: bool) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": ["A B", "C"]}
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    events = live.stream(path, **asked, n=n, max_tokens=6, seed=3, ignore_eos=True, stream_options=options).events
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(totals)
    assert totals[0] >= 1
    assert totals[-1] == 6 * n * (2 if path == COMPLETION else 1)
    assert all(
        e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + e["usage"]["completion_tokens"] for e in events
    )
    assert (events[-1]["choices"] == []) is include_usage
    if include_usage:
        assert events[-1]["usage"] == events[-2]["usage"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_token_ids(live: Http, engines: TinyEngines, path: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "A B"}
    asked |= {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    whole, events = live.answer(path, **asked), live.stream(path, **asked).events
    choice = whole["choices"][0]
    where = whole if path == CHAT else choice
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert engines.tokenizer.decode(choice["token_ids"]) == text
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    assert len(where["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == choice["token_ids"]
    firsts = events if path == CHAT else [event["choices"][0] for event in events]
    assert [first.get("prompt_token_ids") for first in firsts] == [where["prompt_token_ids"]] + [None] * (
        len(firsts) - 1
    )
    again = live.answer(COMPLETION, prompt=where["prompt_token_ids"], max_tokens=12, temperature=0)
    assert again["choices"][0]["text"] == text


def test_tokens_by_their_ids(live: Http, engines: TinyEngines) -> None:
    body = {"max_tokens": 6, "temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = live.both(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, **body)
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [bytes(entry["bytes"]) for entry in content] == [*map(engines.tokenizer.token_bytes, choice["token_ids"])]
    assert all(top["token"].startswith("token_id:") for entry in content for top in entry["top_logprobs"])
    found = live.both(COMPLETION, prompt="A B", logprobs=2, echo=True, **body)
    ids = found["prompt_token_ids"] + found["token_ids"]
    assert found["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(len(top) == 2 for top in found["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_end_of_a_prompt(live: Http, engines: TinyEngines, path: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "A B C D E"}
    asked |= {"max_tokens": 3, "temperature": 0, "return_token_ids": True}

    def prompt(**fields: Any) -> list[int]:
        whole = live.answer(path, **asked | fields)
        return list((whole if path == CHAT else whole["choices"][0])["prompt_token_ids"])

    full = prompt()
    assert prompt(truncate_prompt_tokens=3) == full[-3:]
    assert prompt(truncate_prompt_tokens=10_000) == prompt(truncate_prompt_tokens=-1) == full
    context = engines.max_model_len
    if path == COMPLETION:
        long = ids(context + 50)
        kept = prompt(prompt=long, truncate_prompt_tokens=-1, max_tokens=1)
        assert kept == long[-(context - 1) :]
        assert envelope(live.post(COMPLETION, prompt=long, max_tokens=1), 400)["code"] == "context_length_exceeded"


def test_the_last_message_is_continued(live: Http, engines: TinyEngines) -> None:
    for content in ("Once", "user", " a \n", "<|im_end|>"):
        turns = [*MESSAGES, {"role": "assistant", "content": content}]
        tokens = live.answer("/tokenize", messages=turns, continue_final_message=True)["tokens"]
        text = engines.tokenizer.decode(tokens, skip_special_tokens=False)
        assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
        asked = {"max_tokens": 6, "temperature": 0}
        continued = live.answer(CHAT, messages=turns, continue_final_message=True, **asked)
        plain = live.answer(COMPLETION, prompt=tokens, **asked)
        assert continued["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_best_of_several(live: Http, logprobs: int | None) -> None:
    asked = {"prompt": ["A B", "C"], "seed": 5, "max_tokens": 8, "temperature": 1.5}
    every = live.answer(COMPLETION, n=6, logprobs=0, **asked)["choices"]
    best = live.answer(COMPLETION, n=2, best_of=6, logprobs=logprobs, **asked)
    for prompt in range(2):
        some = every[6 * prompt : 6 * prompt + 6]
        ranked = sorted(some, key=lambda c: -np.mean(c["logprobs"]["token_logprobs"]))
        found = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [c["text"] for c in found] == [c["text"] for c in ranked[:2]]
        assert all((c["logprobs"] is None) == (logprobs is None) for c in found)
    assert [c["index"] for c in best["choices"]] == [0, 1, 2, 3]
    made = sum(len(c["logprobs"]["tokens"]) for c in every)
    assert best["usage"]["completion_tokens"] == made, "all that was generated counts"


# -- echo and log-probabilities of the prompt --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def scores(reference: Any, tokens: list[int], engines: TinyEngines) -> list[float]:
    logits = reference(torch.tensor([tokens])).logits[0].float()[:-1, : engines.engine.info.num_tokens]
    return logits.log_softmax(1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def test_echo(live: Http, engines: TinyEngines, reference: Any) -> None:
    for prompt in ("A B é😊 C", engines.tokenizer.encode("A B é😊 C", add_special_tokens=False)):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        plain = live.both(COMPLETION, logprobs=2, **body)
        echoed = live.both(COMPLETION, logprobs=2, echo=True, **body)
        assert echoed["text"] == "A B é😊 C" + plain["text"]
        assert echoed["usage"] | {"prompt_tokens_details": None} == plain["usage"] | {"prompt_tokens_details": None}
        assert live.both(COMPLETION, echo=True, **body)["text"] == echoed["text"]
        found, tokens = echoed["logprobs"], plain["prompt_token_ids"] + plain["token_ids"]
        assert {len(values) for values in found.values()} == {len(tokens)}
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        np.testing.assert_allclose(found["token_logprobs"][1:], scores(reference, tokens, engines), atol=1e-3)
        assert all(len(top) == 2 for top in found["top_logprobs"][1:])
        offsets, text = found["text_offset"], echoed["text"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        for token, begin in zip(found["tokens"][: len(plain["prompt_token_ids"])], offsets, strict=False):
            assert text[begin:].startswith(token) or token.startswith("bytes:") or token == "<s>"


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_score(live: Http, engines: TinyEngines, reference: Any, stream: bool) -> None:
    """``max_tokens`` 0 with echo is how evaluations score a text."""
    text = "A B C é😊 D. " * 4
    prompt = engines.tokenizer.encode(text)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True}
    if stream:
        options = {"continuous_usage_stats": True}
        (event,) = live.stream(COMPLETION, logprobs=1, stream_options=options, **body).events
        choice, usage = event["choices"][0], event["usage"]
    else:
        answer = live.answer(COMPLETION, logprobs=1, **body)
        choice, usage = answer["choices"][0], answer["usage"]
        assert live.answer(COMPLETION, **body)["choices"][0] == choice | {"logprobs": None}
    assert choice["finish_reason"] == "length"
    assert choice["text"] == "<s>" + text, "ids are shown as they are"
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(prompt))
    found = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(found[1:], scores(reference, prompt, engines), atol=1e-3)


def test_a_warm_cache_changes_no_score(live: Http, engines: TinyEngines, reference: Any) -> None:
    """Case C10."""
    shared = ids(2 * BLOCK)
    prompts = [shared + ids(BLOCK + 2, seed) for seed in (1, 2)]
    for warm in (False, True):
        for prompt in prompts * 2:
            if warm:
                live.answer(COMPLETION, prompt=prompt, max_tokens=1)
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            echoed = live.answer(COMPLETION, echo=True, logprobs=2, **body)
            assert echoed["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            found = echoed["choices"][0]["logprobs"]["token_logprobs"]
            np.testing.assert_allclose(found[1:-1], scores(reference, prompt, engines), atol=1e-3)
            assert all(value < 0 for value in found[1:])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_prompt_logprobs(live: Http, engines: TinyEngines, reference: Any, path: str, n: int) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "A B é"}
    whole = live.answer(path, max_tokens=2, n=n, prompt_logprobs=2, return_token_ids=True, **asked)
    for choice in whole["choices"]:
        where = whole if path == CHAT else choice
        tokens, found = where["prompt_token_ids"], where["prompt_logprobs"]
        assert found[0] is None
        assert len(found) == len(tokens)
        for token, entry in zip(tokens[1:], found[1:], strict=True):
            assert len(entry) == (2 if entry[str(token)]["rank"] <= 2 else 3)
            assert {1, 2} <= {value["rank"] for value in entry.values()}
            for i, value in entry.items():
                assert value["decoded_token"] == engines.tokenizer.token_bytes(int(i)).decode("utf-8", "replace")
        values = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], found[1:], strict=True)]
        np.testing.assert_allclose(values, scores(reference, tokens, engines), atol=1e-3)


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_of_bytes(live: Http, engines: TinyEngines) -> None:
    """Case B04: tokens that are no text of their own, and alternatives that are spelled alike."""
    body = {"max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
    for seed in range(4):
        choice = live.both(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=20, seed=seed, **body)
        raw = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        text = raw.decode("utf-8", "replace")
        for special in engines.tokenizer.special_ids:
            text = text.replace(engines.tokenizer.token_bytes(special).decode(), "")
        assert text == choice["text"]
        choice = live.both(COMPLETION, prompt="😊😊😊", logprobs=5, echo=True, seed=seed, **body)
        assert all(len(top) == 5 for top in choice["logprobs"]["top_logprobs"][1:])


# -- cached tokens -----------------------------------------------------------------------------------------------------


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens(live: Http, engines: TinyEngines) -> None:
    """Case A36, on every endpoint that has them."""
    prompt = ids(10 * BLOCK)
    changed = [*prompt[: 5 * BLOCK], prompt[5 * BLOCK] + 1, *prompt[5 * BLOCK + 1 :]]
    before = engines.engine.load().prefix_hit_tokens
    found = []
    for tokens in (prompt, prompt, changed):
        answer = live.answer(COMPLETION, prompt=tokens, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        found.append(cached(answer))
    assert found == [0, 9 * BLOCK, 5 * BLOCK]
    assert engines.engine.load().prefix_hit_tokens - before == sum(found)
    options = {"include_usage": True}
    assert cached(live.stream(COMPLETION, prompt=prompt, max_tokens=1, stream_options=options).events[-1]) == 9 * BLOCK
    twice = live.answer(COMPLETION, prompt=[prompt, prompt], max_tokens=1, n=2)
    assert cached(twice) == 2 * 9 * BLOCK, "a prompt counts once, whatever n"
    assert cached(live.answer(COMPLETION, prompt=prompt, max_tokens=1, cache_salt="s")) == 0
    assert cached(live.answer(COMPLETION, prompt=prompt, max_tokens=4, guided_regex="[ab]+")) == 9 * BLOCK
    long = [{"role": "user", "content": "A B C D E F G H" * 8}]
    first = live.answer(CHAT, messages=long, max_tokens=1)
    hits = (first["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert cached(live.answer(CHAT, messages=long, max_tokens=1)) == hits
    answer = live.answer("/v1/responses", input=long, max_output_tokens=1)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == hits
    answer = live.answer("/v1/messages", messages=long, max_tokens=1)
    assert answer["usage"]["cache_read_input_tokens"] == hits


# -- requests that are hard to take ------------------------------------------------------------------------------------


def test_no_value_is_infinite_with_echo(live: Http) -> None:
    """Case A10."""
    body = {"prompt": "A B C", "max_tokens": 2, "temperature": 1, "top_k": 1, "logprobs": 5}
    found = live.both(COMPLETION, echo=True, **body)["logprobs"]["token_logprobs"]
    assert all(math.isfinite(value) for value in found[1:])
