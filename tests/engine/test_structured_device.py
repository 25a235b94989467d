"""Rows with masks, sampled by the device's kernel in the interpreter. On a GPU that is test_gpu_engine.py's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.interpreted import ONLY, Graphs, small_turns  # isort: skip  # first: it says where kernels run
from nanoengine.llm import LLM
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.sampling.device import DeviceSampler
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar
from tests.engine.structured_cases import write_tiny_llm

pytestmark = [pytest.mark.usefixtures("one_thread"), ONLY]

ROWS = 8
GRAMMARS = [Grammar("regex", "[a-z]{1,8}"), None, Grammar("regex", "(ab|c)+"), Grammar("choice", '["yes", "no"]')]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    small_turns(monkeypatch)
    folder = write_tiny_llm(tmp_path)
    return LLM(str(folder), dtype="float32", device="cpu", num_threads=1, cpu_kv_cache_bytes=8 << 20, max_num_seqs=ROWS)


def record(runner: ModelRunner) -> Graphs:
    """As if ``capture`` had been here."""
    logits = torch.zeros(ROWS + 1, runner._model.config.vocab_size)

    def stage(step: Any, inputs: Any) -> Callable[[], None]:
        def replay() -> None:
            logits[: len(step.slots), : runner._sampler.vocab_size] = runner._eager(step, inputs)[0]

        return replay

    graphs: Any = Graphs(runner._decode_masked, (4, 8))
    runner._graphs, runner._mask_graphs, runner._logits = graphs, graphs, logits
    runner._stage = stage  # type: ignore[method-assign]
    return graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_with_masks_say_what_they_say_on_a_cpu(tiny: LLM, graphs: bool) -> None:
    """Among rows that have none, and some whose tokens the kernel cannot sample; fewer rows than a graph has."""
    params = [
        SamplingParams(
            structured=GRAMMARS[i % 4], temperature=i % 3, seed=i, max_tokens=4 + i,
            logprobs=1 if i in (2, 5) else None, presence_penalty=float(i == 7),
        )
        for i in range(ROWS)
    ]  # fmt: skip
    expected = tiny.generate(["a b"] * ROWS, params, use_tqdm=False)
    runner: Any = tiny.engine._runner
    runner._sampler.fused = DeviceSampler(ROWS, runner._sampler._fallback, torch.device("cpu"))
    runner.depth = 1
    recorded = record(runner) if graphs else None
    found = tiny.generate(["a b"] * ROWS, params, use_tqdm=False)
    assert [(a.token_ids, a.finish_reason) for a in found] == [(a.token_ids, a.finish_reason) for a in expected]
    assert [bool(a.logprobs) for a in found] == [bool(a.logprobs) for a in expected]
    if recorded is not None:
        assert set(recorded.replayed) == {4, 8}
