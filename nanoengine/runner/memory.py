"""GPU memory: how much the KV pool may take, and an account of where all of it went."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoengine.outputs import MemorySummary

_GRAPH_BYTES = 4 << 20
"""What each further graph takes beside the memory that all share: its kernels' parameters."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a device at one instant."""

    total: int
    used: int  # by anyone
    allocated: int  # by live tensors of this process
    reserved: int  # by torch, live tensors included

    @classmethod
    def of(cls, device: torch.device) -> Usage:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, total - free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that ``run`` makes torch take beside what is live before it. Nothing of it is kept."""
    trim(device)
    before = Usage.of(device).reserved
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - before
    trim(device)
    return taken


def trim(device: torch.device) -> None:
    """Give back what torch holds without need."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def pool_bytes(utilization: float, workspace: int, graph: int, num_graphs: int, device: torch.device) -> int:
    """What is left for KV blocks of ``utilization`` of the device, after all that is there now, a step's ``workspace``
    and ``num_graphs`` graphs that share the memory of the largest, ``graph``."""
    usage = Usage.of(device)
    return int(usage.total * utilization) - usage.used - workspace - graph - num_graphs * _GRAPH_BYTES


class MemoryAccount:
    """Who holds a device's memory. Made when everything is in place; ``summary`` then tells what has changed."""

    def __init__(
        self, device: torch.device, *, weights: int, kv_pool: int, graphs: int = 0, workspace: int = 0
    ) -> None:
        self._device = device
        self._weights, self._kv_pool, self._graphs, self._workspace = weights, kv_pool, graphs, workspace
        self._at_ready = self._allocated()

    def _allocated(self) -> int:
        return Usage.of(self._device).allocated if self._device.type == "cuda" else 0

    def summary(self) -> MemorySummary:
        """The account at this instant; waits for the device."""
        known = {
            "weights": self._weights,
            "kv_pool": self._kv_pool,
            "graphs": self._graphs,
            "workspace": self._workspace,
        }
        if self._device.type != "cuda":
            return MemorySummary(**known)
        usage = Usage.of(self._device)
        return MemorySummary(
            **known,
            total=usage.total,
            used=usage.used,
            other=usage.used - usage.reserved,
            growth=usage.allocated - self._at_ready,
        )
