"""The decoder-only transformer that Llama and its kin share, from token ids to logits.

Read it top down: ``DecoderLM.forward`` is the whole model. Families differ by the flags of ``ModelConfig`` that are
tested here: biases, norms on q and k, windows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoengine.attention.base import AttentionSpec, ForwardContext
from nanoengine.layers.linear import Embedding, Linear, TiedHead
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.ops import HeadNorms, Ops
from nanoengine.layers.rotary import RotaryEmbedding
from nanoengine.models.config import ModelConfig
from nanoengine.weights.load import Slot


class DecoderLM(nn.Module):
    """Implements ``registry.CausalLM``."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype, self._ops = config, dtype, ops
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position, device)
        self.layers = nn.ModuleList(Layer(config, index, ops, dtype, device) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype, device)
        self.head: Linear | TiedHead
        if config.tie_word_embeddings:
            self.head = TiedHead(self.embed, ops)
        else:
            parts = {"lm_head": config.vocab_size}
            self.head = Linear(config.hidden_size, parts, bias=False, ops=ops, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        x = self.embed(input_ids)
        rope = self._ops.rope(self.rotary.table, positions, self.dtype)
        delta = None  # of the last half layer: added where the next one normalises, in one pass over memory
        for layer in self.layers:
            x, delta = layer(x, delta, rope, ctx)
        return self.norm(x, delta)[1]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.head(hidden, out)

    def slots(self) -> dict[str, Slot]:
        slots = self.embed.slots("model.embed_tokens") | self.norm.slots("model.norm") | self.head.slots("")
        for index, layer in enumerate(self._layers()):
            slots |= layer.slots(f"model.layers.{index}.")
        return slots

    def ignores(self, name: str) -> bool:
        # Old checkpoints hold the rotary frequencies; some hold the head although it is tied.
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied_head or name.endswith(".rotary_emb.inv_freq")

    def weight_bytes(self) -> int:
        held = [*self.parameters(), *self.buffers()]
        held += [m.packed for m in self.modules() if isinstance(m, (Linear, TiedHead)) and m.packed is not None]
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in held)

    def finish(self) -> None:
        for module in self.modules():
            if isinstance(module, (Linear, TiedHead)):
                module.finish()

    def _layers(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer


class Layer(nn.Module):
    """Attention, then MLP, each normalised before and added to what came in."""

    def __init__(self, config: ModelConfig, index: int, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype, device)
        self.attention = Attention(config, index, ops, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype, device)
        self.mlp = MLP(config, ops, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, rope: object, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x, qkv = self.attention.qkv.of_normed(self.attention_norm, x, delta)
        x, activation = self.mlp.gate_up.swiglu_of_normed(self.mlp_norm, x, self.attention(qkv, rope, ctx))
        return x, self.mlp.down(activation)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return (
            self.attention_norm.slots(f"{prefix}input_layernorm")
            | self.attention.slots(f"{prefix}self_attn.")
            | self.mlp_norm.slots(f"{prefix}post_attention_layernorm")
            | self.mlp.slots(f"{prefix}mlp.")
        )


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads (arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig, index: int, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.spec = AttentionSpec(index, heads, kv_heads, head_dim, head_dim**-0.5, config.windows[index])
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.qkv = Linear(config.hidden_size, parts, bias=config.qkv_bias, ops=ops, dtype=dtype, device=device)
        out = {"o_proj": config.hidden_size}
        self.out = Linear(heads * head_dim, out, bias=config.output_bias, ops=ops, dtype=dtype, device=device)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, dtype, device) if config.qk_norm else None
        self._ops = ops

    def forward(self, qkv: Tensor, rope: object, ctx: ForwardContext) -> Tensor:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = self._ops.rope_and_store(qkv, rope, norms, *ctx.pages(self.spec), ctx.kv_slots)
        return self.out(ctx.attend(self.spec, q).flatten(1))

    def slots(self, prefix: str) -> dict[str, Slot]:
        slots = self.qkv.slots(prefix) | self.out.slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.slots(f"{prefix}q_norm") | self.k_norm.slots(f"{prefix}k_norm")
        return slots


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up = Linear(config.hidden_size, parts, bias=config.mlp_bias, ops=ops, dtype=dtype, device=device)
        down = {"down_proj": config.hidden_size}
        self.down = Linear(config.intermediate_size, down, bias=config.mlp_bias, ops=ops, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return self.gate_up.slots(prefix) | self.down.slots(prefix)
