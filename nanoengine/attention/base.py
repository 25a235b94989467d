"""The interface between models and attention backends over a paged KV cache.

A model stores keys and values in ``ctx.pages``, calls ``ctx.attend(layer, q)``, and knows no more of pages; a backend
implements ``decode`` and ``prefill`` over a block table and knows nothing of models. The context is passed explicitly,
so a process can hold several engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.decode_plan import DecodePlanner
from nanoengine.attention.shared_prefix import PrefixBounds


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer needs, fixed at load."""

    layer: int  # index into the KV cache
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    window: int | None = None  # sliding window: a query at position p sees positions > p - window; None is full


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which decode rows read a prefix of their blocks together: a PrefixPlan on the device."""

    items: Tensor  # int32 [items, 5]
    rows: Tensor  # int32 [5, max_rows]
    parts: int  # most partial results

    @classmethod
    def views(cls, buffers: Sequence[Tensor], bounds: PrefixBounds) -> SharedPrefixes:
        """Of int32 device buffers of ``bounds.shapes``, into which ``PrefixPlan.arrays()`` are copied."""
        items, rows = buffers
        return cls(items, rows, bounds.parts)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Who reads what in a step's decodes, for layers of one window: a DecodePlan on the device."""

    items: Tensor  # int32 [items, 4]
    rows: Tensor  # int32 [2, rows]
    done: Tensor  # int32 [rows or more, kv_heads]: zeros, between kernels
    shared: SharedPrefixes | None = None

    @classmethod
    def views(cls, arrays: Sequence[Tensor], planner: DecodePlanner, done: Tensor) -> dict[int | None, DecodeWork]:
        """By window, of the arrays of a plan."""
        windows, shared = planner.windows, None
        if len(arrays) > 2 * len(windows):
            assert planner.prefix_bounds is not None
            shared = SharedPrefixes.views(arrays[-2:], planner.prefix_bounds)
        return {
            window: cls(arrays[2 * i], arrays[2 * i + 1], done, shared if window is None else None)
            for i, window in enumerate(windows)
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """The layout of one step's tokens, shared by all layers. Rows are sequences; decode rows (one token) come first.

    Tensors are on the device; the ``*_host`` fields are Python copies for backends that loop over rows.
    """

    num_decodes: int
    query_start: Tensor  # int32 [rows + 1] offsets of each row's tokens in the flat token axis
    seq_lens: Tensor  # int32 [rows] context length of each row, this step's tokens included
    block_table: Tensor  # int32 [rows, width]
    kv_slots: Tensor  # int64 [tokens] where each token's K and V go: block * block_size + offset
    query_lens_host: tuple[int, ...]  # [rows]; empty while a graph is recorded: the device alone knows then
    seq_lens_host: tuple[int, ...]  # [rows]; likewise
    work: Mapping[int | None, DecodeWork] = field(default_factory=dict)  # by window; for backends that ask for plans


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers: one pair of tensors a layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return cls(*(tuple(_zeros(shape, dtype, device) for _ in range(layers)) for _ in range(2)))

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a masked position still enters a product with weight 0, and 0 * NaN of stale memory is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves untouched pages to the kernel where torch writes each of them: a pool of 1 GiB costs no time, and no
    # memory before it is used.
    integers = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, integers)).view(dtype)


class AttentionBackend(ABC):
    """Attention over pages. ``prepare`` runs once a step, ``decode`` and ``prefill`` once a layer."""

    name: str
    planned = False  # whether decode takes Batch.work, and with it, device tensors alone: as a CUDA graph needs

    def prepare(self, batch: Batch, block_size: int) -> object:
        """Work out what all layers of a step share (indices, masks, split plans); handed to decode and prefill."""
        return None

    @abstractmethod
    def decode(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        """Rows [0, num_decodes): q is [num_decodes, heads, head_dim]; returns that shape. K and V are stored."""

    @abstractmethod
    def prefill(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        """Rows [num_decodes, rows): q is [their tokens, heads, head_dim]; causal over each row's whole context."""


class ForwardContext:
    """All that a model's forward pass needs beside its input: made once per step, passed down explicitly."""

    __slots__ = ("_backend", "_batch", "_cache", "_plan")

    def __init__(self, backend: AttentionBackend, cache: KVCache, batch: Batch) -> None:
        self._backend, self._cache, self._batch = backend, cache, batch
        self._plan = backend.prepare(batch, cache.block_size)

    @property
    def kv_slots(self) -> Tensor:
        """int64 [T] where each token's key and value go: block * block_size + offset."""
        return self._batch.kv_slots

    def pages(self, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [blocks, block_size, kv_heads, head_dim]: written before ``attend``."""
        return self._cache.keys[spec.layer], self._cache.values[spec.layer]

    def attend(self, spec: AttentionSpec, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Attend q, [T, heads, head_dim], to all that its row may see of the pages; returns q's shape, in ``out`` if
        that is given."""
        keys, values = self.pages(spec)
        batch, backend = self._batch, self._backend
        n = batch.num_decodes
        if 0 < n < q.shape[0]:
            decoded = backend.decode(spec, q[:n], keys, values, batch, self._plan)
            return torch.cat((decoded, backend.prefill(spec, q[n:], keys, values, batch, self._plan)), out=out)
        attended = (backend.decode if n else backend.prefill)(spec, q, keys, values, batch, self._plan)
        return attended if out is None else out.copy_(attended)
