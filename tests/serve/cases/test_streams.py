"""Streams and the text in them: the streamed answer is the whole one, whatever ends it, over real HTTP.

The scripted engine's tokens are bytes, so every character and every stop string spans tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from nanoengine.answer import Answer
from tests.engine.test_equality import generate
from tests.serve.cases.http import CHAT, COMPLETION, PATHS, Http, Stream, asking, text_of
from tests.serve.cases.scripted import EOS, IM_END, IM_START, ScriptedEngines
from tests.serve.cluster import eventually
from tests.serve.live import Server
from tests.serve.test_api import envelope
from tests.serve.tiny_engine import TinyEngines


@pytest.fixture
def says(scripted_server: Server) -> Callable[..., str]:
    """Sets what the engine answers; returns the prompt that makes it."""
    engines = scripted_server.engines
    assert isinstance(engines, ScriptedEngines)
    numbers = iter(range(1000))

    def says(*parts: str | int) -> str:
        prompt = f"#{next(numbers)}."
        engines.says(prompt, *parts)
        return prompt

    return says


def both(http: Http, path: str, prompt: str, **body: Any) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens) of an answer, the same streamed and whole."""
    choice = http.both(path, **asking(path, prompt), **body)
    return choice["text"], choice["finish_reason"], choice["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_cut_inside_a_character(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B02: what is left of a character is one U+FFFD; white space stays."""
    script = "  ok 🎈🎈 \n"
    prompt = says(script)
    raw = script.encode()
    for most in range(1, len(raw) + 1):
        text, reason, tokens = both(scripted, path, prompt, max_tokens=most)
        assert text.rstrip("\ufffd") == raw[:most].decode(errors="ignore")
        assert text.count("\ufffd") <= 1
        assert (reason, tokens) == ("length", most)


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_across_tokens(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B06."""
    prompt = says("ABCDEFG")
    assert both(scripted, path, prompt, stop=["CDE"], max_tokens=9) == ("AB", "stop", 5)
    stream = scripted.stream(path, stop=["CDE"], max_tokens=9, **asking(path, prompt))
    assert "C" not in stream.text


def test_a_stop_string_is_found_where_the_text_has_it(tiny: Http) -> None:
    """Case B06, of a model."""
    body = {"prompt": "Counting: 10 11 12", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = tiny.text(COMPLETION, **body)
    for start in range(0, len(plain) - 3, 9):
        stop = plain[start : start + 3]
        if "\ufffd" in stop:
            continue
        asked = body | {"stop": [stop, "never there"]}
        expected = plain[: plain.index(stop)]
        assert tiny.text(COMPLETION, **asked) == tiny.stream(COMPLETION, **asked).text == expected


@pytest.mark.parametrize("path", PATHS)
def test_only_what_may_become_a_stop_string_is_held(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B08."""
    asked = {"max_tokens": 14, **asking(path, says("hello world zz", IM_END))}
    plain = scripted.stream(path, **asked)
    assert plain.texts()[:4] == ["h", "e", "l", "l"]
    assert scripted.stream(path, stop=["ZZZZZZZZZZZZ"], **asked).texts() == plain.texts()
    for most, tail in ((8, "length"), (20, "stop")):
        text, reason, _ = both(scripted, path, says("hello zz", IM_END), stop=["zzz"], max_tokens=most)
        assert (text, reason) == ("hello zz", tail)
    held = scripted.stream(path, stop=["zzz"], **asked)
    assert held.text == plain.text
    assert all(held.texts()[:-1]), "an event that says nothing"


@pytest.mark.parametrize("path", PATHS)
def test_forms_of_stop(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B10: an empty string stops nothing and is refused; a special token's text acts on the token."""
    prompt = says("fine", IM_START, "more", IM_END)
    for bad in ("", [""], ["a", ""], [1], [None], 5, {"a": 1}):
        assert envelope(scripted.post(path, stop=bad, **asking(path, prompt)), 400)["param"] == "stop"
    for good in ([], None, ["a", "b", "c", "d", "é"], ["😊", "é"], "x"):
        assert both(scripted, path, prompt, stop=good, max_tokens=30)[:2] == ("finemore", "stop")
    assert both(scripted, path, prompt, stop="<|im_start|>", max_tokens=30) == ("fine", "stop", 5)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_whose_text_is_held_are_told(scripted: Http, says: Callable[..., str], path: str) -> None:
    """An event that has no text yet may have ids."""
    asked = {**asking(path, says("az🎈zb")), "stop": ["zzz", "🎈x"], "max_tokens": 7, "return_token_ids": True}
    (choice,) = scripted.answer(path, **asked)["choices"]
    streamed = [token for event in scripted.stream(path, **asked).events for token in event["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"] == list("az🎈z".encode())


@pytest.mark.parametrize("path", PATHS)
def test_special_tokens_stay_out_of_the_text(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B12."""
    for script, fields, expected in (
        (("ok", IM_END), {}, "ok"),
        (("ok", EOS), {"skip_special_tokens": False}, "ok"),
        (("ok", IM_START, "x", IM_END), {}, "okx"),
        (("ok", IM_START, "x", IM_END), {"skip_special_tokens": False}, "ok<|im_start|>x"),
        (("ok", IM_START, "x"), {"stop_token_ids": [IM_START], "skip_special_tokens": False}, "ok"),
        (("oks",), {"stop_token_ids": [ord("s")]}, "ok"),
        (("oks",), {"stop_token_ids": [ord("s")], "include_stop_str_in_output": True}, "oks"),
    ):
        text, reason, _ = both(scripted, path, says(*script), max_tokens=20, **fields)
        assert (text, reason) == (expected, "stop"), (script, fields)


@pytest.mark.parametrize("path", PATHS)
def test_what_ended_the_answer(scripted: Http, says: Callable[..., str], path: str) -> None:
    """Case B14."""
    three = says("ab", IM_END, "c")
    for prompt, fields, reason, tokens in (
        (three, {"max_tokens": 10}, "stop", 3),
        (says("abcdef"), {"max_tokens": 3}, "length", 3),
        (three, {"max_tokens": 3}, "stop", 3),
        (says("abc"), {"max_tokens": 3, "stop": "bc"}, "stop", 3),
        (three, {"max_tokens": 10, "ignore_eos": True}, "length", 10),
        (says("ab", EOS, "c"), {"max_tokens": 10}, "stop", 3),
        (three, {"max_tokens": 10, "min_tokens": 5}, "length", 10),
    ):
        assert both(scripted, path, prompt, **fields)[1:] == (reason, tokens), fields
    if path == CHAT:  # completions have a default of 16 tokens; test_what_is_longer_than_the_context has theirs
        whole = scripted.answer(path, **asking(path, says("a" * 999)))
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["total_tokens"] == scripted.client.get("/v1/models/m").json()["max_model_len"]


def test_ends_that_are_ignored(scripted: Http, says: Callable[..., str]) -> None:
    """Case C26: none of the model's ends, but the client's own."""
    prompt = says("abc", IM_END, "def", EOS, "ghik" + "~" * 20)
    assert both(scripted, COMPLETION, prompt, ignore_eos=True, max_tokens=20)[1:] == ("length", 20)
    own = {"stop_token_ids": [ord("k")], "ignore_eos": True, "max_tokens": 20}
    assert both(scripted, COMPLETION, prompt, **own) == ("abcdefghi", "stop", 12)


def test_a_failure_after_the_first_byte(
    scripted: Http, says: Callable[..., str], scripted_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B16: an error event and the end, never a finish reason; others go on. (Of an engine that dies, see
    test_service.py.)"""
    poisoned, victim = says("abcdefgh"), says("x" * 60)
    take = Answer.take

    def failing(answer: Answer, made: Any) -> Any:
        if ord("f") in made.tokens:
            raise RuntimeError("secret")
        return take(answer, made)

    monkeypatch.setattr(Answer, "take", failing)
    found: list[Stream] = []
    other = threading.Thread(target=lambda: found.append(scripted.stream(COMPLETION, prompt=victim, max_tokens=60)))
    other.start()
    stream = scripted.stream(COMPLETION, prompt=poisoned, max_tokens=20)
    other.join()
    assert stream.events[-1]["error"]["type"] == "server_error"
    assert not stream.done
    assert stream.seconds < 2
    assert "secret" not in json.dumps(stream.events)
    assert stream.text
    assert "abcde".startswith(stream.text)
    assert all(choice["finish_reason"] is None for event in stream.events[:-1] for choice in event["choices"])
    assert found[0].text == "x" * 60
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(model="m", prompt=poisoned, max_tokens=20, stream=True)
        with pytest.raises(openai.APIError):
            list(chunks)
    assert envelope(scripted.post(COMPLETION, prompt=poisoned, max_tokens=20), 500)["message"]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave(tiny: Http, tiny_server: Server, stream: bool, n: int) -> None:
    """Case B18: also of an answer that is not streamed, and of all its choices."""
    body = {"prompt": "A", "max_tokens": 1900, "ignore_eos": True, "n": n}

    def leave() -> None:
        if stream:
            tiny.stream(COMPLETION, most=3, **body)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{tiny.url}{COMPLETION}", json={"model": "m", **body}, timeout=0.5)

    threads = [threading.Thread(target=leave) for _ in range(20 // n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine = tiny_server.engines.engine
    eventually(lambda: engine.load().running == engine.load().waiting == engine.load().blocks_used == 0, 2, "the end")
    made = engine.load().generated_tokens
    time.sleep(0.1)
    assert engine.load().generated_tokens == made


def test_a_conversation_goes_on_where_it_was_left(tiny: Http, folder: Any) -> None:
    """Case B20: the abandoned turn leaves nothing in the next one."""
    cold = TinyEngines(folder, enable_prefix_caching=False)
    rng = np.random.default_rng(0)
    conversations = [rng.integers(3, 500, rng.integers(20, 70)).tolist() for _ in range(50)]
    for number, ids in enumerate(conversations):
        abandoned = tiny.stream(COMPLETION, most=5, prompt=ids, max_tokens=200, temperature=0, ignore_eos=True)
        assert len(abandoned.events) == 5
        turn = [*ids, 70, 71, number]
        answer = tiny.answer(COMPLETION, prompt=turn, max_tokens=8, temperature=0, ignore_eos=True)
        (expected,) = generate(cold.engine, [turn], 8, first_key=1000 * number)
        assert text_of(answer) == cold.tokenizer.decoder(turn).push(expected, final=True)


def test_preempted_streams_say_what_free_ones_say(tiny: Http, folder: Path) -> None:
    """Cases C03 and C04, of text: nothing twice, nothing missing, stop strings and log-probabilities as they were."""
    body: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.8, "min_tokens": 20, "max_tokens": 57}
    body |= {"logprobs": 1, "ignore_eos": True, "stream_options": {"include_usage": True}, "stop": ["\x01\x01", "the"]}
    prompts = [list(range(5, 5 + length)) for length in (6, 9, 15, 16)]
    server = Server(TinyEngines(folder, block_size=8, num_blocks=14, max_model_len=80, watermark=0.0))
    found: dict[int, Stream] = {}

    def ask(number: int) -> None:
        found[number] = Http(server.url).stream(COMPLETION, prompt=prompts[number], seed=number, **body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.engines.engine.load().preemptions > 0
    server.alive()
    server.stop()
    for number, prompt in enumerate(prompts):
        free = tiny.stream(COMPLETION, prompt=prompt, seed=number, **body)
        pressed = found[number]
        assert (pressed.text, pressed.finish_reason) == (free.text, free.finish_reason)
        assert pressed.usage["completion_tokens"] == free.usage["completion_tokens"]
        values = [
            [v for e in each.events[:-1] for v in (e["choices"][0]["logprobs"] or {}).get("token_logprobs") or ()]
            for each in (pressed, free)
        ]
        assert len(values[0]) == free.usage["completion_tokens"]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("stop", [None, ["qqqq"], "FOUND"])
def test_streamed_log_probabilities(tiny: Http, stop: Any) -> None:
    """Case B22."""
    body = {"max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    body |= asking(CHAT, "abc")
    plain = tiny.answer(CHAT, **body)
    if stop == "FOUND":
        stop = [text_of(plain)[8:11]]
    body |= {"stop": stop}
    whole = tiny.answer(CHAT, **body)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert content == plain["choices"][0]["logprobs"]["content"][: len(content)]
    events = tiny.stream(CHAT, **body).events
    streamed = [e for event in events for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
