"""Reported faults of other engines, each as a test of ours: preemption, shared prefixes, pools that are too small."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import ContextLengthError
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling.params import SamplingParams
from tests.engine.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, **settings: Any) -> Engine:
    fixed = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1, "watermark": 0.0}
    return Engine(EngineConfig.model_validate({**fixed, "num_blocks": 256, "block_size": 4, **settings}))


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


class Run:
    """Requests of one engine, by key."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}

    def add(self, prompt: list[int], params: SamplingParams = GREEDY) -> int:
        key = len(self.tokens)
        self.tokens[key], self.logprobs[key] = [], []
        self.engine.add(key, np.array(prompt, np.int32), params)
        return key

    def step(self) -> None:
        if output := self.engine.step():
            self.cached.update(output.started)
            for i, (key, token) in enumerate(zip(output.keys.tolist(), output.tokens.tolist(), strict=True)):
                self.tokens[key].append(token)
                if i in output.logprobs:
                    self.logprobs[key].append(output.logprobs[i])
            self.reasons.update((end.key, end.reason) for end in output.finished)
        self.engine.check()

    def until_idle(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail("no end")

    def answer(self, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
        key = self.add(prompt, params)
        self.until_idle()
        return self.tokens[key]


def alone(folder: Path, prompt: list[int], params: SamplingParams = GREEDY, **settings: Any) -> Run:
    run = Run(build(folder, enable_prefix_caching=False, **settings))
    run.answer(prompt, params)
    return run


@pytest.mark.parametrize("chunk", [None, 3])
def test_readmitted_with_prefix_hits(folder: Path, chunk: int | None) -> None:
    """Case C02."""
    run, shared = Run(build(folder, num_blocks=24, max_num_seqs=16, max_prefill_chunk=chunk)), ids(9)
    prompts = [shared + ids(3, seed) for seed in range(1, 17)]
    for prompt in prompts:
        run.add(prompt)
    run.until_idle()
    assert run.engine.load().preemptions > 0
    for key, prompt in enumerate(prompts):
        assert run.tokens[key] == alone(folder, prompt).tokens[0]


@pytest.mark.parametrize("length", range(5, 19))
def test_preempted_at_every_length(folder: Path, length: int) -> None:
    """Cases C03 and C04: no token twice or lost, and the sampler goes on where it was."""
    sampled = SamplingParams(
        temperature=0.9,
        seed=11,
        frequency_penalty=0.8,
        repetition_penalty=1.2,
        min_tokens=20,
        max_tokens=58,
        logprobs=1,
    )
    requests = [(ids(length), GREEDY), (ids(length + 3, 1), sampled), (ids(9, 2), replace(sampled, seed=None))]
    requests = [(prompt, replace(params, max_tokens=58, ignore_eos=True)) for prompt, params in requests]
    run = Run(build(folder, num_blocks=12, block_size=8, max_num_seqs=3))
    for prompt, params in requests:
        run.add(prompt, params)
    run.until_idle()
    assert run.engine.load().preemptions > 0
    for key, (prompt, params) in enumerate(requests[:2]):
        expected = alone(folder, prompt, params, block_size=8)
        assert run.tokens[key] == expected.tokens[0]
        assert len(run.tokens[key]) == 58
        found = [(entry.token_id, entry.logprob) for entry in run.logprobs[key]]
        assert [token for token, _ in found] == [entry.token_id for entry in expected.logprobs[0]]
        np.testing.assert_allclose([p for _, p in found], [e.logprob for e in expected.logprobs[0]], atol=1e-4)


@pytest.mark.parametrize("abort_after", [None, 1, 2])
def test_prompts_that_are_equal_and_under_way(folder: Path, abort_after: int | None) -> None:
    """Case C06: nobody reads a block before it was computed, and who leaves takes no other's with him."""
    run = Run(build(folder, max_num_batched_tokens=8, max_num_seqs=8, num_blocks=64))
    whole = ids(14)
    prompts = [whole] * 4 + [whole[:8] + ids(6, seed) for seed in (1, 2)]
    keys = [run.add(prompt) for prompt in prompts]
    for _ in range(abort_after or 0):
        run.step()
    if abort_after is not None:
        run.engine.abort(keys[0])
    run.until_idle()
    for key in keys[0 if abort_after is None else 1 :]:
        assert run.tokens[key] == alone(folder, prompts[key]).tokens[0]
    for seed in range(20, 30):  # evict everything
        run.answer(ids(30, seed))
    assert run.answer(whole) == run.tokens[keys[1]]


def test_an_abort_before_there_was_room(folder: Path) -> None:
    """Case C12: a prefix that is there, and no room for the rest, again and again."""
    run, prefix = Run(build(folder, num_blocks=24, max_num_seqs=4)), ids(16)
    run.answer(prefix)
    waiting = prefix + ids(40, 3)
    for turn in range(10):
        for seed in (1, 2):
            run.add(prefix + ids(20, 10 * turn + seed), replace(GREEDY, max_tokens=12))
        run.step()
        run.step()
        for _ in range(8):
            key = run.add(waiting, replace(GREEDY, max_tokens=1))
            run.step()  # which also checks each reference count against its owners
            assert run.engine.load().waiting == 1
            run.engine.abort(key)
            run.engine.check()
        run.until_idle()
    key = run.add(waiting)
    run.until_idle()
    assert run.tokens[key] == alone(folder, waiting).tokens[0]


def test_what_never_fits_is_refused_and_what_does_ends(folder: Path) -> None:
    """Case C14: a pool of 96 tokens; the longest request is what it holds, and a small one behind each is served."""
    run = Run(build(folder, num_blocks=24, max_num_seqs=4))
    assert run.engine.info.max_model_len == 96, "never more than one sequence alone can hold"
    for length, tokens in ((97, 1), (96, 1), (90, 60)):
        with pytest.raises(ContextLengthError):
            run.engine.add(1000, np.array(ids(length), np.int32), replace(GREEDY, max_tokens=tokens))
    for length, tokens in ((95, 1), (93, 3), (90, None)):
        big = run.add(ids(length), replace(GREEDY, max_tokens=tokens))
        small = run.add(ids(3, 1), replace(GREEDY, max_tokens=2))
        run.until_idle()
        assert (run.reasons[big], len(run.tokens[big])) == ("length", tokens or 6)
        assert len(run.tokens[small]) == 2


def test_a_long_prompt_lets_others_pass(folder: Path) -> None:
    """Case C16, where a prompt's chunk is less than the budget: who decodes has a token a step, and who comes later
    starts beside the long prompt."""
    run = Run(build(folder, max_num_batched_tokens=16, max_prefill_chunk=3, max_num_seqs=8))
    decoding = run.add(ids(4), replace(GREEDY, max_tokens=200))
    run.step()
    long = run.add(ids(192, 1), replace(GREEDY, max_tokens=1))
    run.step()
    short = run.add(ids(8, 2), replace(GREEDY, max_tokens=4))
    before = len(run.tokens[decoding])
    for steps in itertools.count(1):
        run.step()
        assert len(run.tokens[decoding]) == before + steps
        if run.tokens[short]:
            break
    assert steps <= 4
    assert not run.tokens[long]
    for seed in range(3, 30):
        run.add(ids(8, seed), replace(GREEDY, max_tokens=4))
        run.step()
    run.until_idle()
    assert len(run.tokens[long]) == 1


def test_a_request_says_the_same_alone_and_in_company(folder: Path) -> None:
    """Case C18, on a CPU in float32; at other types a difference has to be a near tie."""
    prompt, params = ids(20), replace(GREEDY, max_tokens=100)
    expected = alone(folder, prompt, params).tokens[0]
    for company, chunk in itertools.product((0, 7, 31), (None, 5)):
        run = Run(build(folder, max_num_seqs=32, max_prefill_chunk=chunk, num_blocks=1024))
        for _warm in range(2):
            key = run.add(prompt, params)
            for seed in range(1, company + 1):
                run.add(ids(3 + seed % 17, seed))
            run.until_idle()
            assert run.tokens[key] == expected


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
def test_types_on_a_cpu(tmp_path: Path, saved: str) -> None:
    """Case C34: whatever a checkpoint is saved in and served in, log-probabilities are those of float32 to 0.1."""
    import torch
    import transformers

    folder = write_tiny_model(tmp_path, initializer_range=0.1)
    if saved != "float32":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, saved))
        model.save_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = ids(40)

    def scores(dtype: str) -> np.ndarray:
        engine, found = build(folder, dtype=dtype), []
        engine.add(0, np.array(prompt, np.int32), params)
        while engine.has_work:
            if output := engine.step():
                found += [np.frombuffer(some.logprobs, np.float32) for _, some in output.scores]
        return np.concatenate(found)

    exact = scores("float32")
    for dtype in ("auto", "bfloat16"):
        assert np.abs(scores(dtype) - exact).max() < 0.1
