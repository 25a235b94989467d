"""The prefill kernel against attention written out, and against itself: a token's bits know nothing of its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.triton_device import DEVICE, DTYPES, add_up_rows_alike  # isort: skip  # before any kernel is defined

from nanoengine.kernels.paged_prefill import paged_prefill
from tests.engine.attention_cases import Case, Pages

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def prefill(pages: Pages, first_row: int = 0) -> Tensor:
    """The kernel on a case's rows from ``first_row`` on, whose new tokens' keys and values are stored first."""
    keys, values = pages.cache.keys[0], pages.cache.values[0]
    new = [slice(past, past + n) for past, n in pages.rows]
    for cache, rows in ((keys, pages.k), (values, pages.v)):
        stored = torch.cat([row[s] for row, s in zip(rows, new, strict=True)])
        cache.flatten(0, 1)[pages.batch.kv_slots] = stored
    return paged_prefill(
        torch.cat(pages.q[first_row:]),
        keys,
        values,
        pages.batch.block_table,
        pages.batch.query_start,
        pages.batch.seq_lens,
        scale=pages.spec.scale,
        window=pages.spec.window,
        first_row=first_row,
        rows=len(pages.rows) - first_row,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=((0, 1),), head_dim=64),
        Case(rows=((0, 70), (37, 1), (30, 40), (0, 5)), head_dim=64, block_size=16, group=2),
        Case(rows=((5, 70), (64, 64)), head_dim=128, block_size=16, group=2, kv_heads=1),
        Case(rows=((0, 33), (100, 3)), head_dim=96, block_size=32, group=1),
        Case(rows=((20, 20),), head_dim=256, block_size=1, group=7, kv_heads=1),
        Case(rows=((0, 60), (100, 20), (70, 1)), head_dim=24, block_size=4, window=50),
        Case(rows=((0, 70), (31, 34), (200, 7)), head_dim=64, block_size=16, window=1, kv_heads=1),
        Case(rows=((100, 60), (300, 2)), head_dim=64, block_size=64, window=129, kv_heads=1, group=4),
    ],
    ids=str,
)
def test_equals_naive(case: Case, dtype: torch.dtype) -> None:
    pages = Pages(replace(case, dtype=dtype), DEVICE)
    torch.testing.assert_close(prefill(pages).double(), pages.naive(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_from_the_middle() -> None:
    pages = Pages(Case(rows=((7, 1), (9, 1), (3, 20), (0, 50)), head_dim=64), DEVICE)
    torch.testing.assert_close(prefill(pages, 2).double(), pages.naive()[2:], atol=1e-5, rtol=1e-5)


def test_fp8_pages() -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    pages = Pages(Case(rows=((20, 40), (0, 9)), head_dim=64, dtype=dtype), DEVICE)
    for tensors in (pages.k, pages.v):
        tensors[:] = [t.to(torch.float8_e4m3fn).to(dtype) for t in tensors]
    expected = prefill(pages)
    for cache in (pages.cache.keys[0], pages.cache.values[0]):
        cache.copy_(torch.where(cache.isnan(), 0, cache))
    found = paged_prefill(
        torch.cat(pages.q),
        pages.cache.keys[0].to(torch.float8_e4m3fn),
        pages.cache.values[0].to(torch.float8_e4m3fn),
        pages.batch.block_table,
        pages.batch.query_start,
        pages.batch.seq_lens,
        scale=pages.spec.scale,
        window=None,
        rows=2,
    )
    # The pages held such numbers only, except those of the past, which were stored before they were rounded.
    new = slice(40, None)
    torch.testing.assert_close(found[new], expected[new], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_in_any_chunks_and_any_batch(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up_rows_alike(monkeypatch)
    length, block = 110, 16
    torch.manual_seed(0)
    q = torch.randn(length, 6, 64, device=DEVICE, dtype=dtype)
    blocks = -(-length // block) + 2
    keys, values = (torch.randn(blocks, block, 2, 64, device=DEVICE, dtype=dtype) for _ in range(2))
    table = torch.randperm(blocks, device=DEVICE).int()[None, : blocks - 2]

    def run(chunks: list[tuple[int, int]]) -> list[Tensor]:
        """Rows of one batch, each of the tokens [begin, end) of the same sequence."""
        counts = [end - begin for begin, end in chunks]
        out = paged_prefill(
            torch.cat([q[begin:end] for begin, end in chunks]),
            keys,
            values,
            table.expand(len(chunks), -1).contiguous(),
            torch.tensor([0, *counts], device=DEVICE).cumsum(0).int(),
            torch.tensor([end for _, end in chunks], device=DEVICE, dtype=torch.int32),
            scale=0.125,
            window=window,
            rows=len(chunks),
        )
        return list(out.split(counts))

    whole = run([(0, length)])[0]
    assert torch.equal(torch.cat(run([(0, 1), (1, 34), (34, 97), (97, 98), (98, length)])), whole)
    for position in (0, 63, 109):
        assert torch.equal(run([(position, position + 1)])[0], whole[position : position + 1])


def test_a_row_of_length_0_gives_zeros() -> None:
    pages = Pages(Case(rows=((7, 1), (9, 1)), head_dim=64), DEVICE)
    pages.batch.seq_lens[1] = 0
    out = prefill(pages)
    assert not out[1].any()
    torch.testing.assert_close(out[0].double(), pages.naive()[0], atol=1e-5, rtol=1e-5)
