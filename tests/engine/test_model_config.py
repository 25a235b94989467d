"""config.json and generation_config.json: read whole, or refused by name. Read without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from nanoengine.errors import ModelLoadError
from nanoengine.models.config import ModelConfig, load_model_config
from nanoengine.weights.sources import ModelFiles
from tests.engine.tiny_models import FAMILIES, tiny_config


def read(folder: Path) -> ModelConfig:
    return load_model_config(ModelFiles(folder, "safetensors"))


def write(folder: Path, family: str = "llama", drop: tuple[str, ...] = (), **settings: Any) -> Path:
    config = {**tiny_config(family).to_dict(), "architectures": [f"{FAMILIES[family][0]}ForCausalLM"], **settings}
    for key in drop:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_what_transformers_reads(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, dtype="bfloat16")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read(tmp_path)
    assert ours.architecture == theirs.architectures[0]
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.dtype == "bfloat16"
    assert ours.max_position == 256
    assert ours.eos_token_ids == (2,)


@pytest.mark.parametrize("prefix", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_keys_left_out_mean_what_they_mean_to_transformers(prefix: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 30}
    sparse = {**sizes, "num_attention_heads": 32, "architectures": [f"{prefix}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    ours, theirs = read(tmp_path), getattr(transformers, f"{prefix}Config")(**sizes, num_attention_heads=32)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.windows == (theirs.sliding_window if prefix == "Mistral" else None,) * 30


def test_windows(tmp_path: Path) -> None:
    assert read(write(tmp_path, "mistral_window")).windows == (11,) * 5
    assert read(write(tmp_path, "mistral")).windows == (None,) * 5
    assert read(write(tmp_path, "qwen2_window", drop=("layer_types",))).windows == (None, None, 7, 7, 7)
    types = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    assert read(write(tmp_path, "qwen2_window", layer_types=types)).windows == (7, None, 7, None, None)
    assert read(write(tmp_path, "qwen2_window", use_sliding_window=False)).windows == (None,) * 5
    with pytest.raises(ModelLoadError, match="linear_attention"):
        read(write(tmp_path, "qwen2_window", layer_types=["linear_attention"] * 5))
    with pytest.raises(ModelLoadError, match="5 layers, but 3 layer types"):
        read(write(tmp_path, "qwen2_window", layer_types=types[:3]))


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 9]}, (7, 9)),
        ([2], {"eos_token_id": 0}, (0,)),
        (2, {"temperature": 0.6}, (2,)),
        (None, None, ()),
        ([2, 999, -1], None, (2,)),  # there is no token 999
    ],
)
def test_all_ends_of_sequence(config: Any, generation: Any, wanted: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel .* supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, r"\(none named\)"),
        ({"architectures": "LlamaForCausalLM"}, "list"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised.*gptq"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 4}, "9 heads do not divide into 4"),
        ({"head_dim": 7}, "even"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive"),
        ({"hidden_size": "big"}, "hidden_size must be"),
        ({"max_position_embeddings": "long"}, "not valid"),
        ({"vocab_size": 3.5}, "vocab_size must be"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refused(settings: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        read(write(tmp_path, **settings))


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"lacks '{key}'"):
        read(write(tmp_path, drop=(key,)))


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot read"):
        read(tmp_path)
    for text, fault in (("{", "is not JSON"), ("[]", "JSON object"), ("\xff", "is not JSON")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelLoadError, match=fault):
            read(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    write(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    assert read(tmp_path).architecture == "LlamaForCausalLM"


def test_needs_no_torch(tmp_path: Path) -> None:
    """An ingress reads configurations; torch costs it seconds and memory."""
    write(tmp_path)
    script = f"""
import sys
from pathlib import Path
import nanoengine.models.registry, nanoengine.weights.gguf
from nanoengine.models.config import load_model_config
from nanoengine.weights.sources import ModelFiles
load_model_config(ModelFiles(Path({str(tmp_path)!r}), "safetensors"))
print(sorted({{"torch", "transformers", "gguf"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
