"""Family: what sets one architecture's configuration apart. No torch: an ingress reads configurations too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoengine.errors import ModelLoadError

HFConfig = Mapping[str, Any]
"""config.json, with the family's ``defaults`` under it."""


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture. An instance in its own file, and a line in ``registry.py``, make it known.

    ``traits`` turns config.json into those fields of ``ModelConfig`` in which the family differs from Llama.
    ``model`` is the class to build ("module:name"); it is imported when weights are loaded, as it needs torch.
    """

    architecture: str  # as config.json's "architectures" spells it
    gguf: str | None = None  # as GGUF's "general.architecture" spells it, where that is one of its own
    defaults: HFConfig = field(default_factory=dict)  # what transformers takes for a key that config.json leaves out
    traits: Callable[[HFConfig], dict[str, Any]] = lambda config: {}
    model: str = "nanoengine.models.decoder:DecoderLM"


def sliding_upper_layers(config: HFConfig) -> tuple[int | None, ...]:
    """Qwen's sliding windows: off unless ``use_sliding_window``; then per ``layer_types``, or from
    ``max_window_layers`` up."""
    layers = config["num_hidden_layers"]
    if not config["use_sliding_window"] or config["sliding_window"] is None:
        return (None,) * layers
    types = config.get("layer_types") or [
        "full_attention" if layer < config["max_window_layers"] else "sliding_attention" for layer in range(layers)
    ]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ModelLoadError(f"layer types {', '.join(sorted(unknown))} are not supported")
    return tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in types)
