"""A seeded request samples the same tokens alone, in a batch, after a preemption, in chunks, from a warm cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.sampling.params import SamplingParams
from tests.engine.tiny_models import VOCAB, write_tiny_model

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.4, "min_tokens": 10},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", num_threads=1, **settings))


def generate(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], first_key: int = 0
) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add(first_key + i, np.array(prompt, np.int32), each)
    while engine.has_work:
        output = engine.step()
        if output is not None:
            for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
                outputs[key - first_key].append(token)
    return outputs


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, rng.integers(5, 50)).tolist() for _ in range(10)]
    return prompts, [SamplingParams(max_tokens=30, seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(10)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """Each request by itself."""
    engine = build(folder, enable_prefix_caching=False)
    prompts, params = workload()
    return [
        generate(engine, [p], [s], first_key=100 + i)[0] for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]


def test_in_one_batch(folder: Path, alone: list[list[int]]) -> None:
    assert generate(build(folder), *workload()) == alone


def test_in_chunks_with_other_blocks(folder: Path, alone: list[list[int]]) -> None:
    assert generate(build(folder, max_prefill_chunk=7, block_size=4), *workload()) == alone


def test_with_a_warm_cache(folder: Path, alone: list[list[int]]) -> None:
    engine = build(folder, block_size=4)
    generate(engine, *workload())
    assert generate(engine, *workload(), first_key=50) == alone
    assert engine.load().prefix_hit_tokens > 0


def test_after_preemptions(folder: Path, alone: list[list[int]]) -> None:
    engine = build(folder, block_size=4, num_blocks=48, max_num_seqs=6, watermark=0.0)
    assert generate(engine, *workload()) == alone
    assert engine.load().preemptions > 0


def test_another_seed_says_something_else(folder: Path, alone: list[list[int]]) -> None:
    prompts, params = workload()
    others = [SamplingParams(max_tokens=30, seed=100 + i, temperature=1.0) for i in range(len(params))]
    assert generate(build(folder), prompts, others)[0] != alone[0]


def test_without_a_seed_the_engine_s_own_decides(folder: Path) -> None:
    prompts, _ = workload()
    params = [SamplingParams(max_tokens=20, temperature=1.0)] * len(prompts)
    first, second = (generate(build(folder, seed=1), prompts, params) for _ in range(2))
    assert first == second
    assert generate(build(folder, seed=2), prompts, params) != first


def test_logprobs_come_with_each_token_that_asked(folder: Path) -> None:
    engine = build(folder)
    asked = [None, 0, 3]
    for key, count in enumerate(asked):
        engine.add(
            key, np.array([5, 6, 7 + key], np.int32), SamplingParams(max_tokens=5, temperature=0, logprobs=count)
        )
    entries: dict[int, list[Any]] = {key: [] for key in range(3)}
    while engine.has_work:
        output = engine.step()
        assert output is not None
        for index, entry in output.logprobs.items():
            assert entry.token_id == output.tokens[index]
            entries[int(output.keys[index])].append(entry)
    assert [len(entries[key]) for key in range(3)] == [0, 5, 5]
    assert all(entry.top == () for entry in entries[1])
    for entry in entries[2]:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob)), "greedy takes the likeliest"
