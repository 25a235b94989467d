"""Where Triton kernels run in tests: compiled where there is a GPU, else in Triton's interpreter. Import it first."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter multiplies bfloat16 wrongly, so there only the others are compared.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _interpret() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # A scalar is an array of one element there, which numpy 2.4 no longer takes for an int.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if DEVICE == "cpu":
    _interpret()


def add_up_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor core adds up each row of a product alike; a BLAS, which the interpreter calls, does not."""
    if DEVICE == "cpu":
        matmul = np.matmul
        monkeypatch.setattr(np, "matmul", lambda a, b, **kw: np.stack([matmul(row, b, **kw) for row in a]))
