"""Faults at the limits: of the pool, of the context, and of one step, where short and long requests meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from nanoengine.errors import ContextLengthError
from nanoengine.sampling.params import SamplingParams
from tests.engine.cases.run import Run, greedy
from tests.engine.test_equality import Reference
from tests.engine.tiny_models import VOCAB, write_tiny_model


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
    return found


def test_what_the_pool_cannot_hold(folder: Path, reference: Reference) -> None:
    """Case C14: a context beyond the pool is refused at the start, or is the pool's; nobody waits for ever."""
    with pytest.raises(ValueError, match=r"max_model_len \(256\) exceeds what the KV pool holds \(96 tokens\)"):
        Run(folder, block_size=8, num_blocks=12, max_model_len=256)
    run = Run(folder, block_size=8, num_blocks=12)
    for length in (97, 96):
        with pytest.raises(ContextLengthError, match="96 tokens"):
            run.add(tokens(length), greedy(None))
    with pytest.raises(ContextLengthError, match="at most 6 tokens"):
        run.add(tokens(90), greedy(60))
    for length in (95, 90, 11 * 8 + 1):
        big, small = run.add(tokens(length), greedy(None)), run.add(tokens(3, 1), greedy(4))
        run.until_idle()
        assert (len(run.tokens[big]), run.reasons[big]) == (96 - length, "length")
        assert (len(run.tokens[small]), run.reasons[small]) == (4, "length")
    run.check(reference)


@pytest.mark.parametrize("batch", [1, 6])
def test_the_context_is_filled_to_its_end(folder: Path, reference: Reference, batch: int) -> None:
    """Case C24: also where it is no whole number of blocks."""
    limit, size = 61, 8
    run = Run(folder, block_size=size, max_model_len=limit, num_blocks=64)
    for length in (limit - 1, limit - size, limit - size - 1, limit - size + 1):
        for number in run.all([tokens(length, seed) for seed in range(batch)], greedy(None)):
            assert (len(run.tokens[number]), run.reasons[number]) == (limit - length, "length")
    run.check(reference)


CHUNK = 16
BUSY: dict[str, Any] = {"max_num_seqs": 8, "block_size": 4, "num_blocks": 1024, "max_num_batched_tokens": CHUNK}


def synthetic(**settings: Any) -> Run:
    return Run("synthetic", synthetic={"step_seconds": 0, "max_model_len": 2048}, **BUSY | settings)


def test_a_long_prompt_and_those_beside_it() -> None:
    """Case C16, in steps: one that decodes has a token in each, and a short prompt does not wait for the long one."""
    run = synthetic()
    a = run.add(tokens(4), greedy(200))
    run.until(a, 2)
    b = run.add(tokens(64 * CHUNK, 1), greedy(1))
    run.step()
    had, begin = len(run.tokens[a]), run.steps
    c = run.add(tokens(3, 2), greedy(4))
    assert run.until(c, 1) <= 2
    run.until(c, 4)
    assert not run.tokens[b]
    assert len(run.tokens[a]) - had == run.steps - begin
    run.until(b, 1)
    run.engine.abort(a)
    run.until_idle()


def test_short_prompts_do_not_hold_up_a_long_one() -> None:
    """Case C16: under a steady flow of short ones it takes less than twice its time alone."""
    alone = synthetic()
    time_alone = alone.until(alone.add(tokens(64 * CHUNK, 1), greedy(1)), 1)
    run = synthetic()
    b, steps = run.add(tokens(64 * CHUNK, 1), greedy(1)), 0
    while not run.tokens[b]:
        run.add(tokens(4, 100 + steps), greedy(3))
        run.step()
        steps += 1
    assert steps < 2 * time_alone
    run.until_idle()


def test_long_prompts_behind_a_long_one_keep_their_turn() -> None:
    """Only what is short overtakes: of equals the first is served first, at the whole of a step's tokens."""
    run = synthetic()
    first, second = (run.add(tokens(8 * CHUNK, seed), greedy(1)) for seed in (1, 2))
    assert run.until(first, 1) == 8
    assert not run.tokens[second]
    assert run.until(second, 1) == 8
    run.until_idle()


def test_a_request_says_the_same_alone_and_in_company(folder: Path, reference: Reference) -> None:
    """Case C18, on a CPU in float32; with other types a difference has to be a near tie."""
    prompt = tokens(20)
    alone = Run(folder, enable_prefix_caching=False)
    alone.all([prompt], greedy(100))
    alone.check(reference)
    for company, chunk in ((0, None), (7, 5), (31, None), (31, 5)):
        run = Run(folder, block_size=4, max_num_seqs=32, max_prefill_chunk=chunk)
        for cached in (0, 16):
            first = run.all([prompt, *(tokens(3 + seed % 17, seed) for seed in range(1, company + 1))], greedy(100))[0]
            assert run.tokens[first] == alone.tokens[0]
            assert run.cached[first] == cached


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_types_on_a_cpu(tmp_path: Path, stored: str) -> None:
    """Case C34: whatever a model is stored in and computed in, nearly the same distribution; auto says what it took."""
    folder = write_tiny_model(tmp_path / "float32", initializer_range=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path / stored)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    prompts = [tokens(20, seed) for seed in range(6)]
    exact = Run(folder)
    exact.all(prompts, params)
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        run = Run(tmp_path / stored, dtype=dtype)
        assert run.engine.info.dtype in (("float32", "bfloat16") if dtype == "auto" else (dtype,))
        run.all(prompts, params)
        for number in range(len(prompts)):
            likely, expected = dict(run.logprobs[number][0].top), dict(exact.logprobs[number][0].top)
            shared = likely.keys() & expected.keys()
            assert len(shared) > 12
            assert all(abs(likely[i] - expected[i]) < 0.1 for i in shared)
    long = Run(tmp_path / stored, dtype="bfloat16")
    drawn = SamplingParams(temperature=1, max_tokens=200, seed=1, logprobs=0, ignore_eos=True)
    (number,) = long.all([tokens(5)], drawn)
    assert all(np.isfinite(entry.logprob) and entry.logprob > -100 for entry in long.logprobs[number])
