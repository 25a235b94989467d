"""The engine's greedy tokens against transformers in fp32, whatever the chunks, blocks, cache, company or preemption.

One axis is varied at a time from a base case; `make soak` runs the cross product. A token counts as equal if
transformers, given all tokens before it, scores it within 1e-4 of its own first choice: so every position is compared,
and by induction the answers are the same but where two candidates tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import Step
from tests.engine.tiny_models import FAMILIES, VOCAB, write_tiny_model

TIE = 1e-4

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}

BASE: dict[str, Any] = {"block_size": 16, "max_prefill_chunk": None, "batch": 4, "warm": False, "num_blocks": None}
AXES: dict[str, list[Any]] = {
    "block_size": [1, 4, 64],
    "max_prefill_chunk": [1, 7, 64],
    "batch": [1, 32],
    "warm": [True],
    "num_blocks": ["few"],  # so few that sequences are preempted
}
CASES = [BASE, *({**BASE, axis: value} for axis, values in AXES.items() for value in values)]


def case_name(case: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items() if v != BASE[k]) or "base"


class Reference:
    """transformers, as judge of a continuation."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @torch.inference_mode()
    def judge(self, prompt: list[int], output: list[int]) -> tuple[float, np.ndarray]:
        """(how far the worst output token scores below the first choice, gaps between the first two candidates)."""
        ids = torch.tensor([prompt + output[:-1]])
        logits = self._model(ids).logits[0, len(prompt) - 1 :].float()
        best = logits.topk(2).values
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float((best[:, 0] - chosen).max()), (best[:, 0] - best[:, 1]).numpy()


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int, *, first_key: int = 0) -> list[list[int]]:
    """Greedy tokens for all prompts, added at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(first_key + i, np.array(prompt, np.int32), params)
    while engine.has_work:
        output = engine.step()
        if output is not None:
            for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
                outputs[key - first_key].append(token)
        engine.check()
    return outputs


def run_case(
    model: Path | str, case: dict[str, Any], prompts: list[list[int]], max_tokens: int, threads: int | None = 1
) -> list[list[int]]:
    """Answers to ``prompts`` under one case's settings, which are checked to have had their effect."""
    block_size, batch = case["block_size"], case["batch"]
    num_blocks = case["num_blocks"]
    if num_blocks == "few":
        # Room for the longest sequence and some of its company: prompts are shorter, and share their beginnings.
        longest = max(map(len, prompts)) + max_tokens
        num_blocks = -(-longest // block_size) * max(2, batch // 4)
        if batch > 1:
            num_blocks = max(num_blocks - 1, -(-longest // block_size) + 1)
    engine = Engine(
        EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            block_size=block_size,
            num_blocks=num_blocks,
            cpu_kv_cache_bytes=256 << 20,
            max_prefill_chunk=case["max_prefill_chunk"],
            max_num_seqs=batch,
            watermark=0.0,
            num_threads=threads,
        )
    )
    if case["warm"]:
        generate(engine, prompts, 1, first_key=10_000)
        assert engine.load().blocks_used == 0
    outputs = generate(engine, prompts, max_tokens)
    load = engine.load()
    if case["warm"]:
        assert load.prefix_hit_tokens > 0, "the cache was to be warm"
    if case["num_blocks"] == "few" and batch > 1:
        assert load.preemptions > 0, "a preemption was to be forced"
    return outputs


def check(reference: Reference, prompts: list[list[int]], outputs: list[list[int]]) -> np.ndarray:
    """Assert that every token is transformers' own choice; returns the gaps between the first two candidates."""
    gaps = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        worst, gap = reference.judge(prompt, output)
        assert worst <= TIE, f"prompt {i}: a token scores {worst:.6f} below transformers' choice"
        gaps.append(gap)
    return np.concatenate(gaps)


def tiny_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 60 tokens; every third starts like the first, so that prefixes are shared."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB, rng.integers(3, 60)).tolist() for _ in range(count)]
    for i in range(3, count, 3):
        prompts[i] = prompts[0][:40] + prompts[i]
    return prompts


@pytest.fixture(scope="module", params=[*FAMILIES, *(f"llama+{rope}" for rope in ROPE), "qwen3+tied"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Reference]]:
    """A tiny random model of each family and rope type, and transformers' reading of the same files."""
    family, _, variant = request.param.partition("+")
    overrides: dict[str, Any] = {}
    if variant == "tied":
        overrides = {"tie_word_embeddings": True}
    elif variant:
        overrides = {"rope_parameters": {"rope_theta": 10000.0, **ROPE[variant]}}
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), family, **overrides)
    threads = torch.get_num_threads()
    yield folder, Reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiny_models_say_what_transformers_says(tiny: tuple[Path, Reference], case: dict[str, Any]) -> None:
    folder, reference = tiny
    prompts = tiny_prompts(max(8, case["batch"]))
    gaps = check(reference, prompts, run_case(folder, case, prompts, 24))
    assert (gaps > 0.1).mean() >= 0.8, "the model is too sure or too unsure of everything for this test to see a fault"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["llama", "mistral_window", "qwen3"])
def test_tiny_models_over_the_cross_product(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    reference = Reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    prompts = tiny_prompts(32)
    for values in itertools.product([1, 4, 16, 64], [None, 1, 7, 64], [1, 4, 32], [False, True], [None, "few"]):
        case = dict(zip(("block_size", "max_prefill_chunk", "batch", "warm", "num_blocks"), values, strict=True))
        if case["num_blocks"] == "few" and (case["warm"] or case["batch"] == 1):
            continue  # a pool that small keeps nothing warm, and alone nobody is preempted
        check(reference, prompts, run_case(folder, case, prompts, 24))


QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "The quick brown fox",
    "Explain photosynthesis to a child.",
    "List three prime numbers.",
    "Once upon a time, in a small village by the river,",
    "Translate to French: good morning",
    "1, 1, 2, 3, 5, 8,",
    "Why is the sky blue?",
    "SELECT name FROM users WHERE",
    "The meaning of life is",
    "How do I boil an egg?",
    "In 1969, humans first",
    "Dear Sir or Madam,",
    "Water freezes at",
    "Summarise the plot of Romeo and Juliet.",
    "import numpy as np\n\n",
    "Ein kleiner Hund",
    "My favourite recipe needs flour, eggs and",
]


@pytest.fixture(scope="module")
def smollm(default_gguf: Path) -> tuple[Reference, list[list[int]]]:
    """transformers' own reading of the default model, and the prompts above as it tokenises them."""
    load = {"pretrained_model_name_or_path": default_gguf.parent, "gguf_file": default_gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**load)
    return Reference(model), [tokenizer(text)["input_ids"] for text in QUESTIONS]


def test_the_default_model_says_what_transformers_says(
    smollm: tuple[Reference, list[list[int]]], default_gguf: Path
) -> None:
    reference, prompts = smollm
    check(reference, prompts, run_case(default_gguf, {**BASE, "batch": 20}, prompts, 64, threads=None))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_default_model_along_every_axis(
    smollm: tuple[Reference, list[list[int]]], default_gguf: Path, case: dict[str, Any]
) -> None:
    reference, prompts = smollm
    prompts = (prompts * 2)[: max(20, case["batch"])]
    check(reference, prompts, run_case(default_gguf, case, prompts, 64, threads=None))


def test_one_corrupted_block_turns_it_red(tmp_path: Path) -> None:
    """These tests can fail: one KV block of one layer overwritten in mid-answer is noticed."""
    folder = write_tiny_model(tmp_path)
    reference = Reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    prompts = tiny_prompts(4)
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=64, max_num_seqs=4))
    runner: Any = engine._runner
    launch, launched = runner.launch, 0

    def corrupting(step: Step, *args: Any) -> Any:
        nonlocal launched
        launched += 1
        if launched == 5:
            runner._cache.keys[2][int(step.block_table[0, 0])] *= -1
        return launch(step, *args)

    runner.launch = corrupting
    outputs = generate(engine, prompts, 24)
    with pytest.raises(AssertionError, match="below transformers' choice"):
        check(reference, prompts, outputs)
