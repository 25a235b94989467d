"""The reference backend: gather a row's keys and values out of the pages, then torch's own attention. Any device.

What it gathers is exactly the tokens that a row may see: where rows of a batch differ in length, the gap is filled
with the row's own first visible token and masked. So nothing of another row, and nothing stale, is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoengine.attention.base import AttentionBackend, AttentionSpec, Batch

_SPLIT_TOKENS = 1024
"""Decode rows are gathered together, padded to the longest, unless splitting them saves this many padded tokens: about
what a second gather and product cost. SmolLM2 on 2 cores, 8 rows, ms a step: of 50 to 600 tokens 80.5 in one group,
77.3 so, 79.2 at 512 (four groups); seven rows of 60 and one of 600 76.5, 63.9, 62.7; all of 600 82."""

_GROUP_TOKENS = 1 << 17
"""Most tokens, padding included, that are gathered at once: bounds the workspace."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows attended together."""

    rows: Tensor | None  # int64 [r] their place among the decode rows; None is all of them, in order
    slots: Tensor  # int64 [r * longest] where their visible tokens lie in the cache
    mask: Tensor | None  # [r, 1, 1, longest] 0 or -inf; None where all are equally long


class _Plan:
    """What the layers of a step share. Layers differ in their window only, so it is worked out once for each."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch, self._block_size = batch, block_size
        self._groups: dict[int | None, list[_Group]] = {}
        self._prefills: dict[int | None, list[tuple[Tensor, Tensor | None]]] = {}

    def groups(self, window: int | None, dtype: torch.dtype) -> list[_Group]:
        """Decode rows in groups of similar length."""
        if window not in self._groups:
            lens = self._batch.seq_lens_host[: self._batch.num_decodes]
            self._groups[window] = [self._group(rows, window, dtype) for rows in _similar(lens, window)]
        return self._groups[window]

    def _group(self, rows: list[int], window: int | None, dtype: torch.dtype) -> _Group:
        batch, device = self._batch, self._batch.seq_lens.device
        in_order = rows == list(range(batch.num_decodes))
        picked = None if in_order else torch.tensor(rows, device=device)
        ends = batch.seq_lens[: batch.num_decodes] if picked is None else batch.seq_lens[picked]
        table = batch.block_table[: batch.num_decodes] if picked is None else batch.block_table[picked]
        visible = [_visible(batch.seq_lens_host[row], window) for row in rows]
        longest = max(visible)
        first = ends - (ends if window is None else ends.clamp(max=window))
        positions = first[:, None] + torch.arange(longest, device=device)
        inside = positions < ends[:, None]
        positions = torch.where(inside, positions, first[:, None]).long()
        mask = None
        if min(visible) < longest:
            mask = torch.zeros(inside.shape, dtype=dtype, device=device).masked_fill_(~inside, float("-inf"))
            mask = mask[:, None, None]
        return _Group(picked, self._slots(table, positions).flatten(), mask)

    def prefill(self, row: int, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Slots of the tokens that any of the row's queries sees, and which query sees which; None is plain causal."""
        if window not in self._prefills:
            rows = range(self._batch.num_decodes, len(self._batch.seq_lens_host))
            self._prefills[window] = [self._prefill(row, window) for row in rows]
        return self._prefills[window][row - self._batch.num_decodes]

    def _prefill(self, row: int, window: int | None) -> tuple[Tensor, Tensor | None]:
        batch, device = self._batch, self._batch.seq_lens.device
        end, queries = batch.seq_lens_host[row], batch.query_lens_host[row]
        start = end - queries  # position of the first query
        first = 0 if window is None else max(0, start - window + 1)
        keys = torch.arange(first, end, device=device)
        slots = self._slots(batch.block_table[row : row + 1], keys[None]).flatten()
        if first == start and (window is None or queries <= window):
            return slots, None
        query = torch.arange(start, end, device=device)[:, None]
        mask = keys <= query
        return slots, mask if window is None else mask & (keys > query - window)

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """Positions [r, n] of r rows -> where they lie in the cache."""
        blocks = table.long().gather(1, positions // self._block_size)
        return blocks * self._block_size + positions % self._block_size


class TorchAttention(AttentionBackend):
    """See the module."""

    name = "torch"

    def prepare(self, batch: Batch, block_size: int) -> _Plan:
        return _Plan(batch, block_size)

    def decode(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        assert isinstance(plan, _Plan)
        groups = plan.groups(spec.window, q.dtype)
        if len(groups) == 1:
            return _attend(spec, q, keys, values, groups[0])
        out = torch.empty_like(q)
        for group in groups:
            assert group.rows is not None
            out.index_copy_(0, group.rows, _attend(spec, q.index_select(0, group.rows), keys, values, group))
        return out

    def prefill(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        assert isinstance(plan, _Plan)
        out = torch.empty_like(q)
        begin = 0
        for row in range(batch.num_decodes, len(batch.query_lens_host)):
            end = begin + batch.query_lens_host[row]
            slots, mask = plan.prefill(row, spec.window)
            out[begin:end] = (
                F.scaled_dot_product_attention(
                    q[begin:end].transpose(0, 1)[None],
                    _gathered(keys, slots, 1),
                    _gathered(values, slots, 1),
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=spec.scale,
                    enable_gqa=spec.num_heads != spec.num_kv_heads,
                )
                .squeeze(0)
                .transpose(0, 1)
            )
            begin = end
        return out


def _attend(spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
    """One query a row, q [r, heads, head_dim] -> same. The query heads that share a key head are taken as a sequence of
    queries: then the keys need no copy per query head."""
    rows = len(q)
    grouped = q.view(rows, spec.num_kv_heads, -1, spec.head_dim)
    mask = group.mask
    if mask is not None:
        mask = mask.expand(-1, 1, grouped.shape[2], -1)
    k, v = _gathered(keys, group.slots, rows), _gathered(values, group.slots, rows)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.scale)
    return out.reshape(q.shape)


def _gathered(cache: Tensor, slots: Tensor, rows: int) -> Tensor:
    """[rows, kv_heads, tokens, head_dim] of the tokens at ``slots``."""
    flat = cache.view(-1, *cache.shape[2:])
    return flat.index_select(0, slots).view(rows, -1, *cache.shape[2:]).transpose(1, 2)


def _visible(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _similar(lens: tuple[int, ...], window: int | None) -> list[list[int]]:
    """Rows in groups, cut where that saves enough padding; one group stays in the order of the rows."""
    order = sorted(range(len(lens)), key=lambda row: -_visible(lens[row], window))
    groups: list[list[int]] = []
    for i, row in enumerate(order):
        longest = _visible(lens[groups[-1][0]], window) if groups else 0
        saved = (longest - _visible(lens[row], window)) * (len(order) - i)
        if not groups or saved > _SPLIT_TOKENS or longest * (len(groups[-1]) + 1) > _GROUP_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return groups if len(groups) > 1 else [sorted(order)]
