"""Every family equals transformers in float32, over a paged cache, however the work is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.ops import TorchOps
from nanoengine.models.config import load_model_config
from nanoengine.models.registry import CausalLM, load_model
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import ModelFiles
from tests.engine.tiny_models import FAMILIES, VOCAB, Paged, paged_hidden, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 37, 5, 18, 2)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    files = ModelFiles(folder, "safetensors")
    return load_model(files, load_model_config(files), TorchOps(), dtype, CPU)


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


def assert_same_greedy(theirs: transformers.PreTrainedModel, prompt: list[int], generated: list[int]) -> None:
    """One pass over prompt and answer: if each token is their likeliest after all before it, greedy gives the same."""
    likeliest = reference_logprobs(theirs, prompt + generated).argmax(-1)
    assert generated == likeliest[len(prompt) - 1 : -1].tolist()


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

    generated, gaps = greedy(ours, sequences, steps=24, block_size=4)
    for tokens, answer in zip(sequences, generated, strict=True):
        assert_same_greedy(theirs, tokens, answer)
    # Else equal tokens would say little.
    assert (gaps > 0.1).float().mean() >= 0.8
    assert len({token for tokens in generated for token in tokens}) > 10


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    return load(folder), reference(folder)


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(1, None), (4, 1), (4, 3), (4, 4), (4, 7), (16, None), (16, 5), (64, 16)]
)
def test_blocks_and_chunks_change_nothing(pair: tuple[CausalLM, Any], block_size: int, chunk: int | None) -> None:
    ours, theirs = pair
    sequences = prompts(seed=block_size)
    for tokens, hidden in zip(
        sequences, paged_hidden(ours, sequences, block_size=block_size, chunk=chunk), strict=True
    ):
        torch.testing.assert_close(logprobs(ours, hidden), reference_logprobs(theirs, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_corrupted_block_shows(pair: tuple[CausalLM, Any], which: str) -> None:
    """The tests above would notice one wrong block in one layer."""
    ours, _ = pair
    tokens = prompts()[1]
    paged = Paged(ours, capacity=64, rows=1, block_size=4)
    paged.step({0: tokens[:-1]})
    before = paged.step({0: tokens[-1:]})[0]
    paged.lengths[0] -= 1  # the last token once more, now over a damaged cache
    visible_block = paged.tables[0][len(tokens) // 4 - 1]
    getattr(paged.cache, which)[2][visible_block] += 0.5
    after = paged.step({0: tokens[-1:]})[0]
    assert (logprobs(ours, before) - logprobs(ours, after)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_is_as_near_to_float32_as_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family, initializer_range=0.1)
    exact, theirs, ours = reference(tmp_path), reference(tmp_path).to(dtype), load(tmp_path, dtype)
    tokens = prompts()[1]
    wanted = reference_logprobs(exact, tokens)
    their_error = (reference_logprobs(theirs, tokens).float() - wanted).abs().mean()
    our_error = (logprobs(ours, paged_hidden(ours, [tokens])[0]).float() - wanted).abs().mean()
    assert 0 < our_error < 1.3 * their_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_transformers_to_the_bit(dtype: torch.dtype) -> None:
    theirs, ours = LlamaRMSNorm(72, eps=1e-5).to(dtype), RMSNorm(72, 1e-5, TorchOps(), dtype, CPU)
    weight, x = torch.randn(72, dtype=dtype), 30 * torch.randn(5, 3, 72, dtype=dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        ours.weight.copy_(weight)
        assert torch.equal(ours(x, None)[1], theirs(x))


def test_two_models_in_one_process_do_not_meet(tmp_path: Path) -> None:
    """No globals: steps of two engines may interleave."""
    first = load(write_tiny_model(tmp_path / "a", "llama", seed=1))
    second = load(write_tiny_model(tmp_path / "b", "qwen3", seed=2))
    tokens = prompts()[1]
    alone = [paged_hidden(model, [tokens], chunk=5)[0] for model in (first, second)]
    a, b = (Paged(model, capacity=64, rows=1, block_size=4) for model in (first, second))
    together: tuple[list[Tensor], list[Tensor]] = ([], [])
    for at in range(0, len(tokens), 5):
        together[0].append(a.step({0: tokens[at : at + 5]})[0])
        together[1].append(b.step({0: tokens[at : at + 5]})[0])
    for want, parts in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.cat(parts), want)


GGUF_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


def test_the_default_model_equals_transformers(default_gguf: Path) -> None:
    """SmolLM2 in float32 from the quantised GGUF, against transformers' own reading of it."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with the help of accelerate only")
    files = ModelFiles(default_gguf, "gguf")
    config = load_model_config(files)
    ours = load_model(files, config, TorchOps(), torch.float32, CPU)
    theirs = reference(default_gguf.parent, gguf_file=default_gguf.name)
    tokenizer = load_tokenizer(files)
    sequences = [tokenizer.encode(prompt) for prompt in GGUF_PROMPTS]
    for tokens, hidden in zip(sequences, paged_hidden(ours, sequences, block_size=16), strict=True):
        torch.testing.assert_close(logprobs(ours, hidden), reference_logprobs(theirs, tokens), atol=1e-3, rtol=1e-4)
    generated, _ = greedy(ours, sequences, steps=12, block_size=16)
    for tokens, answer in zip(sequences, generated, strict=True):
        assert_same_greedy(theirs, tokens, answer)
    assert " Paris" in tokenizer.decode(generated[0])
