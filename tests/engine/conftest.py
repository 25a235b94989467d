"""Shared by the engine's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanoengine.weights.sources import PACKAGED_MODELS, cache_directory


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, if it is on this machine: a test does not download 90 MB by itself."""
    name = Path(PACKAGED_MODELS["smollm2-135m-instruct"].member).name
    given = os.environ.get("NANOSERVE_TEST_GGUF")
    found = [Path(given)] if given else sorted(cache_directory().glob(f"models/*/{name}"))
    if not found:
        pytest.skip("the default model is not in the cache: python -m nanoengine.weights.sources smollm2-135m-instruct")
    return found[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are faster on one thread, and on a busy machine many times so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
