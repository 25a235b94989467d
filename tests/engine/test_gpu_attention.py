"""The GPU's attention backends against attention written out, through the interface that models use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.triton_device import DEVICE, DTYPES, add_up_rows_alike  # isort: skip  # before any kernel is defined

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.triton import TritonAttention
from tests.engine.attention_cases import Case, Pages

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

MIXED = Case(rows=((30, 1), (0, 1), (100, 1), (20, 40), (0, 33)), head_dim=64, block_size=16)
CASES = [
    MIXED,
    Case(rows=((40, 1), (3, 1)), head_dim=64, block_size=16),
    Case(rows=((0, 70),), head_dim=128, block_size=16, kv_heads=1),
    Case(rows=((90, 1), (60, 20)), head_dim=64, block_size=16, window=24),
]


def check(backend: AttentionBackend, case: Case, dtype: torch.dtype) -> Tensor:
    pages = Pages(Case(**{**case.__dict__, "dtype": dtype}), DEVICE)
    found = pages.attend(backend)
    torch.testing.assert_close(found.double(), pages.naive(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return found


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
