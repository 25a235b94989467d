"""SamplingParams: what is accepted, and that everything else is a typed error which names its field."""

from __future__ import annotations

import math

import msgspec
import pytest

from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar

GOOD = {
    "temperature": [0, 0.0, 1, 5e-324, 100],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 1, 0.5],
    "repetition_penalty": [1e-3, 1, 100],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2.0, 2.0],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "min_tokens": [0, 16],
    "stop": [(), [], None, "x", ["a", "b"], ("\U0001f600",), ["x" * 1024] * 64],
    "stop_token_ids": [(), None, [0, 5], list(range(64))],
    "logprobs": [None, 0, 20],
    "ignore_eos": [True, False],
    "logit_bias": [None, {}, {0: -100, 5: 100.0}, dict.fromkeys(range(1024), 1)],
    "allowed_token_ids": [(), None, [0, 5], list(range(1 << 16))],
    "bad_words": [(), None, ["x", " two words"], ["x" * 256] * 128],
    "structured": [None, Grammar("json_object"), Grammar("regex", "a+"), Grammar("choice", '["a"]')],
}

NUMBERS = ["1", None, True, math.nan, math.inf, -math.inf, [1], 1j]
BAD = {
    "temperature": [-0.1, 100.1, *NUMBERS],
    "top_k": [-2, 2**31, 10**30, 1.0, "1", None, True],
    "top_p": [0, -0.1, 1.1, *NUMBERS[:2], *NUMBERS[3:]],
    "min_p": [-0.1, 1.1, *NUMBERS],
    "repetition_penalty": [0, -1, 101, *NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NUMBERS],
    "seed": [2**64, -(2**63) - 1, 1.0, "1", True],
    "max_tokens": [0, -1, 2**31, 1.0, "1", True],
    "min_tokens": [-1, 17, 10**30, 1.0, None, True],
    "stop": ["", [""], [1], [None], 5, {"a": 1}, ["\ud800"], ["x" * 1025], ["x"] * 65],
    "stop_token_ids": [[-1], [None], ["1"], [1.0], [True], [2**31], 5, "12", list(range(65))],
    "logprobs": [-1, 21, 1.0, "1", True],
    "ignore_eos": [None, 1, "true"],
    "include_stop_str_in_output": [None, 0],
    "skip_special_tokens": [None, 0],
    "detokenize": [None, 0],
    "logit_bias": [[5], {5: 101}, {5: -100.1}, {-1: 1}, {"5": 1}, {5: math.nan}, {5: None}, {5: True}, {2**31: 1},
                   dict.fromkeys(range(1025), 1)],
    "allowed_token_ids": [[-1], [None], ["1"], [True], 5, list(range((1 << 16) + 1))],
    "bad_words": ["x", [""], [" "], [1], ["x" * 257], ["x"] * 129, ["\ud800"]],
    "structured": ["json", {"kind": "regex", "text": "a"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_accepted_and_sent_on_unchanged(name, value):
    params = SamplingParams(**{name: value})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=lambda v: repr(v)[:30]
)
def test_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name} must be") as error:
        SamplingParams(**{name: value})
    assert (error.value.param, error.value.code) == (name, "invalid_value")
    assert len(error.value.message) < 250


def test_stops_become_tuples():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequestError, match="stop must be empty when detokenize is off"):
        SamplingParams(stop="x", detokenize=False)
    assert not SamplingParams(detokenize=False).detokenize


def test_min_tokens_may_exceed_the_default_only_with_max_tokens():
    assert SamplingParams(min_tokens=40, max_tokens=None).min_tokens == 40
    assert SamplingParams(min_tokens=40, max_tokens=40).min_tokens == 40
    with pytest.raises(InvalidRequestError, match=r"at most max_tokens \(16\)"):
        SamplingParams(min_tokens=40)


def test_greedy():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=5e-324).greedy
