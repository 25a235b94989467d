"""Answers that are known token by token, over HTTP: stops, ends, characters cut in two, special tokens, penalties.

The engine is ours, but for a runner that says what it is told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.runner.synthetic import SyntheticRunner, _Hash
from nanoengine.scheduling.step import IntArray, Step
from tests.serve.live import CHAT, COMPLETION, MESSAGES, Live, serving
from tests.serve.tiny_engine import TinyEngines

MAX_LEN = 256


class ScriptedRunner(SyntheticRunner):
    """Token i of every answer is ``script[i]``, and then its last."""

    script: Sequence[int] = (65,)

    def launch(self, step: Step) -> Any:
        if not hasattr(self, "_begins"):
            self._begins: dict[int, int] = {}
        self._begins.update((admission.slot, len(admission.prompt)) for admission in step.admissions)
        begins = [self._begins[slot] for slot in step.slots.tolist()]
        self._next = (step.starts + step.counts - begins).tolist()
        return super().launch(step)

    def token(self, digest: _Hash) -> IntArray:
        return np.array([self.script[max(0, min(i, len(self.script) - 1))] for i in self._next], np.int32)


class Scripted:
    def __init__(self, live: Live, engines: TinyEngines, runner: ScriptedRunner) -> None:
        self.live, self.tokenizer, self._runner = live, engines.tokenizer, runner
        self.eos = engines.tokenizer.eos_token_ids[0]

    def says(self, text: str, *tokens: int) -> int:
        """How many tokens: those of the text, and ``tokens``."""
        self._runner.script = [*self.tokenizer.encode(text, add_special_tokens=False), *tokens]
        return len(self._runner.script)

    def ask(self, path: str = COMPLETION, **body: Any) -> dict[str, Any]:
        body = {"temperature": 0, **({"messages": MESSAGES} if path == CHAT else {"prompt": "A"}), **body}
        return self.live.both(path, **body)


@pytest.fixture(scope="module")
def served() -> Iterator[Scripted]:
    engines = TinyEngines(Path("synthetic"), synthetic={"step_seconds": 0, "max_model_len": MAX_LEN}, num_blocks=256)
    built = engines.engine._runner
    assert isinstance(built, SyntheticRunner)
    runner = ScriptedRunner(num_slots=16, num_blocks=256, block_size=16, num_tokens=built._num_tokens)
    engines.engine._runner = runner
    with serving(engines, engines.tokenizer) as live:
        yield Scripted(live, engines, runner)
        engines.engine.check()


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer_cut_anywhere(served: Scripted, path: str) -> None:
    """Case B02."""
    text = " ok 🎈🎈 "
    for length in range(1, served.says(text) + 1):
        answer = served.ask(path, max_tokens=length)
        assert answer["text"] == text.encode()[:length].decode("utf-8", "replace")
        assert answer["usage"]["completion_tokens"] == length


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stop_string_across_tokens(served: Scripted, path: str) -> None:
    """Case B06."""
    served.says("ABCDEFG")
    for stop, text in ((["CDE"], "AB"), (["CDX", "DEF"], "ABC"), ("G", "ABCDEF"), (["é", "😊"], "ABCDEFG")):
        answer = served.ask(path, max_tokens=7, stop=stop)
        assert (answer["text"], answer["finish_reason"]) == (text, "length" if text == "ABCDEFG" else "stop")
        assert answer["stop_reason"] == (None if text == "ABCDEFG" else next(s for s in stop if s in "ABCDEFG"))


@pytest.mark.parametrize("end", ["length", "stop"])
def test_what_a_stop_string_begins_with_is_delivered_at_the_end(served: Scripted, end: str) -> None:
    """Case B08."""
    count = served.says("hello zz", served.eos)
    for stop in (["zzz"], ["ZZZZZZZZZZZZ"]):
        answer = served.ask(max_tokens=count - 1 if end == "length" else count + 5, stop=stop)
        assert (answer["text"], answer["finish_reason"]) == ("hello zz", end)


def test_a_long_stop_string_delays_nothing(served: Scripted) -> None:
    """Case B08: each character comes with its token, as it does without the stop."""
    served.says("hello world zz")
    body = {"prompt": "A", "max_tokens": 14, "temperature": 0}
    free = [e["choices"][0]["text"] for e in served.live.stream(COMPLETION, **body)]
    assert [e["choices"][0]["text"] for e in served.live.stream(COMPLETION, stop=["ZZZZZZZZZZZZ"], **body)] == free
    assert all(free)


def test_forms_of_stop(served: Scripted) -> None:
    """Case B10: what is taken is none too many, and what is not is a 400."""
    served.says("wxyz")
    for stop in ([], None, ["a", "b", "c", "d", "e"], ["😊", "é"]):
        assert served.ask(max_tokens=4, stop=stop)["text"] == "wxyz"
    for stop in ("", [""], [1], ["a"] * 17):
        error = served.live.post(COMPLETION, prompt="A", stop=stop)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "stop")
    special = served.tokenizer.token_id("<|im_end|>")
    assert special is not None
    served.says("ab", special, 65)
    answer = served.ask(max_tokens=8, stop=["<|im_end|>"], ignore_eos=True)
    assert (answer["text"], answer["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_special_tokens_do_not_leak(served: Scripted, path: str) -> None:
    """Case B12."""
    start = served.tokenizer.token_id("<|im_start|>")
    assert start is not None
    served.says("ok", served.eos)
    for skip in (True, False):
        assert served.ask(path, max_tokens=9, skip_special_tokens=skip)["text"] == "ok"
    served.says("ok", start, ord("x"), served.eos)
    assert served.ask(path, max_tokens=9)["text"] == "okx"
    assert served.ask(path, max_tokens=9, skip_special_tokens=False)["text"] == "ok<|im_start|>x"
    for skip in (True, False):
        answer = served.ask(path, max_tokens=9, stop_token_ids=[start], skip_special_tokens=skip)
        assert (answer["text"], answer["stop_reason"]) == ("ok", start)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_finish_reasons(served: Scripted, path: str) -> None:
    """Case B14."""
    table: list[tuple[str, bool, dict[str, Any], str]] = [
        ("ab", True, {"max_tokens": 10}, "stop"),
        ("abc", False, {"max_tokens": 3}, "length"),
        ("ab", True, {"max_tokens": 3}, "stop"),  # both at once
        ("abc", False, {"max_tokens": 3, "stop": ["bc"]}, "stop"),
        ("ab", True, {"max_tokens": 10, "ignore_eos": True}, "length"),
    ]
    for text, ends, fields, reason in table:
        served.says(text, *([served.eos] if ends else []))
        assert served.ask(path, **fields)["finish_reason"] == reason
    served.says("a")
    answer = served.ask(COMPLETION, prompt=[65] * (MAX_LEN - 3))  # the default of 16 is more than the context leaves
    assert (answer["finish_reason"], answer["usage"]["total_tokens"]) == ("length", MAX_LEN)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_context(served: Scripted, stream: bool) -> None:
    """Cases A30 and C24: no number of tokens is one too many or too few."""
    served.says("a")
    for length, fields, param in (
        (MAX_LEN + 1, {"max_tokens": 1}, "prompt"),
        (MAX_LEN, {"max_tokens": 1}, "prompt"),
        (MAX_LEN - 3, {"max_tokens": 10}, "max_tokens"),
    ):
        response = served.live.post(COMPLETION, prompt=[65] * length, stream=stream, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        assert str(MAX_LEN) in error["message"]
    for room in (1, 15, 16, 17):
        answer = served.ask(prompt=[65] * (MAX_LEN - room), max_tokens=room, ignore_eos=True)
        assert (answer["usage"]["completion_tokens"], answer["finish_reason"]) == (room, "length")
