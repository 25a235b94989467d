"""The sampling kernels against the Sampler on a CPU. Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from nanoengine.kernels import sample as module  # noqa: E402
from nanoengine.kernels.sample import pack_settings, sample  # noqa: E402
from nanoengine.sampling.params import SamplingParams  # noqa: E402
from nanoengine.sampling.random import uniform  # noqa: E402
from nanoengine.sampling.sampler import Sampler  # noqa: E402
from nanoengine.scheduling.step import Admission  # noqa: E402
from nanoengine.structured.masks import allowed  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, sizes with which a small vocabulary takes every path: a turn of a loop costs it 10 ms."""
    if DEVICE == "cpu":
        for name, size in (("_CHUNK", 128), ("_GROUP", 2), ("_FEW", 64)):
            monkeypatch.setattr(module, name, size)


FALLBACK = 3
SEED = 2**63 + 11  # its highest bit is set: it must not be taken for a sign
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.3, "top_p": 0.31},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 0.8, "min_p": 0.1, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 300, "top_p": 0.99, "min_p": 0.001},
    {"temperature": 1e-30, "top_k": 50},
    {"temperature": 100.0, "min_p": 1.0},
]


def run(
    logits: Tensor,
    rows: list[dict[str, Any]],
    positions: list[int],
    at: npt.NDArray[np.int32] | None = None,
    masks: npt.NDArray[np.int32] | None = None,
) -> list[int]:
    """Row i for slot 2 i, seeded with SEED + i; with ``masks`` that is row ``at[i]`` of the logits."""
    n = len(rows)
    whole = [SamplingParams(**{"temperature": 1.0, **row}) for row in rows]
    columns = [[getattr(p, name) for p in whole] for name in ("temperature", "top_k", "top_p", "min_p")]
    table = np.full((2 * n, 8), -1, np.int32)
    table[::2] = pack_settings(*columns, seed=np.arange(n, dtype=np.uint64) + np.uint64(SEED))
    tokens = torch.full((len(logits),), -5, dtype=torch.int32, device=DEVICE)
    last = torch.full((2 * n,), -7, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(0, 2 * n, 2, dtype=torch.int32, device=DEVICE)
    sample(
        logits.to(DEVICE),
        torch.from_numpy(table).to(DEVICE),
        slots,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        tokens,
        last,
        fallback=FALLBACK,
        rows=None if at is None else torch.from_numpy(at).to(DEVICE),
        masks=None if masks is None else torch.from_numpy(masks).to(DEVICE),
    )
    if at is not None:
        mine = torch.from_numpy(at).to(DEVICE).long()
        assert (tokens == -5).sum() == len(tokens) - n
        tokens = tokens[mine]
    assert last[::2].tolist() == tokens.tolist()
    assert set(last[1::2].tolist()) == {-7}
    return tokens.tolist()


def expected(
    logits: Tensor,
    rows: list[dict[str, Any]],
    positions: list[int],
    masks: npt.NDArray[np.int32] | None = None,
) -> list[int]:
    sampler = Sampler(len(rows), logits.shape[1], (FALLBACK,), torch.device("cpu"), seed=0)
    for i, row in enumerate(rows):
        params = SamplingParams(**{"temperature": 1.0, "seed": SEED + i, **row})
        sampler.admit(Admission(i, i, params, np.array([1], np.int32), np.array([], np.int32)))
    slots = np.arange(len(rows), dtype=np.int32)
    return sampler(logits.float().cpu(), slots, np.array(positions, np.int32), masks).tokens.tolist()


def near_a_boundary(logits: Tensor, row: dict[str, Any], seed: int, position: int, token: int) -> bool:
    """Whether ``token`` may be drawn by sums in another order: u lies within rounding of its stretch of the CDF."""
    x = logits.double().numpy()
    p = np.exp((x - x.max()) / row["temperature"])
    p[p < row.get("min_p", 0) * (1 - 1e-6)] = 0
    if 0 < row.get("top_k", 0) < len(p):
        p[p < np.sort(p)[-row["top_k"]]] = 0
    if row.get("top_p", 1) < 1:
        order = np.sort(p)[::-1]
        p[p < order[np.searchsorted(np.cumsum(order), row["top_p"] * p.sum())]] = 0
    cdf = np.cumsum(p) / p.sum()
    u = uniform(np.array([seed], np.uint64), np.array([position]))[0]
    return p[token] > 0 and cdf[token] - p[token] / p.sum() - 1e-6 <= u <= cdf[token] + 1e-6


def check(logits: Tensor, rows: list[dict[str, Any]], positions: list[int]) -> list[int]:
    """The tokens found, which are those of the Sampler."""
    found, wanted = run(logits, rows, positions), expected(logits, rows, positions)
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert mine == theirs or near_a_boundary(logits[i], rows[i], SEED + i, positions[i], mine), (rows[i], i)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= len(rows) // 20
    return found


SHAPES = [(7, "normal"), (300, "flat"), (1000, "peaked")]
if DEVICE == "cuda":
    SHAPES = [(v, s) for v in (7, 64, 2048, 2049, 50257, 151_936) for s in ("flat", "normal", "peaked")]


@pytest.mark.parametrize(("vocab", "kind"), SHAPES)
def test_tokens_are_the_samplers(vocab: int, kind: str) -> None:
    torch.manual_seed(vocab)
    rows = MIXED if DEVICE == "cpu" else 10 * MIXED
    logits = torch.randn(len(rows), vocab) * {"flat": 0.01, "normal": 1.0, "peaked": 4.0}[kind]
    check(logits, rows, torch.randint(10_000, (len(rows),)).tolist())


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16], ids=str)
def test_ties_and_narrow_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rows = MIXED[2:6] if DEVICE == "cpu" else 10 * MIXED
    logits = (torch.randn(len(rows), 600 if DEVICE == "cpu" else 6000) * 3).to(dtype)
    logits[::3] = logits[::3].float().mul(2).round().div(2).to(dtype)  # many equals
    check(logits, rows, list(range(len(rows))))


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.985}], ids=str)
def test_the_last_that_a_filter_keeps_is_drawn_as_often(settings: dict[str, Any]) -> None:
    rows = [{"temperature": 1.0, **settings}] * 8
    logits = torch.full((len(rows), 600), -20.0)
    logits[:, [7, 500, 140, 270]] = torch.tensor([0.03, 0.02, 0.0195, 0.0])  # nearly equal, chunks apart
    assert set(check(logits, rows, list(range(len(rows))))) == {7, 140, 500}


def test_equal_logits_are_all_kept() -> None:
    rows: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.01}]
    check(torch.zeros(len(rows), 200), [{"temperature": 1.0, **row} for row in rows], [4, 5])


def test_filters_that_keep_more_than_fits_registers() -> None:
    torch.manual_seed(2)
    vocab = 500 if DEVICE == "cpu" else 20_000
    rows: list[dict[str, Any]] = [
        {"temperature": 2.0, "top_p": 0.97},
        {"temperature": 1.5, "top_k": vocab * 2 // 3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": vocab // 3, "top_p": 0.3},
    ]
    check(torch.randn(len(rows), vocab), rows, [7, 8, 9])


def test_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the sizes as they are
    torch.manual_seed(3)
    rows = [MIXED[0], MIXED[1], MIXED[2]]
    check((torch.randn(len(rows), 50_257) * 2), rows, [5] * len(rows))


def test_a_row_does_not_depend_on_its_company() -> None:
    torch.manual_seed(4)
    rows = MIXED[1:4] if DEVICE == "cpu" else MIXED
    logits = torch.randn(len(rows), 500).to(DEVICE)
    columns = ([row.get(name, off) for row in rows] for name, off in OFF.items())
    table = torch.from_numpy(pack_settings(*columns, seed=np.arange(len(rows)))).to(DEVICE)
    slots = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    together, alone, last = torch.zeros_like(slots), torch.zeros_like(slots), torch.zeros_like(slots)
    sample(logits, table, slots, slots, together, last, fallback=FALLBACK)
    for i in range(len(rows)):
        one = slice(i, i + 1)
        sample(logits[one], table, slots[one], slots[one], alone[one], last, fallback=FALLBACK)
    assert torch.equal(together, alone)


OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("settings", [MIXED[0], MIXED[2]] if DEVICE == "cpu" else MIXED, ids=str)
def test_rows_that_cannot_be_sampled(settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 500)
    logits[0, 432] = torch.nan
    logits[1, 17] = torch.inf
    logits[2] = -torch.inf
    logits[3, :] = torch.nan
    logits[4, 5:] = -torch.inf  # this one can, and whole chunks of it weigh nothing
    logits[5, :490] = -torch.inf
    found = run(logits, [settings] * 6, [1, 2, 3, 4, 5, 6])
    assert found[:4] == [FALLBACK] * 4
    assert found[4] < 5
    assert found[5] >= 490
    assert found == expected(logits, [settings] * 6, [1, 2, 3, 4, 5, 6])


def test_padded_rows_touch_nothing() -> None:
    logits = torch.zeros(3, 50, device=DEVICE)
    logits[:, 9] = 5
    table = torch.from_numpy(pack_settings([0.0, 0.0], 0, 1.0, 0.0, 0)).to(DEVICE)
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32, device=DEVICE)
    tokens = torch.full((3,), -5, dtype=torch.int32, device=DEVICE)
    last = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
    sample(logits, table, slots, slots.clamp(min=0), tokens, last, fallback=FALLBACK)
    assert tokens.tolist() == [FALLBACK, 9, FALLBACK]
    assert last.tolist() == [-7, 9]


def test_padded_rows_with_masks_touch_nothing() -> None:
    """Not even their logits: they name a row that is not there, and have one of their own in what is written."""
    logits = torch.zeros(2, 50, device=DEVICE)
    table = torch.from_numpy(pack_settings([0.0, 0.0], 0, 1.0, 0.0, 0)).to(DEVICE)
    at, slots, positions = torch.tensor([[1, 2, 2], [1, -1, -1], [4, 0, 0]], dtype=torch.int32, device=DEVICE)
    masks = torch.tensor([[1 << 9, 0], [-1, -1], [-1, -1]], dtype=torch.int32, device=DEVICE)
    tokens = torch.full((3,), -5, dtype=torch.int32, device=DEVICE)
    last = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
    sample(logits, table, slots, positions, tokens, last, fallback=FALLBACK, rows=at, masks=masks)
    assert tokens.tolist() == [-5, 9, FALLBACK]
    assert last.tolist() == [-7, 9]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 9000)
    logits[0, [300, 4000, 8999]] = 1.0
    logits[1, [8000, 8001]] = 1.0
    assert run(logits, [{"temperature": 0.0}] * 2, [1, 1]) == [300, 8000]


def test_packing_keeps_the_smallest_temperature_above_greedy() -> None:
    packed = pack_settings([0.0, 1e-300, 0.5], [-1, 0, 40], 0.25, [0.0, 0.5, 1.0], [1, 2, 2**64 - 1])
    assert packed.shape == (3, 8)
    temperature = packed[:, 0].view(np.float32)
    assert temperature[0] == 0
    assert temperature[1] > 0
    assert temperature[2] == 0.5
    assert packed[2].tobytes()[-8:] == b"\xff" * 8


@pytest.mark.parametrize("vocab", [70, 1000] if DEVICE == "cpu" else [70, 2049, 151_936])
def test_masked_rows_are_the_samplers(vocab: int) -> None:
    """Some rows of a batch, in any order, each with a mask; the others are left alone."""
    torch.manual_seed(vocab)
    rng = np.random.default_rng(vocab)
    rows = MIXED if DEVICE == "cpu" else 10 * MIXED
    n = len(rows)
    logits = torch.randn(2 * n, vocab)
    at = rng.permutation(2 * n)[:n].astype(np.int32)
    masks = rng.integers(-(2**31), 2**31, (n, -(-vocab // 32)), dtype=np.int32)
    masks[0] = 0  # nothing is allowed
    masks[1] = masks[2] = 0
    masks[1, -1] = 1  # one token is
    masks[2, 0] = -(2**31)  # the one of a word's last bit
    logits[at[3], 5] = torch.nan
    masks[3, 0] &= ~(1 << 5)  # a row with a NaN is lost, also where the NaN is forbidden
    positions = list(range(n))
    found = run(logits, rows, positions, at, masks)
    wanted = expected(logits[torch.from_numpy(at).long()], rows, positions, masks)
    assert found[0] == found[3] == FALLBACK
    assert found[1:3] == [32 * (masks.shape[1] - 1), 31]
    bits = allowed(masks, vocab)
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        masked = torch.where(torch.from_numpy(bits[i]), logits[at[i]], -torch.inf)
        assert mine == theirs or near_a_boundary(masked, rows[i], SEED + i, positions[i], mine), (rows[i], i)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= n // 20
