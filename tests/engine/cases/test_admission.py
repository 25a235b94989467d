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


POLICIES = [
    # of the engine; priorities of the long prompt and of the short ones
    ({}, 0, 0),
    ({"scheduling_policy": "priority"}, 0, 0),
    ({"scheduling_policy": "priority"}, 1, 0),
    ({"scheduling_policy": "priority"}, 0, 1),
]


@pytest.mark.parametrize(("policy", "long", "short"), POLICIES)
def test_a_long_prompt_and_those_beside_it(policy: dict[str, Any], long: int, short: int) -> None:
    """Case C16, in steps: one that decodes has a token in each, and a short prompt does not wait for the long one."""
    run = synthetic(**policy)
    a = run.add(tokens(4), greedy(200))
    run.until(a, 2)
    b = run.add(tokens(64 * CHUNK, 1), greedy(1), long)
    run.step()
    had, begin = len(run.tokens[a]), run.steps
    c = run.add(tokens(3, 2), greedy(4), short)
    assert run.until(c, 1) <= 2
    run.until(c, 4)
    assert not run.tokens[b]
    assert len(run.tokens[a]) - had == run.steps - begin
    run.until(b, 1)
    run.engine.abort(a)
    run.until_idle()


@pytest.mark.parametrize(("policy", "long", "short"), POLICIES)
def test_short_prompts_do_not_hold_up_a_long_one(policy: dict[str, Any], long: int, short: int) -> None:
    """Case C16: under a steady flow of short ones it takes less than twice its time alone."""
    alone = synthetic(**policy)
    time_alone = alone.until(alone.add(tokens(64 * CHUNK, 1), greedy(1)), 1)
    run = synthetic(**policy)
    b, steps = run.add(tokens(64 * CHUNK, 1), greedy(1), long), 0
    while not run.tokens[b]:
        run.add(tokens(4, 100 + steps), greedy(3), short)
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
    alone.all([prompt], greedy(200))
    alone.check(reference)
    for company, chunk in ((0, None), (7, 5), (31, None), (31, 5)):
        run = Run(folder, block_size=4, num_blocks=1500, max_num_seqs=32, max_prefill_chunk=chunk)
        for cached in (0, 16):
            first = run.add(prompt, greedy(200))
            for seed in range(1, company + 1):
                run.add(tokens(3 + seed % 17, seed), greedy(5 * seed))
            run.until_idle()
            assert run.tokens[first] == alone.tokens[0]
            assert run.cached[first] == cached


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_types_on_a_cpu(tmp_path: Path, stored: str) -> None:
    """Case C34: whatever a model is stored in and computed in, nearly the same log-probabilities of 500 tokens."""
    settings = {"initializer_range": 0.1, "max_position_embeddings": 512}
    folder = write_tiny_model(tmp_path / "float32", **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path / stored)
    run = Run(tmp_path / stored, dtype=stored)
    drawn = SamplingParams(temperature=1, max_tokens=500, seed=1, logprobs=0, ignore_eos=True)
    (number,) = run.all([tokens(8)], drawn)
    text, made = tokens(8) + run.tokens[number], [entry.logprob for entry in run.logprobs[number]]
    assert len(made) == 500
    scores: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "float16", "auto"):
        run = Run(tmp_path / stored, dtype=dtype)
        assert run.engine.info.dtype in (("float32", "bfloat16") if dtype == "auto" else (dtype,))
        (number,) = run.all([text], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        scores[dtype] = np.array(run.scores[number])
        assert np.abs(scores[dtype] - scores["float32"]).max() < 0.1  # no NaN either
    assert np.abs(scores[stored][7:] - made).max() < (1e-3 if stored == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("native", [False, True])
def test_a_type_that_is_slow_on_this_cpu_is_said_to_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, native: bool
) -> None:
    """Case C34: without instructions for it every product is converted; auto never takes it."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: native)
    run = Run(folder, dtype=dtype)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING" and "slow" in record.message]
    assert bool(warned) == (dtype != "auto" and not native)
    assert all(dtype in message and "float32" in message for message in warned)
    if dtype == "auto":
        assert run.engine.info.dtype == ("bfloat16" if native else "float32")
