"""Triton kernels against their references: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.triton_device import DEVICE, DTYPES, TOLERANCE  # isort: skip  # before any kernel is defined

from nanoengine.attention import decode_plan
from nanoengine.attention.decode_plan import IntArray
from nanoengine.kernels.paged_decode import paged_decode, paged_decode_reference
from tests.engine.attention_cases import planned


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "dim", "block_size", "window"),
    [
        ([1], 2, 2, 64, 16, None),
        ([1, 17, 300, 64], 16, 8, 128, 16, None),
        ([700, 5, 33], 9, 3, 64, 4, None),
        ([129, 600], 4, 1, 96, 32, None),
        ([40, 3], 8, 2, 256, 1, None),
        ([1, 17, 300, 64], 6, 3, 24, 16, 11),
        ([900, 256, 257], 4, 2, 64, 64, 300),
    ],
)
def test_paged_decode(
    dtype: torch.dtype, lens: list[int], heads: int, kv_heads: int, dim: int, block_size: int, window: int | None
) -> None:
    check_decode(lens, heads, kv_heads, dim, block_size, window, dtype)


@pytest.mark.parametrize(("lens", "window"), [([1, 700, 300], None), ([300, 2], 50), ([2000], None)])
@pytest.mark.parametrize("programs", [2, 40])
def test_in_pieces_with_room_to_spare(
    lens: list[int], window: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a graph: the plan has room for more rows."""
    monkeypatch.setattr(decode_plan, "_PROGRAMS", programs)
    check_decode(lens, 4, 2, 32, 16, window, torch.float32, size=len(lens) + 3)


@given(
    lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    more=st.integers(1, 70),
    spare=st.integers(0, 5),
    shared=st.integers(0, 3),
)
def test_a_plan_reads_every_position_once(lens: list[int], more: int, spare: int, shared: int) -> None:
    end = np.array(lens, np.int32)
    first = np.where(np.arange(len(lens)) % 4 < shared, end - 1 - (end - 1) // 3, 0).astype(np.int32)
    items, rows = decode_plan.divide(first, end, len(lens) + spare, more)
    used = read_once(items, rows, first, end)
    assert (np.diff(used[:, 2] - used[:, 1]) <= 0).all(), "the longest comes first"
    fair = max(64, -(-int((end - first).sum()) // more))
    assert (used[:, 2] - used[:, 1]).max() <= fair + 64


@given(
    lens=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    changes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["add", "drop", "move"])), max_size=4),
    windows=st.sampled_from([(None,), (None, 700), (700,)]),
)
def test_plans_of_rows_that_grow_read_every_position_once(
    lens: list[int], changes: list[tuple[int, str]], windows: tuple[int | None, ...]
) -> None:
    """Steps by one token each, and rows that come, go or change places in between."""
    planner = decode_plan.DecodePlanner(decode_plan.DecodeLayout(16, 4, 2, 16, 256, windows, share_prefixes=False))
    for steps, change in [*changes, (20, "")]:
        for _ in range(steps):
            lens = [length + 1 for length in lens]
            end = np.array(lens, np.int32)
            plans = planner.plan(end, 16)
            for i, window in enumerate(windows):
                first = np.maximum(end - window, 0) if window else np.zeros_like(end)
                used = read_once(plans[2 * i], plans[2 * i + 1], first, end)
                fair = max(64, -(-int((end - first).sum()) // planner._more))
                assert (used[:, 2] - used[:, 1]).max() <= fair + 64 + 16
        if change == "add":
            lens = [*lens, 5]
        elif change == "drop" and len(lens) > 1:
            lens = lens[1:]
        elif change == "move":
            lens = lens[::-1]


def read_once(items: IntArray, rows: IntArray, first: IntArray, end: IntArray) -> IntArray:
    """Assert that a plan reads positions ``first`` to ``end`` of each row; returns its pieces."""
    used = items[items[:, 1] < items[:, 2]]
    assert not items[len(used) :].any(), "what there is comes first"
    parts = used[used[:, 3] >= 0, 3].tolist()
    assert len(set(parts)) == len(parts)
    assert max(parts, default=0) < len(items)
    for row, (begin, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        mine = used[used[:, 0] == row]
        mine = mine[np.argsort(mine[:, 1])]
        assert [begin, *mine[:, 2].tolist()] == [*mine[:, 1].tolist(), stop]
        if rows[1, row]:
            assert mine[:, 3].tolist() == list(range(rows[0, row], rows[0, row] + rows[1, row]))
        else:
            assert mine[:, 3].tolist() == [-1]
    return used


@pytest.mark.parametrize(
    ("lens", "bound"), [([1100] * 120, 1.14), ([*range(600, 1500, 6)], 1.17), ([*range(900, 1800, 14)], 1.16)]
)
def test_the_last_programs_end_together(lens: list[int], bound: float) -> None:
    """Three programs on each of 132 processors, each taking the next piece as soon as it is free; starting one takes
    as long as reading 60 tokens."""
    planner = decode_plan.DecodePlanner(decode_plan.DecodeLayout(256, 16, 8, 16, 4096, (None,), share_prefixes=False))
    items = planner.plan(np.array(lens, np.int32), len(lens))[0]
    free = [0] * (3 * 132)
    for _, begin, end, _ in items.tolist():
        for _head in range(8 if end > begin else 0):
            heapq.heapreplace(free, free[0] + end - begin + 60)
    assert max(free) / (sum(lens) * 8 / len(free)) <= bound


def test_fp8_pages() -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    check_decode([1, 40, 300], 4, 2, 64, 16, None, dtype, kv_dtype=torch.float8_e4m3fn)


def check_decode(
    lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Random rows whose blocks lie shuffled among blocks of NaN, which nobody may read."""
    torch.manual_seed(0)
    needed = [-(-n // block_size) for n in lens]
    num_blocks, width = sum(needed) + 3, max(needed)
    blocks = torch.randperm(num_blocks, device=DEVICE)
    table = torch.full((len(lens), width), int(blocks[-1]), dtype=torch.int32, device=DEVICE)
    keys, values = (torch.randn(num_blocks, block_size, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    used = 0
    for row, n in enumerate(needed):
        table[row, :n] = blocks[used : used + n]
        used += n
    if kv_dtype is None:
        keys[blocks[-3:]] = values[blocks[-3:]] = float("nan")
    else:
        keys, values = keys.to(kv_dtype), values.to(kv_dtype)
    lengths = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lens), heads, dim, dtype=dtype, device=DEVICE)
    layout = decode_plan.DecodeLayout(8, heads, kv_heads, block_size, 4, (None, window), share_prefixes=False)
    planner = decode_plan.DecodePlanner(layout)
    arrays = planner.plan(np.array(lens, np.int32), size or len(lens))
    assert [array.shape for array in arrays] == planner.shapes(size or len(lens), shared=False)
    work = planned(planner, table, lens, size)[window]
    found = paged_decode(q, keys, values, table, work, scale=dim**-0.5)
    expected = paged_decode_reference(q, keys, values, table, lengths, scale=dim**-0.5, window=window)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
