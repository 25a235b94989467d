"""Log-probabilities of a prompt's tokens against transformers, whatever the chunks, the cache, or preemption."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.cache.blocks import BlockPool
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine, StepOutput
from nanoengine.errors import InvalidRequestError
from nanoengine.llm import LLM
from nanoengine.outputs import PromptLogprob, PromptScores
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.synthetic import SyntheticRunner, content
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.policies import Fcfs
from nanoengine.scheduling.scheduler import Limits, Scheduler
from nanoengine.scheduling.step import Scoring
from tests.engine.structured_cases import write_tiny_llm
from tests.engine.test_equality import tiny_prompts
from tests.engine.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCORED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=3)
PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def engine(folder: Path, **settings: Any) -> Engine:
    fixed = {
        "model": str(folder),
        "num_blocks": 256,
        "block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "watermark": 0.0,
        "max_num_seqs": 8,
    }
    return Engine(EngineConfig.model_validate(fixed | settings))


class Run:
    """Requests of one engine, and what came of their prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scores: dict[int, list[PromptLogprob]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self._prompts: dict[int, np.ndarray] = {}

    def add(self, prompt: list[int], params: SamplingParams = SCORED) -> int:
        key = len(self._prompts)
        self._prompts[key] = np.array(prompt, np.int32)
        self.scores[key], self.tokens[key] = [], []
        self.engine.add(key, self._prompts[key], params)
        return key

    def until_idle(self) -> None:
        while self.engine.has_work:
            if output := self.engine.step():
                self._take(output)
            self.engine.check()

    def _take(self, output: StepOutput) -> None:
        self.cached.update(output.started)
        for key, scores in output.scores:
            assert not self.tokens[key], "all of a prompt's scores are there before its first token"
            assert scores.first == len(self.scores[key]) + 1, "none twice, none left out"
            self.scores[key] += scores.entries(self._prompts[key], 3)
        for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
            self.tokens[key].append(token)


@torch.inference_mode()
def check(reference: Any, prompt: list[int], found: list[PromptLogprob]) -> None:
    logprobs = reference(torch.tensor([prompt])).logits[0].float().log_softmax(1)[:-1]
    assert [entry.token_id for entry in found] == prompt[1:]
    if not found:
        return
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])
    np.testing.assert_allclose([entry.logprob for entry in found], expected[:, 0], atol=1e-3)
    assert [entry.rank for entry in found] == ((logprobs > expected).sum(1) + 1).tolist()
    top = logprobs.topk(3)
    assert [[i for i, _ in entry.top] for entry in found] == top.indices.tolist()
    values = np.array([[p for _, p in entry.top] for entry in found]).reshape(top.values.shape)
    np.testing.assert_allclose(values, top.values, atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 1}, {"max_prefill_chunk": 7}, {"block_size": 1}])
def test_equal_to_transformers(folder: Path, reference: Any, settings: dict[str, Any]) -> None:
    run, prompts = Run(engine(folder, **settings)), [*tiny_prompts(8), [5], [5, 6]]
    for prompt in prompts:
        run.add(prompt)
    run.until_idle()
    for key, prompt in enumerate(prompts):
        check(reference, prompt, run.scores[key])


def test_rows_at_once_are_bounded(folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, prompt = Run(engine(folder)), np.random.default_rng(1).integers(3, 257, 200).tolist()
    runner = run.engine._runner
    assert isinstance(runner, ModelRunner)
    logits, rows = runner._model.logits, []
    monkeypatch.setattr(runner._model, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    run.add(prompt)
    run.until_idle()
    assert max(rows) == 64
    assert sum(rows) == 199 + 3
    check(reference, prompt, run.scores[0])


def test_who_does_not_ask_pays_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(engine(folder))
    monkeypatch.setattr(ModelRunner, "_score", lambda *_: pytest.fail("nobody asked"))
    run.add(tiny_prompts(1)[0], PLAIN)
    run.until_idle()
    assert run.scores == {0: []}


def test_cold_and_warm_and_in_any_order(folder: Path, reference: Any) -> None:
    """Also with another prompt that shares its beginning, and with the whole prompt in the cache."""
    rng = np.random.default_rng(0)
    shared, tails = rng.integers(3, 257, 16).tolist(), rng.integers(3, 257, (2, 10)).tolist()
    prompts = [shared + tail for tail in tails]
    for order in itertools.permutations([(0, PLAIN), (0, SCORED), (1, SCORED), (1, PLAIN)]):
        run = Run(engine(folder))
        for which, params in order:
            key = run.add(prompts[which], params)
            run.until_idle()
            if params is SCORED:
                check(reference, prompts[which], run.scores[key])
                assert run.cached[key] == 0, "no hit is taken"
        key = run.add(prompts[0], PLAIN)
        run.until_idle()
        assert run.cached[key] == 24, "and the cache was filled all the same"


@pytest.mark.parametrize("chunk", [3, 8, None])
def test_preempted(folder: Path, reference: Any, chunk: int | None) -> None:
    """In a pool that holds two of them, in the middle of their prompts too."""
    prompts = [prompt + prompt[:5] for prompt in tiny_prompts(8)]
    blocks = -(-(max(map(len, prompts)) + 24) // 4) + 3
    run = Run(engine(folder, num_blocks=blocks, block_size=4, max_prefill_chunk=chunk))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=3)
    for prompt in prompts:
        run.add(prompt, params)
    run.until_idle()
    assert run.engine.load().preemptions > 0
    for key, prompt in enumerate(prompts):
        check(reference, prompt, run.scores[key])
        assert len(run.tokens[key]) == 20


def test_an_abort_in_the_middle_leaves_nothing(folder: Path, reference: Any) -> None:
    run, prompts = Run(engine(folder, max_prefill_chunk=8)), tiny_prompts(4)
    keys = [run.add(prompt) for prompt in prompts]
    output = run.engine.step()
    assert output is not None
    run._take(output)
    run.engine.abort(keys[0])
    run.until_idle()
    for key in keys[1:]:
        check(reference, prompts[key], run.scores[key])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_workload_scores_each_token_once(data: st.DataObject) -> None:
    """The stand-in's scores depend on all content before a token; with up to one step in flight."""
    block_size, depth = data.draw(st.sampled_from([1, 3, 4])), data.draw(st.integers(0, 1))
    budget = data.draw(st.integers(4, 20))
    limits = Limits(
        max_num_seqs=4, max_num_batched_tokens=budget, max_prefill_chunk=data.draw(st.integers(1, budget)),
        max_model_len=40, block_size=block_size, vocab_size=256,
    )  # fmt: skip
    pool = BlockPool(-(-40 // block_size) + data.draw(st.integers(0, 6)))
    scheduler = Scheduler(limits, pool, Fcfs())
    runner = SyntheticRunner(num_slots=4, num_blocks=pool.num_blocks, block_size=block_size, depth=depth)
    shared = [65] * 20
    prompts, found = [], {}
    for key in range(data.draw(st.integers(1, 6))):
        own = data.draw(st.lists(st.integers(66, 70), min_size=1, max_size=8))
        prompt = np.array(shared[: data.draw(st.integers(0, 20))] + own, np.int32)
        asked = data.draw(st.sampled_from([None, 0, 2]))
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 10)), ignore_eos=True, prompt_logprobs=asked)
        prompts.append((prompt, asked))
        found[key] = []
        scheduler.add(key, prompt, params)
    flying: list[Any] = []
    while scheduler.has_work or flying:
        step = scheduler.plan()
        if step is not None:
            flying.append((step, runner.launch(step)))
        if step is None or len(flying) > depth:
            oldest, pending = flying.pop(0)
            result = pending.result()
            for scoring, scores in zip(oldest.scorings, result.scores, strict=True):
                found[int(oldest.keys[scoring.row])].append(scores)
            scheduler.retire(oldest, result.tokens)
        scheduler.check()
    for key, (prompt, asked) in enumerate(prompts):
        entries = [entry for scores in found[key] for entry in scores.entries(prompt, 5)]
        assert entries == ([] if asked is None else expected(prompt, asked))


def expected(prompt: np.ndarray, top: int) -> list[PromptLogprob]:
    """What the stand-in says of a whole prompt at once."""
    if len(prompt) == 1:
        return []
    runner = SyntheticRunner(num_slots=1, num_blocks=1, block_size=1)
    seen = content(prompt, np.arange(len(prompt), dtype=np.int32))
    scores: PromptScores = runner._score(Scoring(0, 1, prompt[1:], top), seen)
    return list(scores.entries(prompt, top))


def test_offline(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_llm(tmp_path)), device="cpu", dtype="float32", cpu_kv_cache_bytes=64 << 20)
    scored, plain, only = llm.generate(
        ["A B C D"] * 3,
        [
            SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=0),
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(max_tokens=0, prompt_logprobs=0),
        ],
        use_tqdm=False,
    )
    assert plain.prompt_logprobs is None
    assert scored.prompt_logprobs is not None
    assert only.prompt_logprobs is not None
    assert scored.token_ids == plain.token_ids
    assert (only.token_ids, only.text, only.finish_reason) == ([], "", "length")
    assert [e and (e.token_id, e.rank) for e in only.prompt_logprobs] == [
        e and (e.token_id, e.rank) for e in scored.prompt_logprobs
    ]
    # A token scores in the prompt what it scored when it was sampled.
    whole = scored.prompt_token_ids + scored.token_ids
    (again,) = llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert again.prompt_logprobs is not None
    assert scored.logprobs is not None
    tail = [entry.logprob for entry in again.prompt_logprobs[-len(scored.token_ids) :] if entry]
    np.testing.assert_allclose(tail, [entry.logprob for entry in scored.logprobs], atol=1e-4)


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)
