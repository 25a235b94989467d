"""TritonOps against TorchOps: each operation, then whole models. Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from nanoengine.errors import ModelLoadError  # noqa: E402
from nanoengine.layers import select  # noqa: E402
from nanoengine.layers.ops import HeadNorms, Norm, TorchOps  # noqa: E402
from nanoengine.layers.select import select_ops  # noqa: E402
from nanoengine.layers.triton_ops import DeterministicOps, TritonOps  # noqa: E402
from nanoengine.models.config import load_model_config  # noqa: E402
from nanoengine.models.registry import load_model  # noqa: E402
from nanoengine.weights.sources import ModelFiles  # noqa: E402
from tests.engine.tiny_models import FAMILIES, VOCAB, paged_hidden, write_tiny_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# The interpreter truncates to bfloat16 where a GPU rounds, so there only the others are compared.
DTYPES = [torch.float32, torch.float16] if DEVICE.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
# Two steps of the last place: sums in another order, or another exp, may round to the other side, and then a product.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)  # drawn on the CPU: the same numbers on every device


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within two steps of the last place everywhere, and equal nearly everywhere in the narrow dtypes."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance / 8, rtol=tolerance)
    if expected.dtype != torch.float32:
        assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (5, 72), (9, 576), (3, 1536), (2, 5000)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    x, delta = normal(rows, size, dtype=dtype), 3 * normal(rows, size, dtype=dtype)
    weight = 1 + normal(size, dtype=dtype) / 4
    for added in (None, delta):
        expected = TorchOps().add_rms_norm(x, added, Norm(weight, 1e-5))
        found = TritonOps().add_rms_norm(x.clone(), added, Norm(weight, 1e-5))
        assert torch.equal(found[0], expected[0])
        assert_close(found[1], expected[1])


def test_the_norm_of_a_row_does_not_depend_on_its_company() -> None:
    torch.manual_seed(0)
    x, weight = normal(9, 72, dtype=torch.bfloat16), normal(72, dtype=torch.bfloat16)
    _, together = TritonOps().add_rms_norm(x, None, Norm(weight, 1e-5))
    for i in range(9):
        assert torch.equal(
            TritonOps().add_rms_norm(x[i : i + 1].clone(), None, Norm(weight, 1e-5))[1], together[i : i + 1]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 3072), (5, 104), (3, 1025)])
def test_swiglu(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    gate_up = 4 * normal(rows, 2 * size, dtype=dtype)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])  # exp overflows, and vanishes
    assert_close(TritonOps().swiglu(gate_up), TorchOps().swiglu(gate_up))


def rope_case(
    ops: TorchOps | TritonOps,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tokens: int,
    norm: bool,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, keys, values after ``rope_and_store`` of random tokens; every call sees the same ones."""
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    blocks = tokens // block_size + 3
    qkv = 2 * normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.arange(300)[:, None] * 0.3 ** torch.arange(dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    positions = torch.randint(300, (tokens,)).to(DEVICE)
    slots = torch.randperm(blocks * block_size)[:tokens].to(DEVICE)
    norms = HeadNorms(1 + normal(dim, dtype=dtype) / 4, 1 + normal(dim, dtype=dtype) / 4, 1e-5) if norm else None
    keys, values = (torch.full((blocks, block_size, kv_heads, dim), 7.0).to(DEVICE, cache_dtype or dtype) for _ in "kv")
    q = ops.rope_and_store(qkv, ops.rope(table, positions, dtype), norms, keys, values, slots)
    assert q.is_contiguous() or isinstance(ops, TorchOps)
    return q, keys, values


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [((16, 8, 128), 1), ((9, 3, 64), 11), ((4, 1, 96), 5), ((9, 3, 24), 4), ((3, 3, 256), 2), ((32, 4, 8), 3)],
)
def test_rope_and_store(dtype: torch.dtype, shape: tuple[int, int, int], tokens: int, norm: bool) -> None:
    found = rope_case(TritonOps(), dtype, shape, tokens, norm)
    expected = rope_case(TorchOps(), dtype, shape, tokens, norm)
    for mine, theirs in zip(found, expected, strict=True):
        if norm or dtype == torch.float32 or DEVICE.type == "cuda":
            # What rotates may cancel: the last place is that of the larger of the pair. The compiler makes one
            # operation of a product and the sum, where the interpreter rounds between them as torch does.
            torch.testing.assert_close(mine, theirs, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        else:
            assert torch.equal(mine, theirs)
    assert torch.equal(found[2], expected[2])


def test_a_negative_slot_stores_nothing() -> None:
    torch.manual_seed(0)
    ops, dim = TritonOps(), 16
    table = torch.randn(9, dim).to(DEVICE)
    positions = torch.tensor([3, 4, 0], device=DEVICE)
    qkv = normal(3, 4 * dim, dtype=torch.float32)
    keys, values = (torch.full((3, 4, 1, dim), 7.0, device=DEVICE) for _ in "kv")
    slots = torch.tensor([5, -1, -1], device=DEVICE, dtype=torch.int32)
    ops.rope_and_store(qkv, ops.rope(table, positions, torch.float32), None, keys, values, slots)
    for pages in (keys, values):
        written = (pages.view(12, dim) != 7).any(dim=1).nonzero().flatten()
        assert written.tolist() == [5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_float8_saturates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops, dim = TritonOps(), 16
    # Values that float8 holds: the interpreter does not round to it as a GPU does.
    qkv = (50 * normal(6, 4 * dim, dtype=dtype)).to(torch.float8_e4m3fn).to(dtype)
    qkv[0, -4:] = torch.tensor([1e4, -1e4, 448.0, 480.0])
    table = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=1).to(DEVICE)  # turns nothing
    positions, slots = torch.zeros(6, dtype=torch.int64, device=DEVICE), torch.arange(6, device=DEVICE)
    keys, values = (torch.zeros(2, 4, 1, dim, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in "kv")
    ops.rope_and_store(qkv, ops.rope(table, positions, dtype), None, keys, values, slots)
    for pages, wide in ((keys, qkv[:, 2 * dim : 3 * dim]), (values, qkv[:, 3 * dim :])):
        expected = wide.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(pages.view(8, dim)[:6].float(), expected.float())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the paged loop of tiny_models runs on the CPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_those_on_torch_ops(family: str, tmp_path: Path) -> None:
    files = ModelFiles(write_tiny_model(tmp_path, family, num_hidden_layers=2), "safetensors")
    torch.manual_seed(1)
    sequences = [torch.randint(VOCAB, (length,)).tolist() for length in (5, 1, 3)]
    hidden = []
    for ops in (TritonOps(), TorchOps()):
        model = load_model(files, load_model_config(files), ops, torch.float32, DEVICE)
        hidden.append(torch.cat(paged_hidden(model, sequences, chunk=3)))
    torch.testing.assert_close(*hidden, atol=2e-5, rtol=2e-5)


def test_which_ops_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert type(select_ops(cpu)) is type(select_ops(cpu, deterministic=True)) is TorchOps
    assert type(select_ops(cuda)) is TritonOps
    assert type(select_ops(cuda, deterministic=True)) is DeterministicOps
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert type(select_ops(cuda)) is TorchOps
    with pytest.raises(ModelLoadError, match="install triton"):
        select_ops(cuda, deterministic=True)
