"""Steps of few prompts as graphs have them, their kernels interpreted. On a GPU that is test_gpu_engine.py's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.interpreted import ONLY, Graphs, small_turns  # isort: skip  # first: it says where kernels run
from nanoengine.layers.ops import TorchOps
from nanoengine.llm import LLM
from nanoengine.runner.prompt_graphs import PromptGraphs
from nanoengine.sampling.device import DeviceSampler
from nanoengine.sampling.params import SamplingParams
from tests.engine.structured_cases import write_tiny_llm

pytestmark = [pytest.mark.usefixtures("one_thread"), ONLY]

SLOTS = 6


def test_few_prompts_say_what_they_say_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a graph for each number of tokens, so that none is missing: what is stored nowhere, only a GPU's kernels
    leave out."""
    small_turns(monkeypatch)
    folder = write_tiny_llm(tmp_path)
    llm = LLM(
        str(folder), dtype="float32", device="cpu", num_threads=1, cpu_kv_cache_bytes=8 << 20, max_num_seqs=SLOTS,
        max_num_batched_tokens=40, block_size=4,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    common = rng.integers(5, 60, 9).tolist()
    waves = [[3], [1, 12, 5], [4] * SLOTS, [70], [-1], [-7], [30, 20]]
    prompts = [
        [common + rng.integers(5, 60, -n).tolist() if n < 0 else rng.integers(5, 60, n).tolist() for n in wave]
        for wave in waves
    ]
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0, "logprobs": 1}]

    def answers() -> list[list[int]]:
        llm.engine.reset_prefix_cache()
        found = []
        for wave in prompts:
            params = [SamplingParams(**kinds[i % 3], max_tokens=2, ignore_eos=True) for i in range(len(wave))]
            found += [list(out.token_ids) for out in llm.generate(wave, params, use_tqdm=False)]
        return found

    expected = answers()
    store = TorchOps.rope_and_store
    monkeypatch.setattr(TorchOps, "rope_and_store", lambda self, *args: store(self, *args[:-1], args[-1].long()))
    runner: Any = llm.engine._runner
    runner._sampler.fused = DeviceSampler(SLOTS, runner._sampler._fallback, torch.device("cpu"))
    runner._staging._device = torch.zeros_like(runner._staging._hosts[0][0])  # a place of its own, as on a GPU
    runner._logits = torch.zeros(SLOTS + 1, runner._model.config.vocab_size)
    plain = runner._model.logits  # which on a CPU has no use for ``out``
    runner._model.logits = lambda hidden, out=None: plain(hidden) if out is None else out.copy_(plain(hidden))
    table = torch.zeros(SLOTS, runner._limits.blocks, dtype=torch.int32)
    sizes = range(1, 41)
    few: Any = PromptGraphs(
        runner._model, runner._cache, runner._sampler, runner._staging, sizes, block_table=table,
        logits=runner._logits, tokens=runner._tokens, last_token=runner._last_token,
    )  # fmt: skip
    few._graphs = graphs = Graphs(few._run, sizes)
    runner._prompts = few
    assert answers() == expected
    assert graphs.replayed == [3, 18, 24, 40, 30, 10, 8, 40], "all that have no decodes beside them"
