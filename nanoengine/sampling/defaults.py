"""What a model's ``generation_config.json`` recommends for requests that do not say otherwise. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams
from nanoengine.weights.sources import ModelFiles

logger = logging.getLogger("nanoengine")

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""As in vLLM, but for ``max_new_tokens``: how long an answer may get is the operator's to say."""


def sampling_defaults(config: EngineConfig, files: ModelFiles) -> Mapping[str, Any]:
    """Fields of ``SamplingParams``; none if the config says ``none`` or the model has no such file.

    A value that no request could ask for is left out, and a line in the log says so, as it does of those that apply.
    """
    file = files.root / "generation_config.json"
    if config.generation_config == "none" or files.format != "safetensors" or not file.is_file():
        return {}
    found: dict[str, Any] = {}
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        for name in _FIELDS:
            if (value := stated.get(name)) is not None:
                SamplingParams(**{name: value})
                found[name] = value
    except (OSError, ValueError, AttributeError, InvalidRequestError) as error:
        logger.warning("generation_config.json does not apply from here on: %s", error)
    if found:
        told = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.info("requests that do not set them take from generation_config.json: %s", told)
    return found
