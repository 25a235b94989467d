"""The torch backend against attention written out one query and one head at a time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention.base import AttentionSpec, Batch, ForwardContext, KVCache
from nanoengine.attention.select import select_backend
from nanoengine.attention.torch import TorchAttention
from nanoengine.errors import ModelLoadError

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
HOLE = float("nan")  # what fills the memory that nobody may read


@dataclass(frozen=True)
class Case:
    """Rows of (cached tokens, new tokens); a row of one new token is a decode."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 4
    kv_heads: int = 2
    group: int = 3  # query heads per key-value head
    head_dim: int = 8
    window: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


class Pages:
    """Random keys and values of a case's rows, in shuffled blocks of a cache that else holds holes."""

    def __init__(self, case: Case) -> None:
        # Decodes first, as in every step.
        self.rows = sorted(case.rows, key=lambda row: row[1] > 1)
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        lens, counts = [past + new for past, new in self.rows], [new for _, new in self.rows]

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        heads = case.kv_heads * case.group
        self.q = [rand(n, heads, case.head_dim) for n in counts]
        self.k = [rand(n, case.kv_heads, case.head_dim) for n in lens]
        self.v = [rand(n, case.kv_heads, case.head_dim) for n in lens]

        size = case.block_size
        needed = [-(-n // size) for n in lens]
        blocks = list(range(sum(needed) + 3))
        random.Random(case.seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.cache = KVCache.allocate(
            layers=1,
            num_blocks=sum(needed) + 3,
            block_size=size,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            device=CPU,
        )
        for pages, rows in ((self.cache.keys[0], self.k), (self.cache.values[0], self.v)):
            pages.fill_(HOLE)
            for (past, _), table, tokens in zip(self.rows, self.tables, rows, strict=True):
                for position in range(past):  # the new ones are stored by attend
                    pages[table[position // size], position % size] = tokens[position]

        slots = [
            self.tables[row][position // size] * size + position % size
            for row, (past, new) in enumerate(self.rows)
            for position in range(past, past + new)
        ]
        width = max(needed)
        self.batch = Batch(
            num_decodes=sum(n == 1 for n in counts),
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=torch.tensor([t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32),
            kv_slots=torch.tensor(slots),
            query_lens_host=tuple(counts),
            seq_lens_host=tuple(lens),
        )
        self.spec = AttentionSpec(0, heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, case.window)

    def attend(self) -> Tensor:
        new_k = torch.cat([k[past:] for k, (past, _) in zip(self.k, self.rows, strict=True)])
        new_v = torch.cat([v[past:] for v, (past, _) in zip(self.v, self.rows, strict=True)])
        context = ForwardContext(TorchAttention(), self.cache, self.batch)
        for pages, new in zip(context.pages(self.spec), (new_k, new_v), strict=True):
            pages.flatten(0, 1).index_copy_(0, context.kv_slots, new)
        return context.attend(self.spec, torch.cat(self.q))

    def naive(self) -> Tensor:
        """softmax(q·K) V in float64, per token and head."""
        case, out = self.case, []
        for q, k, v, (past, new) in zip(self.q, self.k, self.v, self.rows, strict=True):
            for i in range(new):
                position = past + i
                first = 0 if case.window is None else max(0, position - case.window + 1)
                token = []
                for head in range(case.kv_heads * case.group):
                    keys = k[first : position + 1, head // case.group].double()
                    scores = keys @ q[i, head].double() * self.spec.scale
                    token.append(scores.softmax(0) @ v[first : position + 1, head // case.group].double())
                out.append(torch.stack(token))
        return torch.stack(out)


def check(case: Case) -> None:
    pages = Pages(case)
    got, tolerance = pages.attend(), {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]
    assert got.dtype == case.dtype
    torch.testing.assert_close(got.double(), pages.naive(), atol=tolerance, rtol=tolerance)


rows = st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 9)))


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Case,
        rows=st.lists(rows, min_size=1, max_size=6).map(tuple),
        block_size=st.sampled_from([1, 2, 4, 16, 64]),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        head_dim=st.sampled_from([2, 8, 24, 40]),
        window=st.one_of(st.none(), st.integers(1, 50)),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 99),
    )
)
def test_equals_naive(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("window", [None, 1, 100, 700])
def test_very_uneven_rows_are_split_into_groups(window: int | None) -> None:
    lens = (900, 5, 700, 1, 300, 310, 64, 880, 2, 30)
    case = Case(rows=(*((n - 1, 1) for n in lens), (400, 7), (0, 33)), block_size=16, window=window)
    pages = Pages(case)
    groups = TorchAttention().prepare(pages.batch, case.block_size).groups(window, torch.float32)
    assert (len(groups) > 1) == (window in (None, 700))
    torch.testing.assert_close(pages.attend().double(), pages.naive(), atol=1e-5, rtol=1e-5)


def test_the_workspace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.attention.torch._GROUP_TOKENS", 100)
    pages = Pages(Case(rows=((39, 1),) * 7))
    groups = TorchAttention().prepare(pages.batch, 4).groups(None, torch.float32)
    assert [len(group.slots) for group in groups] == [80, 80, 80, 40]
    torch.testing.assert_close(pages.attend().double(), pages.naive(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("rows", [((20, 1), (9, 1)), ((20, 5), (0, 9))], ids=["decode", "prefill"])
def test_a_corrupted_block_shows_in_its_row_only(rows: tuple[tuple[int, int], ...], which: str) -> None:
    pages = Pages(Case(rows=rows))
    before = pages.attend()
    getattr(pages.cache, which)[0][pages.tables[0][1]] += 1
    changed = (pages.attend() - before).abs().amax(dim=(1, 2)) > 1e-3
    first_row = pages.batch.query_lens_host[0]
    assert changed[:first_row].all()
    assert not changed[first_row:].any()


@pytest.mark.parametrize("window", [None, 6])
def test_dead_keys_and_values_are_never_read(window: int | None) -> None:
    """Whatever lies in other blocks, past a row's end or before its window may be anything, NaN included."""
    pages = Pages(Case(rows=((3, 1), (30, 1), (17, 1), (22, 4)), window=window))
    if window is not None:
        for table, n, new in zip(pages.tables, pages.batch.seq_lens_host, pages.batch.query_lens_host, strict=True):
            for position in range(max(0, n - new - window + 1)):
                for tensor in (pages.cache.keys[0], pages.cache.values[0]):
                    tensor[table[position // 4], position % 4] = HOLE
    assert pages.attend().isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = Case(rows=((20, 1), (5, 3)), head_dim=40)
    pages = Pages(case)
    pages.q = [q * 1e4 for q in pages.q]
    torch.testing.assert_close(pages.attend().double(), pages.naive(), atol=1e-4, rtol=1e-4)
    assert math.isfinite(pages.attend().abs().max().item())


def test_selection() -> None:
    for name in ("auto", "torch"):
        assert select_backend(name, device=CPU, head_dim=24, dtype=torch.float32).name == "torch"
    with pytest.raises(ModelLoadError, match=r"'flash' is not known; known: auto, torch"):
        select_backend("flash", device=CPU, head_dim=64, dtype=torch.float32)
    with pytest.raises(ModelLoadError, match="float64"):
        select_backend("auto", device=CPU, head_dim=64, dtype=torch.float64)
