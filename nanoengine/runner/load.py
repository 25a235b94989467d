"""Load a real model into a ModelRunner: device, dtype, attention backend, weights, KV pool, sampler."""

from __future__ import annotations

import os

import torch

from nanoengine.attention.base import KVCache
from nanoengine.attention.select import select_backend
from nanoengine.config import EngineConfig
from nanoengine.layers.ops import TorchOps
from nanoengine.models.config import ModelConfig, load_model_config
from nanoengine.models.registry import load_model
from nanoengine.outputs import EngineInfo
from nanoengine.runner.built import BuiltRunner, Phases, model_len
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.sampling.sampler import Sampler
from nanoengine.weights.sources import ModelFiles


def load_runner(config: EngineConfig, files: ModelFiles, eos_token_ids: tuple[int, ...], phases: Phases) -> BuiltRunner:
    """Load a model from its files; raises as ``build_runner`` does."""
    device = torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    model_config = load_model_config(files)
    # Chat models are known whose config names the end of a document only, and whose tokenizer that of a turn.
    eos_token_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids)))
    dtype = _dtype(config, model_config, device)
    # Before the weights, so that a model that no backend can serve fails at once.
    backend = select_backend(config.attention_backend, device=device, head_dim=model_config.head_dim, dtype=dtype)
    with phases("weights"):
        model = load_model(files, model_config, TorchOps(), dtype=dtype, device=device)
    with phases("kv_pool"):
        num_blocks = config.num_blocks or _pool_blocks(config, model_config, dtype, device)
        cache = KVCache.allocate(
            layers=model_config.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=dtype,
            device=device,
        )
    sampler = Sampler(config.max_num_seqs, model_config.vocab_size, eos_token_ids, device=device, seed=config.seed)
    runner = ModelRunner(model, backend, cache, sampler, num_slots=config.max_num_seqs, device=device)
    info = EngineInfo(
        model=config.model,
        max_model_len=model_len(config, model_config.max_position, num_blocks),
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        load_seconds=phases.seconds,
    )
    return BuiltRunner(runner, info)


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    if device.type == "cpu":
        # bf16 halves the bytes read, but without instructions for it every product is converted, and that costs more.
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if has_bf16 else torch.float32
    return torch.float16 if model.dtype == "float16" else torch.bfloat16


def _pool_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """How many KV blocks fit the memory given to the pool, and no more than all sequences could ever use."""
    block_bytes = 2 * model.num_layers * config.block_size * model.num_kv_heads * model.head_dim * dtype.itemsize
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(total * config.gpu_memory_utilization) - (total - free)
    else:
        memory = config.cpu_kv_cache_bytes
    blocks = memory // block_bytes
    if blocks < 1:
        raise ValueError(
            f"no memory for the KV pool: one block takes {block_bytes:,} bytes and {max(memory, 0):,} are left; "
            "raise cpu_kv_cache_bytes or gpu_memory_utilization, or lower block_size"
        )
    longest = config.max_model_len or model.max_position
    return int(min(blocks, -(-config.max_num_seqs * longest // config.block_size)))
