"""Rows that share a prefix: the planner against all possible groupings, the kernel against decoding row by row."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.engine.triton_device import DEVICE, DTYPES, TOLERANCE  # isort: skip  # before any kernel is defined

from nanoengine.attention import shared_prefix
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner
from nanoengine.attention.shared_prefix import IntArray, PrefixBounds, PrefixPlan, SharedPrefixPlanner
from nanoengine.kernels.paged_decode import paged_decode, paged_decode_reference
from tests.engine.attention_cases import planned

BLOCK = 4


def planner(max_rows: int, heads: int = 4, kv_heads: int = 2) -> SharedPrefixPlanner:
    bounds = PrefixBounds.of(max_rows, num_heads=heads, num_kv_heads=kv_heads)
    return SharedPrefixPlanner(bounds, block_size=BLOCK, num_heads=heads, num_kv_heads=kv_heads, token_bytes=1)


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_WORTH_BYTES", 1)
    monkeypatch.setattr(shared_prefix, "_GROUP_TOKENS", 0)


def rows_of(*rows: list[int], past_end: int = 0) -> tuple[IntArray, IntArray]:
    """Full blocks of each row -> table and lengths: each row has one token more, in a block of its own."""
    width = max(map(len, rows)) + 2
    table = np.full((len(rows), width), past_end, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row) + 1] = [*row, 1000 + i]
    return table, np.array([len(row) * BLOCK + 1 for row in rows], np.int32)


def tiles_of(plan: PrefixPlan | None) -> dict[frozenset[int], int]:
    """Rows read together -> shared tokens; and that all of the plan agrees, each part being written and read once."""
    if plan is None:
        return {}
    members, prefix, first_part, parts, step = plan.rows
    tiles: dict[frozenset[int], list[tuple[int, int]]] = {}
    written: dict[int, dict[int, int]] = {}  # row -> begin -> part
    for first, count, begin, end, part in plan.items[plan.items[:, 1] > 0].tolist():
        rows = members[first : first + count].tolist()
        tiles.setdefault(frozenset(rows), []).append((begin, end))
        for i, row in enumerate(rows):
            written.setdefault(row, {})[begin] = part + i
    assert sum(map(len, tiles)) == len(written)  # no row in two of them
    for tile, spans in tiles.items():
        spans.sort()
        (tokens,) = {int(prefix[row]) for row in tile}
        assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), tokens]
        assert all(begin < end for begin, end in spans)
    for row, by_begin in written.items():
        read = [first_part[row] + i * step[row] for i in range(parts[row])]
        assert [by_begin[begin] for begin in sorted(by_begin)] == read
    every_part = [part for by_begin in written.values() for part in by_begin.values()]
    assert len(every_part) == len(set(every_part))
    assert set(written) == set(np.flatnonzero(prefix).tolist()) == set(np.flatnonzero(parts).tolist())
    return {tile: spans[-1][1] for tile, spans in tiles.items()}


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [rows[0], *group], *rest[i + 1 :]]


def most_saved(table: IntArray, lens: IntArray) -> int:
    """Tokens, by trying every grouping."""

    def common(group: list[int]) -> int:
        blocks = min((lens[row] - 1) // BLOCK for row in group)
        same = (table[group, :blocks] == table[group[0], :blocks]).all(0)
        return int(blocks if same.all() else same.argmin()) * BLOCK

    groupings = partitions(list(range(len(table))))
    return max(sum(common(group) * (len(group) - 1) for group in grouping) for grouping in groupings)


@pytest.mark.parametrize("seed", range(60))
def test_no_grouping_saves_more(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(rng.randint(2, 6)):  # each takes some of an earlier one, and goes on with blocks of few kinds
        start = rng.choice(rows)[: rng.randint(0, 6)] if rows else []
        rows.append([*start, *(rng.randint(1, 3) for _ in range(rng.randint(0, 4)))])
    table, lens = rows_of(*rows, past_end=rng.randint(0, 3))
    plan = planner(8).plan(table, lens)
    for tile, tokens in tiles_of(plan).items():
        chosen, blocks = sorted(tile), tokens // BLOCK
        assert (table[chosen, :blocks] == table[chosen[0], :blocks]).all()
        assert (lens[chosen] > tokens).all()
    saved = sum(tokens * (len(tile) - 1) for tile, tokens in tiles_of(plan).items())
    assert saved == (plan.saved_tokens if plan else 0) == most_saved(table, lens)


def test_nested_prefixes() -> None:
    """All share two blocks; three of them seven, which is more than it costs to leave the others' group."""
    system, document = [1, 2], [1, 2, 3, 4, 5, 6, 7]
    table, lens = rows_of([*system, 10], [*document, 11], [*system, 12], document, [*document, 13], [20, 21])
    assert tiles_of(planner(6).plan(table, lens)) == {frozenset({1, 3, 4}): 28, frozenset({0, 2}): 8}
    table, lens = rows_of([*system, 3], [*system, 3], [*system, 5], [*system, 6])
    assert tiles_of(planner(4).plan(table, lens)) == {frozenset({0, 1, 2, 3}): 8}


def test_a_large_group_is_cut_into_tiles_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_LEAST_SPLIT", 32)
    rows = [[*range(1, 101), 200 + i] for i in range(70)] + [[900, 901, 902]] * 3
    table, lens = rows_of(*rows)
    plan = planner(100).plan(table, lens)
    sizes = sorted((len(tile), tokens) for tile, tokens in tiles_of(plan).items())
    assert sizes == [(3, 12), (6, 400), (32, 400), (32, 400)]
    assert plan is not None
    assert plan.rows[3, :70].min() > 5


@pytest.mark.parametrize("heads", [(2, 2), (16, 8), (71, 1), (7, 1), (256, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_every_plan_keeps_its_bounds(heads: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_LEAST_SPLIT", 1)
    rng = random.Random(seed)
    rows: list[list[int]] = []
    while len(rows) < 60:
        prefix = [rng.randint(1, 1 << 30) for _ in range(rng.randint(1, 50))]
        rows += [[*prefix, rng.randint(1, 1 << 30)] for _ in range(min(rng.choice([1, 2, 2, 3, 20]), 60 - len(rows)))]
    table, lens = rows_of(*rows)
    plan = planner(60, *heads).plan(table, lens)  # would fail to lay out more items than there is room for
    assert plan is not None
    tiles_of(plan)
    parts = plan.items[:, 4] + plan.items[:, 1]
    assert parts.max() <= PrefixBounds.of(60, num_heads=heads[0], num_kv_heads=heads[1]).parts


def test_deep_nesting_is_bounded() -> None:
    rows = [[*range(1, i + 2), 10_000 + i] for i in range(1200)]
    table, lens = rows_of(*rows)
    plan = planner(1200).plan(table, lens)
    assert plan is not None
    tiles_of(plan)


def test_a_plan_is_kept_until_it_no_longer_holds() -> None:
    table, lens = rows_of([1, 2, 3, 7], [1, 2, 3, 8], [9, 4])
    plans = planner(8)
    plan = plans.plan(table, lens)
    assert tiles_of(plan) == {frozenset({0, 1}): 12}
    longer = np.concatenate((table, table + 50), axis=1)
    assert plans.plan(longer, lens + 5) is plan
    changed = table.copy()
    changed[1, 2] = 77
    assert tiles_of(plans.plan(changed, lens)) == {frozenset({0, 1}): 8}
    assert plans.plan(table, np.array([12, 17, 9], np.int32)) is not plan  # a shorter row at the same blocks
    assert tiles_of(plans.plan(table[[2, 0, 1]], lens[[2, 0, 1]])) == {frozenset({1, 2}): 12}
    assert plans.plan(table[:1], lens[:1]) is None


def test_what_saves_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_WORTH_BYTES", 13)
    table, lens = rows_of([1, 2, 3], [1, 2, 3])
    assert planner(4).plan(table, lens) is None
    table, lens = rows_of([1, 2, 3, 4], [1, 2, 3, 4])
    assert planner(4).plan(table, lens) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lens", "shared"),
    [
        (4, 2, 64, [50, 61, 41, 30], [(0, 1, 2)]),
        (6, 2, 32, [50, 61, 41, 600, 300], [(0, 2), (3, 4)]),
        (3, 3, 96, [45] * 3, [(0, 1, 2)]),
        (8, 1, 128, [45] * 9, [tuple(range(9))]),  # two tiles
    ],
)
def test_kernel(
    heads: int,
    kv_heads: int,
    dim: int,
    lens: list[int],
    shared: list[tuple[int, ...]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each group shares 7 blocks. The plan has room for more rows, as under a graph."""
    monkeypatch.setattr(shared_prefix, "_LEAST_SPLIT", 12)
    monkeypatch.setattr(shared_prefix, "_PROGRAMS", 16)
    torch.manual_seed(0)
    width = -(-max(lens) // BLOCK)
    numbers = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(-1, width)
    for group in shared:
        numbers[list(group), :7] = numbers[group[0], :7]
    seq_lens = np.array(lens, np.int32)
    layout = DecodeLayout(len(lens) + 3, heads, kv_heads, BLOCK, 1, (None,), share_prefixes=True)
    plans = DecodePlanner(layout)
    prefixes = plans.prefixes(numbers, seq_lens)
    assert prefixes is not None
    assert set(prefixes.rows[1].tolist()) == {0, 28}
    keys, values = (torch.randn(numbers.size, BLOCK, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    q = torch.randn(len(lens), heads, dim, dtype=dtype, device=DEVICE)
    table, lengths = torch.from_numpy(numbers).to(DEVICE), torch.from_numpy(seq_lens).to(DEVICE)
    expected = paged_decode_reference(q, keys, values, table, lengths, scale=dim**-0.5, window=None)
    work = planned(plans, table, lens, len(lens) + 2)[None]
    found = paged_decode(q, keys, values, table, work, scale=dim**-0.5)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
