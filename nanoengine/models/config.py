"""ModelConfig: what a model is, from Hugging Face's config.json or GGUF metadata. No torch, and no model code is run.

Every key that changes the result is understood or refused: a rope type, a quantisation or an activation that we do not
know is a ``ModelLoadError``, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nanoengine.errors import ModelLoadError
from nanoengine.models.registry import FAMILIES, GGUF_FAMILIES
from nanoengine.weights.gguf import GGUFFile
from nanoengine.weights.sources import ModelFiles

DType = Literal["float32", "bfloat16", "float16"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched beyond the trained context.

    ``linear``: positions divided by ``factor``. ``dynamic``: NTK-aware, the base grows with the position.
    ``llama3``: low frequencies divided (Llama 3.1). ``yarn``: arXiv 2309.00071.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # context before stretching, in tokens: dynamic, llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    beta_fast: float = 32.0  # yarn: rotations over the original context from which on a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations up to which a frequency is divided
    truncate: bool = True  # yarn: the two bounds are rounded to whole dimensions
    divisors: tuple[float, ...] = ()  # divide each frequency: GGUF's rope_freqs, how llama.cpp stores llama3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. Sizes are numbers of elements; ``max_position`` is a number of tokens."""

    architecture: str  # a key of ``registry.FAMILIES``
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # longest sequence; a smaller one may be set with ``dataclasses.replace`` before loading
    dtype: DType  # what the weights are stored in; bfloat16 for a quantised GGUF
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of q and k
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, in tokens; None attends to all

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            _check(isinstance(value, int) and value > 0, f"{name} must be a positive integer, got {value!r}")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads",
        )
        _check(self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim must be even and positive: {self.head_dim}")
        _check(self.max_position > 0, f"max_position must be positive, got {self.max_position}")
        eos = self.eos_token_ids
        _check(all(isinstance(token, int) for token in eos), f"eos_token_id must be token ids, got {eos!r}")
        # An id beyond the vocabulary (some configurations name one) can never be sampled.
        object.__setattr__(self, "eos_token_ids", tuple(token for token in eos if 0 <= token < self.vocab_size))
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        _check(len(self.windows) == self.num_layers, f"{self.num_layers} layers, but {len(self.windows)} layer types")
        _check(all(w is None or w > 0 for w in self.windows), f"sliding window must be positive: {self.windows}")


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Read a model's configuration; no weight is read.

    Raises:
        ModelLoadError: it is missing, damaged, or asks for something that is not supported; the message names it.
    """
    try:
        return _from_gguf(GGUFFile.open(files.root)) if files.format == "gguf" else _from_folder(files.root)
    except KeyError as error:
        raise ModelLoadError(f"the configuration of {files.root} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"the configuration of {files.root} is not valid: {error}") from error


def _check(condition: bool, fault: str) -> None:
    if not condition:
        raise ModelLoadError(fault)


# Hugging Face


def _from_folder(root: Path) -> ModelConfig:
    stated = _read_json(root / "config.json")
    architectures = stated.get("architectures") or []
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        raise ModelLoadError(
            f"architecture {', '.join(architectures) or '(none named)'} of {root} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    config = {**family.defaults, **stated}
    # No code from the folder is run ("auto_map"), so the weights have to be those of the named architecture.
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(f"{root} is quantised ({method}), which is not supported: use full weights, or a GGUF")
    activation = config.get("hidden_act", "silu")
    _check(activation == "silu", f"activation {activation!r} is not supported, silu is")

    rope = _hf_rope(config)
    heads = config["num_attention_heads"]
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=_max_position(rope, config["max_position_embeddings"]),
        dtype=_hf_dtype(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=_hf_eos(root, config),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **family.traits(config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    _check(isinstance(value, dict), f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", value)


def _hf_dtype(name: str) -> DType:
    name = name.removeprefix("torch.")
    _check(name in ("float32", "bfloat16", "float16"), f"dtype {name!r} is not supported")
    return cast(DType, name)


def _hf_eos(root: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's where it has any (chat models list several), else config.json's."""
    path = root / "generation_config.json"
    ids = _read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _hf_rope(config: Mapping[str, Any]) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5), else ``rope_theta`` and ``rope_scaling`` (before)."""
    stated: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [key for key, value in stated.items() if isinstance(value, dict)]
    _check(not nested, f"rope parameters per layer type ({', '.join(nested)}) are not supported")
    partial = stated.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _check(partial in (None, 1.0), f"partial rotary embedding (partial_rotary_factor {partial}) is not supported")
    kind = stated.get("rope_type") or stated.get("type") or "default"
    theta = float(stated.get("rope_theta") or config.get("rope_theta") or 10000.0)
    # Some models keep the trained context beside the rope parameters, and transformers lets that one win.
    original = config.get("original_max_position_embeddings") or stated.get("original_max_position_embeddings")
    trained = config["max_position_embeddings"]
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=_factor(stated["factor"]))
    if kind == "dynamic":
        return RopeConfig(type="dynamic", theta=theta, factor=_factor(stated["factor"]), original_max_position=trained)
    if kind == "llama3":
        return RopeConfig(
            type="llama3",
            theta=theta,
            factor=_factor(stated["factor"]),
            original_max_position=original or trained,
            low_freq_factor=stated["low_freq_factor"],
            high_freq_factor=stated["high_freq_factor"],
        )
    if kind == "yarn":
        factor = _factor(stated["factor"] if stated.get("factor") is not None else trained / (original or trained))
        return RopeConfig(
            type="yarn",
            theta=theta,
            factor=factor,
            original_max_position=original or trained,
            attention_factor=_yarn_attention_factor(stated, factor),
            beta_fast=stated.get("beta_fast") or 32,
            beta_slow=stated.get("beta_slow") or 1,
            truncate=stated.get("truncate", True),
        )
    raise ModelLoadError(f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn")


def _factor(value: float) -> float:
    _check(value >= 1, f"rope scaling factor must be at least 1, got {value}")
    return float(value)


def _yarn_attention_factor(stated: Mapping[str, Any], factor: float) -> float:
    """What multiplies cos and sin: stated, or from the paper (section 3.4), or DeepSeek's ratio of two such."""
    if stated.get("attention_factor") is not None:
        return float(stated["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if stated.get("mscale") and stated.get("mscale_all_dim"):
        return mscale(stated["mscale"]) / mscale(stated["mscale_all_dim"])
    return mscale(1)


def _max_position(rope: RopeConfig, stated: int) -> int:
    """The longest sequence. A stretched rope serves more than it was trained on, and only yarn and dynamic say from
    what: models with linear scaling and llama3 put the stretched context into ``max_position_embeddings`` already."""
    if rope.type in ("yarn", "dynamic"):
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated


# GGUF


def _from_gguf(file: GGUFFile) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata["general.architecture"]
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        raise ModelLoadError(
            f"GGUF architecture {architecture!r} of {file.path} is not supported; "
            f"supported: {', '.join(sorted(GGUF_FAMILIES))}"
        )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        if isinstance(value, list):  # one value a layer
            _check(
                len(set(value)) == 1, f"{architecture}.{key} differs between layers, which is not supported: {value}"
            )
            return value[0]
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    rotated = get("rope.dimension_count", head_dim)
    _check(rotated == head_dim, f"partial rotary embedding ({rotated} of {head_dim} dimensions) is not supported")
    _check(get("attention.value_length", head_dim) == head_dim, "keys and values of different sizes are not supported")
    _check(not get("expert_count", 0), "mixtures of experts are not supported")
    layers = get("block_count")
    rope = _gguf_rope(file, get)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_position=_max_position(rope, get("context_length")),
        dtype=_gguf_dtype(file),
        eos_token_ids=_gguf_eos(metadata),
        tie_word_embeddings="output.weight" not in file.tensors,
        # The metadata names no biases and norms: the file has them or has not.
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(metadata.get(f"{architecture}.attention.sliding_window"),) * layers,
    )


def _gguf_dtype(file: GGUFFile) -> DType:
    """By the embedding's type. A quantised model has none of its own: bfloat16, as activations may exceed float16."""
    names: dict[int, DType] = {0: "float32", 1: "float16"}
    return names.get(file.tensors["token_embd.weight"].type, "bfloat16")


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of sequence, of turn and of message: a chat model may end with any of them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _gguf_rope(file: GGUFFile, get: Any) -> RopeConfig:
    theta, trained = get("rope.freq_base", 10000.0), get("context_length")
    divisors = tuple(file.floats("rope_freqs.weight").tolist()) if "rope_freqs.weight" in file.tensors else ()
    kind = get("rope.scaling.type", "none")
    # Before rope.scaling.* there was one key, for linear scaling.
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" and factor == 1.0:
        return RopeConfig(theta=theta, divisors=divisors)
    if kind in ("none", "linear"):
        return RopeConfig(type="linear", theta=theta, factor=_factor(factor), divisors=divisors)
    if kind == "yarn":
        _check(get("rope.scaling.yarn_ext_factor", 1.0) == 1.0, "rope.scaling.yarn_ext_factor is not supported")
        _check(not get("rope.scaling.yarn_log_multiplier", 0.0), "rope.scaling.yarn_log_multiplier is not supported")
        given = get("rope.scaling.yarn_attn_factor", get("rope.scaling.attn_factor", 1.0))
        return RopeConfig(
            type="yarn",
            theta=theta,
            factor=_factor(factor),
            original_max_position=get("rope.scaling.original_context_length", trained),
            attention_factor=given * _yarn_attention_factor({}, factor),  # llama.cpp multiplies, transformers replaces
            beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
            divisors=divisors,
        )
    raise ModelLoadError(f"GGUF rope scaling type {kind!r} is not supported; supported: none, linear, yarn")
