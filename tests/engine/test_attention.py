"""The torch backend against attention written out one query and one head at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.attention import select
from nanoengine.attention.select import select_backend
from nanoengine.attention.torch import TorchAttention
from nanoengine.errors import ModelLoadError
from tests.engine.attention_cases import HOLE, Case, Pages

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def check(case: Case) -> None:
    pages = Pages(case)
    got, tolerance = (
        pages.attend(TorchAttention()),
        {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype],
    )
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
    torch.testing.assert_close(pages.attend(TorchAttention()).double(), pages.naive(), atol=1e-5, rtol=1e-5)


def test_the_workspace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.attention.torch._GROUP_TOKENS", 100)
    pages = Pages(Case(rows=((39, 1),) * 7))
    groups = TorchAttention().prepare(pages.batch, 4).groups(None, torch.float32)
    assert [len(group.slots) for group in groups] == [80, 80, 80, 40]
    torch.testing.assert_close(pages.attend(TorchAttention()).double(), pages.naive(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("rows", [((20, 1), (9, 1)), ((20, 5), (0, 9))], ids=["decode", "prefill"])
def test_a_corrupted_block_shows_in_its_row_only(rows: tuple[tuple[int, int], ...], which: str) -> None:
    pages = Pages(Case(rows=rows))
    before = pages.attend(TorchAttention())
    getattr(pages.cache, which)[0][pages.tables[0][1]] += 1
    changed = (pages.attend(TorchAttention()) - before).abs().amax(dim=(1, 2)) > 1e-3
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
    assert pages.attend(TorchAttention()).isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = Case(rows=((20, 1), (5, 3)), head_dim=40)
    pages = Pages(case)
    pages.q = [q * 1e4 for q in pages.q]
    torch.testing.assert_close(pages.attend(TorchAttention()).double(), pages.naive(), atol=1e-4, rtol=1e-4)
    assert math.isfinite(pages.attend(TorchAttention()).abs().max().item())


def test_selection() -> None:
    for name in ("auto", "torch"):
        assert select_backend(name, device=CPU, head_dim=24, dtype=torch.float32).name == "torch"
    with pytest.raises(ModelLoadError, match=r"'flash3' is not known; known: auto, torch, triton, flash, flash4"):
        select_backend("flash3", device=CPU, head_dim=64, dtype=torch.float32)
    with pytest.raises(ModelLoadError, match="float64"):
        select_backend("auto", device=CPU, head_dim=64, dtype=torch.float64)
    for name in ("triton", "flash", "flash4"):
        with pytest.raises(ModelLoadError, match=f"{name} needs a CUDA device, not cpu"):
            select_backend(name, device=CPU, head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(ModelLoadError, match=r"torch reads a KV cache in torch.float16 only"):
        select_backend("auto", device=CPU, head_dim=64, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ModelLoadError, match=r"a KV cache in torch.float32: use torch.float16 or float8_e4m3fn"):
        select_backend("auto", device=CPU, head_dim=64, dtype=torch.float16, kv_dtype=torch.float32)
    assert select_backend("auto", device=CPU, head_dim=64, dtype=torch.float32, deterministic=True).name == "torch"
    with pytest.raises(ModelLoadError, match="torch does not give the same bits"):
        select_backend("torch", device=torch.device("cuda"), head_dim=64, dtype=torch.float32, deterministic=True)


@pytest.mark.parametrize(
    ("capability", "missing", "dtype", "settings", "expected"),
    [
        ((9, 0), [], torch.bfloat16, {}, "flash4"),
        ((9, 0), ["flash_attn.cute"], torch.bfloat16, {}, "triton"),
        ((8, 0), [], torch.float16, {}, "flash"),
        ((12, 0), [], torch.float16, {}, "flash"),
        ((8, 0), ["flash_attn.flash_attn_interface"], torch.bfloat16, {}, "triton"),
        ((7, 5), [], torch.float16, {}, "triton"),
        ((9, 0), [], torch.float32, {}, "triton"),
        ((9, 0), [], torch.bfloat16, {"deterministic": True}, "triton"),
        ((9, 0), [], torch.bfloat16, {"kv_dtype": torch.float8_e4m3fn}, "flash4"),
        ((9, 0), [], torch.bfloat16, {"head_dim": 100}, "triton"),
        ((9, 0), [], torch.bfloat16, {"head_dim": 320}, "torch"),
    ],
)
def test_auto_takes_the_fastest_that_fits(
    capability: tuple[int, int],
    missing: list[str],
    dtype: torch.dtype,
    settings: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def imported(module: str) -> None:
        if module in missing:
            raise ImportError(f"no {module}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(select, "import_module", imported)
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    monkeypatch.setattr(select, "_made", lambda name, deterministic: name)
    found = select_backend("auto", device=torch.device("cuda"), dtype=dtype, **{"head_dim": 128, **settings})
    assert found == expected
