"""An answer that is cut anywhere goes on in another engine as if nothing had happened."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.answer import Answer, Made
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import InvalidRequestError
from nanoengine.outputs import Delta, TokenLogprob
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar
from nanoengine.text.tokenizer import Tokenizer, load_tokenizer
from nanoengine.weights.sources import resolve_model
from tests.engine.structured_cases import write_tiny_llm

PROMPT = "the quick brown fox says hello to the lazy dog, and the dog says"
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 3},
    "penalties": SEEDED | {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.6},
    "min_tokens": SEEDED | {"min_tokens": 20, "logit_bias": {2: 4.0}},
    "logprobs": SEEDED | {"logprobs": 3},
    "ids only": SEEDED | {"detokenize": False},
    "allowed": SEEDED | {"allowed_token_ids": tuple(range(40, 90))},
    "bad words": SEEDED | {"bad_words": ("the", "he", "qu")},
    "regex": SEEDED | {"structured": Grammar("regex", "[a-z ]{10,40}")},
    "json": SEEDED | {"structured": Grammar("json_schema", '{"type": "object", "required": ["a", "b"], "properties":'
                      ' {"a": {"enum": ["hello", "quick"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},'
                      ' "additionalProperties": false}'), "max_tokens": 40},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def build(folder: Path) -> Engine:
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        num_blocks=512,
        max_num_seqs=64,
        max_model_len=64,
    )
    return Engine(config, tokenizer.eos_token_ids, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Engine, Engine]:
    """The one that is lost, and the other one."""
    return build(folder), build(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(folder)))


KEYS = itertools.count()
Asked = tuple[list[int], SamplingParams, int]  # tokens, parameters, how many of the tokens are of the answer


def run(engine: Engine, tokenizer: Tokenizer, requests: list[Asked]) -> list[list[Delta]]:
    """What each stream gives to a client that is fast: a delta a token. All of them at once."""
    keys = [next(KEYS) for _ in requests]
    answers: dict[int, Answer] = {}
    deltas: dict[int, list[Delta]] = {key: [] for key in keys}
    for key, (tokens, params, generated) in zip(keys, requests, strict=True):
        engine.add(key, np.array(tokens, np.int32), params, generated=generated)
        answers[key] = Answer(tokenizer, params, tokens, generated)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        for _, error in output.refused:
            raise error
        made: dict[int, Made] = defaultdict(Made)
        for key, cached in output.started:
            answers[key].cached_tokens = cached
        for key, scores in output.scores:
            made[key].scores.append(scores)
        for index, (key, token) in enumerate(zip(output.keys.tolist(), output.tokens.tolist(), strict=True)):
            made[key].tokens.append(token)
            if index in output.logprobs:
                made[key].logprobs.append(output.logprobs[index])
        for end in output.finished:
            made[end.key].finish_reason, made[end.key].stop_token = end.reason, end.stop_token
        for key, one in made.items():
            delta = answers[key].take(one)
            deltas[key].append(delta)
            if delta.finish_reason is not None:
                engine.abort(key)  # unknown by now, unless a stop string ended it
    engine.check()
    return [deltas[key] for key in keys]


def summary(deltas: list[Delta]) -> tuple[tuple[Any, ...], list[float]]:
    """What has to be equal, and the log-probabilities, which may round otherwise."""
    last = deltas[-1]
    logprobs: list[TokenLogprob] = [one for delta in deltas for one in delta.logprobs or ()]
    ids = [token for delta in deltas for token in delta.token_ids]
    scores = [one for delta in deltas for one in delta.prompt_scores]
    numbers = [number for one in logprobs for number in (one.logprob, *(p for _, p in one.top))]
    named = [(one.token_id, *(i for i, _ in one.top)) for one in logprobs]
    counts = (last.prompt_tokens, last.completion_tokens, last.finish_reason, last.stop_reason)
    return (ids, "".join(delta.text for delta in deltas), counts, named, scores), numbers


def check_every_cut(engines: tuple[Engine, Engine], tokenizer: Tokenizer, params: SamplingParams) -> list[Delta]:
    """Cut after every token; the end has to be the same. Returns the answer."""
    prompt = tokenizer.encode(PROMPT)
    (whole,) = run(engines[0], tokenizer, [(prompt, params, 0)])
    expected, logprobs = summary(whole)
    cuts = range(1, len(whole))
    so_far = [[token for delta in whole[:cut] for token in delta.token_ids] for cut in cuts]
    ends = run(engines[1], tokenizer, [(prompt + tokens, params, len(tokens)) for tokens in so_far])
    for cut, end in zip(cuts, ends, strict=True):
        found, numbers = summary(whole[:cut] + end)
        assert found == expected, f"cut after {cut} of {len(whole)} tokens"
        assert numbers == pytest.approx(logprobs, abs=1e-4)
        assert 0 <= end[0].cached_tokens <= len(prompt)
    return whole


@pytest.mark.parametrize("case", CASES)
def test_an_answer_cut_at_any_token_ends_as_it_would_have(
    engines: tuple[Engine, Engine], tokenizer: Tokenizer, case: str
) -> None:
    params = SamplingParams(**{"max_tokens": 30, **CASES[case]})
    whole = check_every_cut(engines, tokenizer, params)
    assert len(whole) > 5, "too short to be cut"


def test_stop_strings_are_found_across_the_cut(engines: tuple[Engine, Engine], tokenizer: Tokenizer) -> None:
    """What was held back as the beginning of one is decided in the other engine."""
    params = SamplingParams(max_tokens=30, allowed_token_ids=tuple(range(40, 90)), **SEEDED)  # a letter each
    (deltas,) = run(engines[0], tokenizer, [(tokenizer.encode(PROMPT), params, 0)])
    text = "".join(delta.text for delta in deltas)
    stop, nearly = text[15:19], text[4:9] + "\0"  # the second is begun, and is none
    for include in (False, True):
        wanted = replace(params, stop=(stop, nearly), include_stop_str_in_output=include)
        whole = check_every_cut(engines, tokenizer, wanted)
        assert whole[-1].stop_reason == stop
        assert [d.text for d in whole[:-1]] != [d.text for d in deltas[: len(whole) - 1]], "some text was held back"


def test_scores_of_the_prompt_are_given_once(engines: tuple[Engine, Engine], tokenizer: Tokenizer) -> None:
    whole = check_every_cut(engines, tokenizer, SamplingParams(max_tokens=8, prompt_logprobs=2, **SEEDED))
    assert whole[0].prompt_scores


def test_an_answer_to_the_end_of_the_context(engines: tuple[Engine, Engine], tokenizer: Tokenizer) -> None:
    whole = check_every_cut(engines, tokenizer, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
    assert whole[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        ([5] * 4, SamplingParams(max_tokens=4)),  # it was complete
        ([10**6], SamplingParams()),
        ([-1], SamplingParams()),
        ([5] * 300, SamplingParams(max_tokens=None)),
        ([5, 5], SamplingParams(structured=Grammar("regex", "[0-9]+"))),
    ],
)
def test_what_no_engine_can_have_answered_is_refused(
    engines: tuple[Engine, Engine], tokenizer: Tokenizer, answer: list[int], params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequestError):
        run(engines[0], tokenizer, [(tokenizer.encode(PROMPT) + answer, params, len(answer))])
    engines[0].check()
    assert not len(engines[0]._constraints)
