"""The supported architectures, what every model offers, and loading one. Torch is imported only to load."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from nanoengine.models import llama, mistral, qwen2, qwen3
from nanoengine.models.family import Family

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanoengine.attention.base import ForwardContext
    from nanoengine.layers.ops import Ops
    from nanoengine.models.config import ModelConfig
    from nanoengine.weights.load import Slot
    from nanoengine.weights.sources import ModelFiles

_FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}
"""By the name in config.json."""

GGUF_FAMILIES: dict[str, Family] = {family.gguf: family for family in _FAMILIES if family.gguf}
"""By the name in GGUF metadata."""


class CausalLM(Protocol):
    """A decoder-only language model over a paged KV cache. Runs under ``torch.inference_mode``."""

    config: ModelConfig
    dtype: torch.dtype

    def __call__(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """int64 [T] token ids and their positions, T tokens of all rows one after the other -> hidden states
        [T, hidden_size] in the model's dtype, after the last norm."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], both in the model's dtype; into ``out`` if that is given, on a GPU."""
        ...

    def slots(self) -> dict[str, Slot]:
        """Where each tensor of a checkpoint goes, by its name there. All of them are required."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor though the model has no use for it."""
        ...

    def weight_bytes(self) -> int:
        """Memory of the weights, as they are laid out."""
        ...

    def finish(self) -> None:
        """Called once when all slots are filled: lay weights out as the device likes them best."""
        ...


def load_model(files: ModelFiles, config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build ``config``'s model in ``dtype`` on ``device``, computing with ``ops``, and fill it from ``files``.

    Raises:
        ModelLoadError: weights are missing, unexpected, of another shape, or their files are damaged.
    """
    from nanoengine.weights.load import fill, stored_tensors

    module, name = FAMILIES[config.architecture].model.split(":")
    model: CausalLM = getattr(import_module(module), name)(config, ops, dtype, device)
    fill(model.slots(), stored_tensors(files, config), model.ignores)
    model.finish()
    return model
