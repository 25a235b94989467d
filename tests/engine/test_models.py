"""Every family equals transformers in float32, over a paged cache, however the work is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanoengine.models.config import load_model_config
from nanoengine.models.registry import CausalLM, load_model
from nanoengine.weights.sources import ModelFiles
from tests.engine.tiny_models import FAMILIES, VOCAB, Paged, paged_hidden, write_tiny_model

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 37, 5, 18, 2)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    files = ModelFiles(folder, "safetensors")
    return load_model(files, load_model_config(files), dtype, CPU)


def reference(folder: Path, attention: str = "eager", **settings: Any) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, **settings
    ).eval()


def prompts(seed: int = 1) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(VOCAB, (n,)).tolist() for n in PROMPT_LENGTHS]


@torch.inference_mode()
def reference_logprobs(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@torch.inference_mode()
def logprobs(model: CausalLM, hidden: Tensor) -> Tensor:
    return model.logits(hidden).log_softmax(-1)


@torch.inference_mode()
def greedy(model: CausalLM, sequences: list[list[int]], steps: int, block_size: int) -> tuple[list[list[int]], Tensor]:
    """Continue all sequences together; also returns the gap between the two likeliest tokens at each step."""
    capacity = sum(len(tokens) + steps for tokens in sequences)
    paged = Paged(model, capacity=capacity, rows=len(sequences), block_size=block_size)
    pieces = dict(enumerate(sequences))
    out: list[list[int]] = [[] for _ in sequences]
    gaps = []
    for _ in range(steps):
        hidden = paged.step(pieces)
        logits = torch.stack([model.logits(hidden[i][-1:])[0] for i in range(len(sequences))])
        top = logits.topk(2)
        gaps.append(top.values[:, 0] - top.values[:, 1])
        pieces = {i: [token] for i, token in enumerate(top.indices[:, 0].tolist())}
        for i, piece in pieces.items():
            out[i] += piece
    return out, torch.stack(gaps)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    # A tied head of such weights answers with the token it was given; smaller weights let the context speak.
    settings = {"tie_word_embeddings": True, "initializer_range": 0.15} if tied else {}
    write_tiny_model(tmp_path, family, **settings)
    theirs, ours = reference(tmp_path), load(tmp_path)
    sequences = prompts()
    for tokens, hidden in zip(sequences, paged_hidden(ours, sequences), strict=True):
        torch.testing.assert_close(logprobs(ours, hidden), reference_logprobs(theirs, tokens), atol=2e-4, rtol=1e-4)

    steps = 24
    generated, gaps = greedy(ours, sequences, steps, block_size=4)
    for tokens, mine in zip(sequences, generated, strict=True):
        wanted = theirs.generate(
            torch.tensor([tokens]), max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None
        )
        assert mine == wanted[0, len(tokens) :].tolist()
    # Else equal tokens would say little.
    assert (gaps > 0.1).float().mean() >= 0.8
    assert len({token for tokens in generated for token in tokens}) > 20
