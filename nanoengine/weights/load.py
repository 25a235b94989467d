"""Fill a model from a checkpoint: every tensor goes to its slot, and nothing may be missing or left over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from nanoengine.errors import ModelLoadError
from nanoengine.models.config import ModelConfig
from nanoengine.weights import gguf, safetensors
from nanoengine.weights.sources import ModelFiles
from nanoengine.weights.stored import StoredTensor

Slot = Callable[[StoredTensor], None]
"""Takes in one stored tensor. ``into`` makes the plain one; a tensor-parallel layer would read a slice of it, and a
quantised one has slots for its packed weights and scales."""


def into(target: Tensor) -> Slot:
    """The slot that fills ``target``, which may be a view of part of a fused weight."""

    def slot(stored: StoredTensor) -> None:
        if stored.shape != tuple(target.shape):
            raise ModelLoadError(
                f"weight {stored.name} has shape {list(stored.shape)}, but the configuration makes it "
                f"{list(target.shape)}: weights and configuration belong to different models"
            )
        stored.read_into(target)

    return slot


def stored_tensors(files: ModelFiles, config: ModelConfig) -> Iterator[StoredTensor]:
    """All tensors of a checkpoint, under transformers' names."""
    if files.format == "gguf":
        return gguf.stored_tensors(gguf.GGUFFile.open(files.root), config.num_heads, config.num_kv_heads)
    return safetensors.stored_tensors(files.root)


@torch.no_grad()
def fill(slots: dict[str, Slot], tensors: Iterable[StoredTensor], ignores: Callable[[str], bool]) -> None:
    """Fill all slots.

    Raises:
        ModelLoadError: a slot stayed empty, or a tensor has no slot and is not ignored; names them.
    """
    missing, unexpected = dict(slots), []
    for stored in tensors:
        if slot := missing.pop(stored.name, None):
            slot(stored)
        elif not ignores(stored.name):
            unexpected.append(stored.name)
    if missing or unexpected:
        faults = [
            f"{what}: {', '.join(sorted(names)[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for what, names in (("missing", list(missing)), ("unexpected", unexpected))
            if names
        ]
        raise ModelLoadError(f"weights do not fit the model; {'; '.join(faults)}")
