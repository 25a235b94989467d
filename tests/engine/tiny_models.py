"""Tiny random checkpoints of every family, and a bare loop that runs a model over a paged cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from nanoengine.attention.base import Batch, ForwardContext, KVCache
from nanoengine.attention.torch import TorchAttention
from nanoengine.models.registry import CausalLM

VOCAB = 257

# Sizes are odd on purpose: whatever assumes a power of two, or heads * head_dim == hidden_size, fails.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # The default of 0.02 makes a model that repeats one token whatever it is asked: nothing it says could be wrong.
    "initializer_range": 0.3,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 24}),
    "llama_biased": ("Llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral_window": ("Mistral", {"head_dim": 32, "sliding_window": 11}),
    "qwen2": ("Qwen2", {}),  # head_dim is 72 / 9
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3_biased": ("Qwen3", {"head_dim": 40, "attention_bias": True}),
}
"""Name -> transformers' class prefix and what the configuration differs in."""


def tiny_config(family: str = "llama", **overrides: Any) -> transformers.PretrainedConfig:
    """A transformers configuration of one of ``FAMILIES``."""
    prefix, settings = FAMILIES[family]
    return getattr(transformers, f"{prefix}Config")(**{**_COMMON, **settings, **overrides})


def write_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint (config.json, generation_config.json, model.safetensors) without a tokenizer.

    ``overrides`` go to the configuration: ``tie_word_embeddings=True``, ``rope_parameters={...}``, sizes.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As initialised, norms are all 1 and biases all 0, so that mixing them up would show nowhere.
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def paged_hidden(
    model: CausalLM, sequences: list[list[int]], *, block_size: int = 4, chunk: int | None = None, seed: int = 0
) -> list[Tensor]:
    """Hidden states of every token, per sequence, computed step by step over one paged cache with shuffled blocks.

    Sequences advance together by up to ``chunk`` tokens a step (None: whole), each from its own point on; those that
    have one token left are decode rows, as the scheduler would have it.
    """
    paged = Paged(model, capacity=sum(map(len, sequences)), rows=len(sequences), block_size=block_size, seed=seed)
    out: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while todo := [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]:
        pieces = {i: sequences[i][done[i] : done[i] + (chunk or len(sequences[i]))] for i in todo}
        for i, hidden in paged.step(pieces).items():
            out[i].append(hidden)
            done[i] += len(hidden)
    return [torch.cat(parts) for parts in out]


class Paged:
    """Sequences, by number, in a paged cache whose blocks are handed out in random order."""

    def __init__(self, model: CausalLM, *, capacity: int, rows: int, block_size: int, seed: int = 0) -> None:
        config = model.config
        num_blocks = capacity // block_size + rows + 1
        self.model, self.block_size = model, block_size
        self.cache = KVCache.allocate(
            layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=next(iter(model.parameters())).dtype,  # type: ignore[attr-defined]
            device=torch.device("cpu"),
        )
        for pages in (*self.cache.keys, *self.cache.values):
            pages.fill_(1e4)  # stale memory, of a size that would be noticed
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.backend = TorchAttention()

    def step(self, pieces: dict[int, list[int]]) -> dict[int, Tensor]:
        """Append tokens to sequences; returns the hidden states of the new tokens."""
        order = sorted(pieces, key=lambda i: len(pieces[i]) > 1)  # decodes first
        for i in order:
            self.lengths[i] = self.lengths.get(i, 0) + len(pieces[i])
            table = self.tables.setdefault(i, [])
            while len(table) * self.block_size < self.lengths[i]:
                table.append(self.free.pop())
        counts = [len(pieces[i]) for i in order]
        lens = [self.lengths[i] for i in order]
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lens, counts, strict=True)])
        width = max(len(self.tables[i]) for i in order)
        block_table = torch.tensor([self.tables[i] + [0] * (width - len(self.tables[i])) for i in order])
        row = torch.repeat_interleave(torch.arange(len(order)), torch.tensor(counts))
        batch = Batch(
            num_decodes=sum(c == 1 for c in counts),
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=block_table.int(),
            kv_slots=block_table[row, positions // self.block_size] * self.block_size + positions % self.block_size,
            query_lens_host=tuple(counts),
            seq_lens_host=tuple(lens),
        )
        ids = torch.tensor([token for i in order for token in pieces[i]])
        with torch.inference_mode():
            hidden = self.model(ids, positions, ForwardContext(self.backend, self.cache, batch))
        return dict(zip(order, hidden.split(counts), strict=True))
