"""Load a real model into a ModelRunner: device, dtype, attention backend, weights, KV pool, sampler, graphs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend, KVCache
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner
from nanoengine.attention.select import select_backend
from nanoengine.config import EngineConfig
from nanoengine.errors import ModelLoadError
from nanoengine.layers.select import select_ops
from nanoengine.models.config import ModelConfig, load_model_config
from nanoengine.models.registry import CausalLM, load_model
from nanoengine.outputs import EngineInfo
from nanoengine.runner.built import BuiltRunner, Phases, model_len
from nanoengine.runner.cuda_graphs import batch_sizes
from nanoengine.runner.memory import MemoryAccount, Usage, peak, pool_bytes, trim
from nanoengine.runner.model_runner import ModelRunner, StepLimits
from nanoengine.runner.piecewise_graphs import token_counts
from nanoengine.runner.prompt_graphs import prompt_sizes
from nanoengine.sampling.params import SamplingParams
from nanoengine.sampling.sampler import Sampler
from nanoengine.scheduling.step import Admission, IntArray, Step
from nanoengine.weights.sources import ModelFiles

log = logging.getLogger("nanoengine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHED_BLOCKS = 1 << 16  # tiny models would fill a large memory with millions of blocks, each an object to keep


def load_runner(
    config: EngineConfig, files: ModelFiles, eos_token_ids: tuple[int, ...], num_tokens: int | None, phases: Phases
) -> BuiltRunner:
    """Load a model from its files; raises as ``build_runner`` does."""
    device = _device(config)
    model_config = load_model_config(files)
    # Chat models are known whose config names the end of a document only, and whose tokenizer that of a turn.
    eos_token_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids)))
    dtype = _dtype(config, model_config, device)
    kv_dtype = _kv_dtype(config, dtype, device)
    # Before the weights, so that a model that no backend can serve fails at once.
    backend = select_backend(
        config.attention_backend,
        device=device,
        head_dim=model_config.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=config.deterministic,
    )
    ops = select_ops(device, deterministic=config.deterministic)
    with phases("weights"):
        model = load_model(files, model_config, ops, dtype=dtype, device=device)
    # Rows of the output layer beyond the tokenizer's ids are padding, and untrained: no token, and any logit.
    num_tokens = min(num_tokens or model_config.vocab_size, model_config.vocab_size)
    rows, tokens = config.step_limits(device.type)
    fused = None
    if ops.fused:
        from nanoengine.sampling.device import DeviceSampler  # imports triton

        fused = DeviceSampler(rows, next((i for i in eos_token_ids if i < num_tokens), 0), device)
    longest = config.max_model_len or model_config.max_position
    graphs = config.cuda_graphs and ops.fused and backend.planned
    parts = _Parts(
        config=config,
        model_config=model_config,
        model=model,
        backend=backend,
        sampler=Sampler(rows, num_tokens, eos_token_ids, device, config.seed, fused),
        limits=StepLimits(rows, tokens, -(-longest // config.block_size)),
        device=device,
        kv_dtype=kv_dtype,
        graph_sizes=tuple(batch_sizes(rows)) if graphs else (),
        graph_tokens=tuple(token_counts(tokens, model_config)) if graphs else (),
    )
    workspace, available = 0, config.cpu_kv_cache_bytes
    if device.type == "cuda":
        with phases("profile"):
            workspace, available = _profile(parts)
    with phases("kv_pool"):
        num_blocks = config.num_blocks or _pool_blocks(parts, available)
        runner = parts.runner(parts.cache(num_blocks))
    with phases("graphs"), _grown(device) as captured:
        if graphs:
            runner.capture(parts.graph_sizes, parts.graph_tokens)
    if device.type == "cuda":
        # They take the workspace, and compile what is still to compile: flash-attn-4 takes seconds for its first long
        # row, in which all streams would wait.
        parts.largest_step(runner)
        parts.longest_row(runner)
    info = EngineInfo(
        model=config.model,
        max_model_len=model_len(config, model_config.max_position, num_blocks),
        vocab_size=model_config.vocab_size,
        num_tokens=num_tokens,
        eos_token_ids=eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        load_seconds=phases.seconds,
    )
    account = MemoryAccount(
        device,
        weights=model.weight_bytes(),
        kv_pool=num_blocks * parts.block_bytes,
        graphs=captured.bytes,
        workspace=workspace,
    )
    return BuiltRunner(runner, info, account.summary)


@dataclass(frozen=True, slots=True)
class _Parts:
    """All that a runner is made of but the KV pool, whose size depends on what the rest takes."""

    config: EngineConfig
    model_config: ModelConfig
    model: CausalLM
    backend: AttentionBackend
    sampler: Sampler
    limits: StepLimits
    device: torch.device
    kv_dtype: torch.dtype
    graph_sizes: tuple[int, ...]  # rows of decode steps; empty: no graphs
    graph_tokens: tuple[int, ...]  # of other steps

    @property
    def block_bytes(self) -> int:
        model = self.model_config
        elements = 2 * model.num_layers * self.config.block_size * model.num_kv_heads * model.head_dim
        return elements * self.kv_dtype.itemsize

    def cache(self, num_blocks: int, layers: int | None = None) -> KVCache:
        return KVCache.allocate(
            layers=layers or self.model_config.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            kv_heads=self.model_config.num_kv_heads,
            head_dim=self.model_config.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def runner(self, cache: KVCache) -> ModelRunner:
        depth = 1 if self.config.overlap and self.device.type == "cuda" else 0
        return ModelRunner(
            self.model,
            self.backend,
            cache,
            self.sampler,
            limits=self.limits,
            device=self.device,
            depth=depth,
            planner=self.planner() if self.backend.planned else None,
        )

    def planner(self) -> DecodePlanner:
        model, config = self.model_config, self.config
        layout = DecodeLayout(
            max_rows=self.limits.rows,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            block_size=config.block_size,
            token_bytes=2 * model.num_kv_heads * model.head_dim * self.kv_dtype.itemsize,
            windows=tuple(dict.fromkeys(model.windows)),
            share_prefixes=config.shared_prefix_decode and not config.deterministic,
        )
        return DecodePlanner(layout)

    def largest_step(self, runner: ModelRunner) -> None:
        """Run a step that needs the most memory: all rows and all tokens, all sampled, some in the costliest way."""
        rows, tokens = self.limits.rows, self.limits.tokens
        counts = np.full(rows, tokens // rows, np.int32)
        counts[: tokens % rows] += 1
        self._prefill(runner, counts)

    def longest_row(self, runner: ModelRunner) -> None:
        """Run a step of one prompt, as long as a step or a sequence can be."""
        limits = self.limits
        most = min(limits.tokens, limits.blocks * self.config.block_size, self.model_config.max_position)
        self._prefill(runner, np.array([most], np.int32))

    def _prefill(self, runner: ModelRunner, counts: IntArray) -> None:
        """Run a step of prompts of these lengths, in blocks that are nobody's yet."""
        rows, tokens = len(counts), int(counts.sum())
        costly = SamplingParams(presence_penalty=1.0, top_k=1000, top_p=0.9, min_p=0.01, logprobs=20)
        none = np.empty(0, np.int32)
        step = Step(
            id=0,
            num_decodes=0,
            keys=np.zeros(rows, np.int64),
            slots=np.arange(rows, dtype=np.int32),
            starts=np.zeros(rows, np.int32),
            counts=counts,
            samples=np.ones(rows, np.bool_),
            tokens=np.zeros(tokens, np.int32),
            block_table=np.zeros((rows, -(-int(counts.max()) // self.config.block_size)), np.int32),
            admissions=tuple(Admission(slot, 0, costly, none, none) for slot in range(min(rows, 64))),
            constrained=none,
        )
        runner.launch(step).result()
        torch.cuda.synchronize(self.device)


def _profile(parts: _Parts) -> tuple[int, int]:
    """(bytes of a step's workspace, bytes that this leaves for the KV pool)."""
    device, layers = parts.device, parts.model_config.num_layers

    def measure() -> tuple[int, int]:
        # One layer stands for all: what is measured is the step and not the cache.
        one = parts.cache(parts.limits.blocks + 1, layers=1)
        trial = parts.runner(KVCache(one.keys * layers, one.values * layers))
        workspace = peak(lambda: parts.largest_step(trial), device)
        with _grown(device) as graph:
            if parts.graph_sizes:
                trial.capture(parts.graph_sizes[-1:], parts.graph_tokens[-1:])
        return workspace, graph.bytes

    workspace, graph_bytes = measure()
    trim(device)
    graphs = 3 * len(parts.graph_sizes)  # with prefixes, without, of rows with masks
    graphs += len(parts.graph_tokens) + len(prompt_sizes(parts.graph_tokens))
    return workspace, pool_bytes(parts.config.gpu_memory_utilization, workspace, graph_bytes, graphs, device)


@dataclass(slots=True)
class _Growth:
    bytes: int = 0


@contextmanager
def _grown(device: torch.device) -> Iterator[_Growth]:
    """How much more of the device is used after the block than before it."""
    growth = _Growth()
    if device.type != "cuda":
        yield growth
        return
    before = Usage.of(device).used
    yield growth
    growth.bytes = Usage.of(device).used - before


def _device(config: EngineConfig) -> torch.device:
    device = torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    elif device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(
                "device is cuda, but torch finds no GPU: set it to auto or cpu, or install torch for CUDA"
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if device.type != "cpu":
        default = torch.float16 if model.dtype == "float16" else torch.bfloat16
        return default if config.dtype == "auto" else _DTYPES[config.dtype]
    # Half the bytes are read, but without instructions for it every product is converted, and that costs more: on an
    # EPYC with those for bfloat16 alone, a prefill in float16 takes five times what it takes in float32.
    native = {
        torch.float32: True,
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        torch.float16: torch.cpu._is_amx_fp16_supported(),
    }
    if config.dtype == "auto":
        return torch.bfloat16 if native[torch.bfloat16] else torch.float32
    dtype = _DTYPES[config.dtype]
    if not native[dtype]:
        log.warning("dtype %s is slow on this CPU, which has no instructions for it: float32 is faster", config.dtype)
    return dtype


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("kv_cache_dtype float8 needs a GPU of compute capability 8.9 or more: leave it at auto")
    return torch.float8_e4m3fn


def _pool_blocks(parts: _Parts, available: int) -> int:
    """How many KV blocks fit the memory given to the pool: as many as all sequences could ever use at once, and beyond
    that some for the prefixes of those that are gone."""
    blocks = available // parts.block_bytes
    if blocks < 1:
        raise ValueError(
            f"no memory for the KV pool: one block takes {parts.block_bytes:,} bytes and {max(available, 0):,} are "
            "left; raise cpu_kv_cache_bytes or gpu_memory_utilization, or lower block_size"
        )
    return min(blocks, max(parts.limits.rows * parts.limits.blocks, _CACHED_BLOCKS))
