"""Every kernel compiles for a Hopper GPU. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)


def test_every_kernel_compiles() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_kernels"],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {line.split(" ")[0] for line in done.stdout.splitlines()}
    expected = {"_decode", "_attend_prefixes", "_prefill", "_few_rows", "_rope_store", "_add_rms_norm", "_swiglu"}
    assert kernels == expected | {"_matmul", "_summarise", "_filter", "_draw"}
