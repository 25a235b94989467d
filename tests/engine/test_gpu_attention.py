"""The GPU's attention backends against attention written out, through the interface that models use."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.triton_device import DEVICE, DTYPES, add_up_rows_alike  # isort: skip  # before any kernel is defined

from nanoengine.attention.base import AttentionBackend, KVCache
from nanoengine.attention.decode_plan import DecodeLayout, DecodePlanner
from nanoengine.attention.flash import FlashAttention
from nanoengine.attention.flash4 import Flash4Attention
from nanoengine.attention.triton import TritonAttention
from tests.engine.attention_cases import Case, Pages, planned

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

MIXED = Case(rows=((30, 1), (0, 1), (100, 1), (20, 40), (0, 33)), head_dim=64, block_size=16)
CASES = [
    MIXED,
    Case(rows=((40, 1), (3, 1)), head_dim=64, block_size=16),
    Case(rows=((0, 70),), head_dim=128, block_size=16, kv_heads=1),
    Case(rows=((90, 1), (60, 20)), head_dim=64, block_size=16, window=24),
]


def check(backend: AttentionBackend, case: Case, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
    pages = Pages(replace(case, dtype=dtype), DEVICE)
    caches = pages.cache.keys[0], pages.cache.values[0]
    if isinstance(backend, Flash4Attention):  # it says that it reads what is finite
        for cache in caches:
            cache.nan_to_num_()
    if kv_dtype is not None:
        pages.k, pages.v = ([t.to(kv_dtype).to(dtype) for t in tensors] for tensors in (pages.k, pages.v))
        size = case.block_size
        for cache, rows in zip(caches, (pages.k, pages.v), strict=True):
            for (past, _), table, tokens in zip(pages.rows, pages.tables, rows, strict=True):
                for position in range(past):
                    cache[table[position // size], position % size] = tokens[position]
        pages.cache = KVCache((caches[0].to(kv_dtype),), (caches[1].to(kv_dtype),))
    found = pages.attend(backend)
    torch.testing.assert_close(found.double(), pages.naive(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(case: Case, deterministic: bool, dtype: torch.dtype) -> None:
    check(TritonAttention(deterministic=deterministic), case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_deterministic_decode_has_the_bits_of_a_prefill(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a prompt, computed with the prompt and as a decode after it."""
    add_up_rows_alike(monkeypatch)
    backend = TritonAttention(deterministic=True)
    prompt = Pages(Case(rows=((0, 70),), head_dim=64, dtype=dtype), DEVICE)
    whole = prompt.attend(backend)
    decode = Pages(Case(rows=((69, 1), (12, 1)), head_dim=64, dtype=dtype), DEVICE)
    for ours, theirs in ((decode.k, prompt.k), (decode.v, prompt.v)):
        ours[0] = theirs[0]
    for cache, rows in ((decode.cache.keys[0], decode.k), (decode.cache.values[0], decode.v)):
        for position in range(69):
            cache[decode.tables[0][position // 4], position % 4] = rows[0][position]
    decode.q[0] = prompt.q[0][69:]
    assert torch.equal(decode.attend(backend)[0], whole[69])


@pytest.mark.parametrize("deterministic", [False, True])
def test_decode_as_a_graph_captures_it(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows bounds only; rows 0 and 2 read two blocks together, of which it knows nothing either."""
    monkeypatch.setattr("nanoengine.attention.shared_prefix._GROUP_TOKENS", 0)
    pages = Pages(Case(rows=((30, 1), (12, 1), (50, 1)), head_dim=64), DEVICE)
    pages.tables[2][:2] = pages.tables[0][:2]
    pages.batch.block_table[2, :2] = pages.batch.block_table[0, :2]
    pages.k[2][:8], pages.v[2][:8] = pages.k[0][:8], pages.v[0][:8]
    planner = DecodePlanner(DecodeLayout(4, 6, 2, 4, 10_000_000, (None,), share_prefixes=True))
    lens = list(pages.batch.seq_lens_host)
    prefixes = planner.prefixes(pages.batch.block_table.cpu().numpy(), np.array(lens, np.int32))
    assert prefixes is not None
    assert prefixes.rows[1].tolist() == [8, 0, 8, 0]
    work = planned(planner, pages.batch.block_table, lens)
    pages.batch = replace(pages.batch, query_lens_host=(), seq_lens_host=(), work=work)
    found = pages.attend(TritonAttention(deterministic=deterministic))
    torch.testing.assert_close(found.double(), pages.naive(), atol=1e-5, rtol=1e-5)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], scale: float, window: int | None
) -> Tensor:
    """What the libraries compute: attention over contiguous rows, causal from the bottom right."""
    outputs = []
    for q_row, k_row, v_row in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        at = torch.arange(len(k_row))
        position = at[len(k_row) - len(q_row) :, None]
        mask = (at <= position) & (at >= position - (len(k_row) if window is None else window))
        heads = (t.transpose(0, 1)[None] for t in (q_row, k_row, v_row))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def contiguous(pages: Tensor, table: Tensor, lens: list[int]) -> Tensor:
    return torch.cat([pages[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lens, strict=True)])


def flash2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (causal, max(queries), max(keys)) == (True, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        assert k.shape[1] % 256 == 0
        k, v = (contiguous(pages, block_table, keys) for pages in (k, v))
    return varlen(q, k, v, queries, keys, softmax_scale, None if window_size == (-1, -1) else window_size[0])


def flash4(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
    window_size: tuple[int | None, int | None], cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    queries = cu_seqlens_q.diff().tolist()
    assert (causal, max(queries)) == (True, max_seqlen_q)
    assert q.dtype == k.dtype == v.dtype
    if page_table is None:
        assert cu_seqlens_k is not None
        keys = cu_seqlens_k.diff().tolist()
        assert max(keys) == max_seqlen_k
    else:
        assert seqused_k is not None
        keys = seqused_k.tolist()
        k, v = (contiguous(pages, page_table, keys) for pages in (k, v))
    return varlen(q, k, v, queries, keys, softmax_scale, window_size[0]), None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the libraries' functions in plain torch: what they are handed is tested there, not they."""
    if DEVICE == "cpu":
        package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
        package.flash_attn_varlen_func, cute.flash_attn_varlen_func = flash2, flash4  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


def made(backend: type[AttentionBackend]) -> AttentionBackend:
    try:
        return backend()
    except ImportError as error:
        pytest.skip(f"{backend.__name__}: {error}")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("backend", [FlashAttention, Flash4Attention])
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case(rows=((0, 1), (0, 50), (0, 20)), head_dim=64, block_size=16),  # nothing cached
        Case(rows=((20, 40), (0, 33)), head_dim=64, block_size=256),
        Case(rows=((200, 100), (0, 130)), head_dim=128, block_size=128, kv_heads=1, group=2),
    ],
    ids=str,
)
def test_libraries(case: Case, backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.attention.flash4._LONG", 0)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    check(made(backend), case, dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("backend", [TritonAttention, FlashAttention, Flash4Attention])
def test_fp8_pages(backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.attention.flash4._LONG", 0)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    check(made(backend), MIXED, dtype, torch.float8_e4m3fn)


@pytest.mark.usefixtures("stand_ins")
def test_contexts_too_long_to_gather_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.attention.varlen._GATHER_TOKENS", 90)
    backend = made(FlashAttention)
    monkeypatch.setattr(backend, "_attend", None)
    check(backend, MIXED, torch.float16)
