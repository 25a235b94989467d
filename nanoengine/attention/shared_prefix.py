"""Which decode rows read a common prefix of the KV cache together: plans for kernels/shared_prefix_decode.py. No torch.

Rows whose block tables begin with the same physical blocks may form a group: the shared blocks are then read once for
all of them, the rest of each row on its own, and the two are merged by log-sum-exp (Hydragen, Juravsky et al., 2024;
here for several groups at once, of any nesting, over a paged cache).

A plan is two int32 arrays of a fixed size, so that a CUDA graph captured once reads whatever plan lies in its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

LANES = 64
"""Rows times query heads of one key-value head that a program takes: the least that fills a Hopper tensor core, and few
enough that a program of it is bound by memory still."""

_PROGRAMS = 264
"""Programs of one launch, at least, if the prefixes are long enough: 2 for each processor of an H200. With 4 there is
more to merge: 63 us where it took 70, for 16 prefixes of 2,048 tokens read by 32 rows each."""

_LEAST_SPLIT = 256
"""Tokens of prefix below which a program is not worth its partial result."""

_WORTH_BYTES = 40_000_000
"""Reading saved in a layer, in bytes, above which a plan pays: the additional kernel and the larger merge take some 10
us, in which an H200 reads that much."""

_GROUP_TOKENS = 128
"""What a group costs in itself, in tokens read: one more program and partial result for each of its rows."""

_MAX_LEVELS = 8
"""Prefixes nested in one another among which the best are chosen; what lies deeper is not looked at, which bounds the
search."""


@dataclass(frozen=True, slots=True)
class PrefixBounds:
    """Sizes that hold every plan for a number of rows."""

    items: int  # programs for each key-value head
    rows: int
    parts: int  # partial results, each of one row under all heads

    @classmethod
    def of(cls, max_rows: int, *, num_heads: int, num_kv_heads: int) -> PrefixBounds:
        """A plan's splits add ``target`` items to those of one split a tile (see ``_laid_out``)."""
        together = rows_together(num_heads // num_kv_heads)
        target = _target(num_kv_heads)
        tiles = max_rows // 2 if together > 1 else max_rows  # a group has two rows or more
        return cls(items=target + tiles, rows=max_rows, parts=max_rows + together * target)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the arrays of a plan."""
        return (self.items, 5), (5, self.rows)


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What shares what.

    ``items`` int32 [bounds.items, 5]: first member, members (0: nothing to do), first position, end, first part.
    ``rows`` int32 [5, bounds.rows]: members (rows, group by group), then for each row: tokens of shared prefix (0: in
    no group), its first part, its parts, the step from one of its parts to the next.
    """

    items: IntArray
    rows: IntArray
    saved_tokens: int  # tokens of KV that a layer does not read again

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Of ``PrefixBounds.shapes``; the same objects as long as nothing changed. Never written to again."""
        return self.items, self.rows


def rows_together(group: int) -> int:
    """Rows of one program, if ``group`` query heads share a key-value head."""
    return max(1, LANES // group)


def _target(num_kv_heads: int) -> int:
    return -(-_PROGRAMS // num_kv_heads)


class SharedPrefixPlanner:
    """Plans decode steps one after the other; keeps the last plan, since most steps change no prefix.

    Args:
        bounds: sizes of its plans.
        block_size: tokens of a KV block.
        num_heads, num_kv_heads: of a layer (of this device's share of it).
        token_bytes: keys and values of one token in one layer, of all heads.
    """

    def __init__(
        self, bounds: PrefixBounds, *, block_size: int, num_heads: int, num_kv_heads: int, token_bytes: int
    ) -> None:
        self.bounds = bounds
        self.nothing = PrefixPlan(*_empty(bounds), saved_tokens=0)
        """The plan of no groups: for the buffers of a graph that has the kernels in it, where ``plan`` gives None."""
        self._block_size = block_size
        self._together = rows_together(num_heads // num_kv_heads)
        self._target = _target(num_kv_heads)
        self._worth = _WORTH_BYTES / token_bytes
        self._seen: IntArray = np.zeros((0, 1), np.int32)  # the columns of the last table that its plan follows from
        self._plan: PrefixPlan | None = None

    def plan(self, table: IntArray, seq_lens: IntArray) -> PrefixPlan | None:
        """Group decode rows: ``table`` int32 [rows, width], ``seq_lens`` int32 [rows], this step's token included.

        None where sharing would not pay. Entries of the table past a row's length may be anything.
        """
        if self._still_holds(table, seq_lens):
            return self._plan
        self._plan, depth = None, 1
        first = np.sort(table[:, 0])
        if (first[1:] == first[:-1]).any():
            order, depths, depth = _sorted_by_prefix(table, (seq_lens - 1) // self._block_size)
            blocks, owner = best_groups(depths, cost=_GROUP_TOKENS / self._block_size)
            sizes = np.bincount(owner, minlength=1 + len(blocks))[1:]
            saved = int(((sizes - 1) * blocks).sum()) * self._block_size
            if len(blocks) and saved >= self._worth:
                members = order[np.argsort(owner, kind="stable")[len(owner) - sizes.sum() :]]
                self._plan = self._laid_out(members, sizes, blocks * self._block_size, saved)
        self._seen = table[:, :depth].copy()
        return self._plan

    def _still_holds(self, table: IntArray, seq_lens: IntArray) -> bool:
        rows, depth = self._seen.shape
        if len(table) != rows or table.shape[1] < depth or not np.array_equal(table[:, :depth], self._seen):
            return False
        return self._plan is None or bool((seq_lens > self._plan.rows[1, :rows]).all())

    def _laid_out(self, members: LongArray, sizes: LongArray, tokens: LongArray, saved: int) -> PrefixPlan:
        """The rows of all groups, one group after the other, with the size and shared tokens of each, as a plan.

        Of the tokens that all tiles read together, each program takes the share that gives ``target`` programs. A
        tile of n tokens so gets at most 1 + n / share of them, all tiles ``target`` more than there are tiles.
        """
        items, rows = _empty(self.bounds)
        tiles = -(-sizes // self._together)
        share = max(_LEAST_SPLIT, -(-int((tiles * tokens).sum()) // self._target))
        splits = -(-tokens // share)
        spans = -(-tokens // splits)

        group = np.repeat(np.arange(len(sizes)), tiles)  # of each tile
        start = _counted(tiles) * self._together  # in its group
        first = (np.cumsum(sizes) - sizes)[group] + start
        count = np.minimum(sizes[group] - start, self._together)
        parts = splits[group] * count
        part = np.cumsum(parts) - parts

        tile = np.repeat(np.arange(len(group)), splits[group])  # of each item
        split = _counted(splits[group])
        begin = split * spans[group[tile]]
        end = np.minimum(begin + spans[group[tile]], tokens[group[tile]])
        items[: len(tile)] = np.stack((first[tile], count[tile], begin, end, part[tile] + split * count[tile]), 1)

        tile = np.repeat(np.arange(len(group)), count)  # of each member
        rows[0, : len(members)] = members
        rows[1, members] = tokens[group[tile]]
        rows[2, members] = part[tile] + _counted(count)
        rows[3, members] = splits[group[tile]]
        rows[4, members] = count[tile]
        return PrefixPlan(items, rows, saved)


def _empty(bounds: PrefixBounds) -> tuple[IntArray, IntArray]:
    items, rows = bounds.shapes
    return np.zeros(items, np.int32), np.zeros(rows, np.int32)


def _counted(counts: LongArray) -> LongArray:
    """0 .. count for each of the counts, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _sorted_by_prefix(table: IntArray, most: IntArray) -> tuple[LongArray, list[int], int]:
    """Rows in an order that has those with a common prefix side by side, the blocks that neighbours have in common
    (no more than ``most`` of either), and the number of leading columns that this follows from."""
    width = max(1, min(table.shape[1], int(most.max())))
    data, step = np.ascontiguousarray(table[:, :width]).tobytes(), width * table.itemsize
    keys = [data[at : at + step] for at in range(0, len(data), step)]  # any order of blocks serves, that of bytes too
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    ordered = table[order, :width]
    differs = np.ones((len(order) - 1, width + 1), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[:, :width])
    common = differs.argmax(axis=1)
    most = most[order]
    return order, np.minimum(common, np.minimum(most[1:], most[:-1])).tolist(), min(width, int(common.max()) + 1)


@dataclass(slots=True)
class _Prefix:
    """A node of the tree of prefixes: places [first, end) of the order have ``depth`` blocks in common."""

    depth: int
    first: int
    end: int = 0
    children: list[_Prefix] = field(default_factory=list)
    saving: dict[int, tuple[float, bool]] = field(default_factory=dict)  # by the depth of the group around it

    @property
    def own(self) -> int:
        """Places in none of its children."""
        return self.end - self.first - sum(child.end - child.first for child in self.children)


def best_groups(depths: list[int], *, cost: float) -> tuple[LongArray, LongArray]:
    """The disjoint groups of places that save most, where neighbours i, i + 1 have ``depths[i]`` blocks in common.

    Gives the blocks in common of each group, and which one each place is in, from 1 on (0: none). A group of k places
    saves k - 1 times its blocks, and costs ``cost``.

    With the set of prefixes given that are groups, each place is best off in the longest of them: so this is a choice
    of a set of nodes in the tree of prefixes, and what a subtree can save depends only on the group around it.
    """
    root = _tree(depths)
    _saving(root, 0, cost)
    owner = np.zeros(root.end, np.int64)
    groups = list(_chosen(root, 0))
    for number, group in enumerate(groups, 1):  # outer ones first
        owner[group.first : group.end] = number
    return np.array([group.depth for group in groups], np.int64), owner


def _tree(depths: list[int]) -> _Prefix:
    """The intervals of places that have something in common, nested (Abouelhoda et al., 2004, over block tables)."""
    stack = [_Prefix(0, 0)]
    for place, depth in enumerate((*depths, 0)):
        first = place
        while stack[-1].depth > depth:
            closed = stack.pop()
            closed.end, first = place + 1, closed.first
            if stack[-1].depth < depth:
                stack.append(_Prefix(depth, first))
            stack[-1].children.append(closed)
        if stack[-1].depth < depth and len(stack) <= _MAX_LEVELS:
            stack.append(_Prefix(depth, first))
    stack[0].end = len(depths) + 1
    return stack[0]


def _saving(prefix: _Prefix, around: int, cost: float) -> float:
    """Most blocks saved below ``prefix``, within a group of ``around`` blocks (0: none); notes whether as a group."""
    if around in prefix.saving:
        return prefix.saving[around][0]
    apart = around * prefix.own + sum(_saving(child, around, cost) for child in prefix.children)
    grouped, depth = -1.0, prefix.depth
    if depth > 0:
        below = sum(_saving(child, depth, cost) for child in prefix.children)
        grouped = depth * (prefix.own - 1) - cost + below
    prefix.saving[around] = max(grouped, apart), grouped > apart
    return max(grouped, apart)


def _chosen(prefix: _Prefix, around: int) -> Iterator[_Prefix]:
    if prefix.saving[around][1]:
        yield prefix
        around = prefix.depth
    for child in prefix.children:
        yield from _chosen(child, around)
