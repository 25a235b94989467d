"""A tiny model, and transformers' reading of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.test_equality import Reference
from tests.engine.tiny_models import write_tiny_model


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """See there."""


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def reference(folder: Path) -> Reference:
    return Reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
