"""EngineConfig: everything that can be set on one engine, checked once at the edge."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SyntheticConfig(BaseModel):
    """The stand-in for a model (``model: synthetic``): real scheduler, cache, process and stream, a clock for a GPU.

    It lets the service, its router and its autoscaler be tested and load-tested at a known rate with no weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_seconds: float = Field(0.01, ge=0, description="Time that a step takes, whatever its decodes.")
    prefill_tokens_per_second: float = Field(
        20_000, gt=0, description="Added to a step: its prefill tokens at this rate."
    )
    max_model_len: int = Field(4096, ge=16)
    context: int | None = Field(
        None, ge=1, description="Tokens that a token depends on, the last ones; null: all, which costs the host more."
    )


class EngineConfig(BaseModel):
    """Settings of one engine. Sizes are in tokens or blocks, memory in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        "smollm2-135m-instruct",
        description="A local folder or GGUF file, a Hugging Face id, a known name, or 'synthetic'.",
    )
    revision: str | None = Field(None, description="Hugging Face revision; None is the default branch.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", description="'auto' takes cuda where there is one, else cpu.")
    attention_backend: Literal["auto", "torch", "triton", "flash", "flash4"] = "auto"

    block_size: int = Field(
        16, ge=1, le=256, description="Tokens in one KV block: the grain of allocation and of prefix sharing."
    )
    num_blocks: int | None = Field(None, ge=1, description="KV blocks; None sizes the pool by memory.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Fraction of GPU memory for weights, KV pool and workspace."
    )
    cpu_kv_cache_bytes: int = Field(1 << 30, ge=1 << 20, description="KV pool's size on CPU, an upper bound.")
    kv_cache_dtype: Literal["auto", "float8"] = Field(
        "auto", description="'auto' is the model's dtype; float8 (e4m3, on a GPU) holds twice the tokens, less exactly."
    )
    enable_prefix_caching: bool = True

    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus output; None takes the model's.")
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Sequences that run at once. More is more throughput and slower tokens for each. "
        "None takes 1,024 on a GPU, 256 elsewhere.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one step. More is faster prefill and longer gaps between tokens. "
        "None takes 8,192 on a GPU, 2,048 elsewhere, and max_num_seqs if that is more.",
    )
    max_prefill_chunk: int | None = Field(
        None, ge=1, description="Longest piece of one prompt in one step; None is the whole budget."
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Fraction of blocks kept free at admission, so that running sequences can grow."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Order of admission and choice of whom to preempt: first come, first served, or by the requests' "
        "`priority`, the lowest first.",
    )

    cuda_graphs: bool = Field(
        True, description="On a GPU: run steps that only decode as CUDA graphs. Off saves seconds of start-up."
    )
    overlap: bool = Field(True, description="On a GPU: plan and launch a step while the one before it runs.")
    shared_prefix_decode: bool = Field(
        True, description="On a GPU: sequences that share prefix blocks read them once a step together, where it pays."
    )
    deterministic: bool = Field(
        False,
        description="On a GPU: the same tokens whatever else is in the batch, the cache or the past. Slower.",
    )

    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: temperature, top_k, top_p, min_p and repetition_penalty of the model's "
        "generation_config.json are those of requests that do not set them, field by field. none: they are 1, or off.",
    )
    seed: int = Field(0, description="Seeds the requests that bring none.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads for the model; None takes all cores that this process may use."
    )
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="after")
    def _budget_holds_a_decode_of_each(self) -> EngineConfig:
        if (self.max_num_batched_tokens or self.max_num_seqs or 0) < (self.max_num_seqs or 0):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence decodes one token a step"
            )
        return self

    @property
    def identity(self) -> str:
        """What decides which tokens come. Engines of one identity go on with each other's answers."""
        return f"{self.model}@{self.revision or ''}"

    def step_limits(self, device: str) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens) on a type of device, with the defaults filled in."""
        rows, tokens = (1024, 8192) if device == "cuda" else (256, 2048)
        rows = self.max_num_seqs or min(rows, self.max_num_batched_tokens or rows)
        return rows, self.max_num_batched_tokens or max(tokens, rows)
