"""BuiltRunner: a runner that is ready, and what building one shares whatever the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanoengine.config import EngineConfig
from nanoengine.outputs import EngineInfo, MemorySummary
from nanoengine.runner.base import Runner


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and what it turned out to be."""

    runner: Runner
    info: EngineInfo
    memory_summary: Callable[[], MemorySummary]


@dataclass(slots=True)
class Phases:
    """Seconds spent in each phase of start-up."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)


def model_len(config: EngineConfig, model_max: int, num_blocks: int) -> int:
    """Longest sequence: what was asked for, else the model's, but never more than one sequence alone can hold."""
    capacity = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is None:
        return min(model_max, capacity)
    if wanted > model_max:
        raise ValueError(f"max_model_len ({wanted}) exceeds the model's context of {model_max} tokens: lower it")
    if wanted > capacity:
        raise ValueError(
            f"max_model_len ({wanted}) exceeds what the KV pool holds ({capacity} tokens): lower it, "
            "or give the pool more memory (cpu_kv_cache_bytes, gpu_memory_utilization or num_blocks)"
        )
    return wanted
