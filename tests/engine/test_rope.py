"""Rotary embeddings equal transformers': frequencies to the bit, models of every rope type in what they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanoengine.errors import ModelLoadError
from nanoengine.layers.ops import TorchOps, rotate
from nanoengine.layers.rotary import RotaryEmbedding, frequencies
from nanoengine.models.config import ModelConfig, RopeConfig, load_model_config
from nanoengine.models.registry import CausalLM, load_model
from nanoengine.weights.sources import ModelFiles
from tests.engine.tiny_models import VOCAB, Paged, paged_hidden, tiny_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TRAINED = 64  # context of the tiny models before stretching

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic_uneven": {"rope_type": "dynamic", "factor": 1.7, "rope_theta": 1234.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_no_original": {"rope_type": "yarn", "factor": 4.0},
    "yarn_all": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 40,
        "attention_factor": 0.9,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    "yarn_sharp": {  # both ends of the ramp on one dimension
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "beta_fast": 2.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def parameters(name: str) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **ROPES[name]}  # a copy: transformers writes into what it is given


def configs(name: str, head_dim: int, folder: Path) -> tuple[transformers.PretrainedConfig, ModelConfig]:
    theirs = tiny_config(head_dim=head_dim, max_position_embeddings=TRAINED, rope_parameters=parameters(name))
    theirs.architectures = ["LlamaForCausalLM"]
    theirs.save_pretrained(folder)
    return theirs, load_model_config(ModelFiles(folder, "safetensors"))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name: str, head_dim: int, tmp_path: Path) -> None:
    theirs, ours = configs(name, head_dim, tmp_path)
    if ROPES[name]["rope_type"] == "default":
        wanted, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        wanted, scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](theirs)
    mine = frequencies(ours.rope, head_dim, TRAINED)
    assert torch.equal(mine.expand(TRAINED, -1)[-1], wanted)
    assert ours.rope.attention_factor == scale

    rotary = LlamaRotaryEmbedding(theirs)
    positions = torch.arange(TRAINED)
    q, k = torch.randn(2, TRAINED, 3, head_dim)
    cos, sin = rotary(q, positions[None])
    q_wanted, k_wanted = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    table = RotaryEmbedding(ours.rope, head_dim, ours.max_position, CPU).table
    cos, sin = TorchOps().rope(table, positions, torch.float32)
    torch.testing.assert_close(rotate(q, cos, sin), q_wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotate(k, cos, sin), k_wanted, atol=1e-6, rtol=1e-6)


def test_rotation_in_bfloat16_is_transformers_to_the_bit(tmp_path: Path) -> None:
    theirs, ours = configs("yarn", 64, tmp_path)
    q = torch.randn(TRAINED, 3, 64, dtype=torch.bfloat16)
    positions = torch.arange(TRAINED)
    cos, sin = LlamaRotaryEmbedding(theirs)(q, positions[None])
    wanted, _ = apply_rotary_pos_emb(q, q, cos[0], sin[0])
    table = RotaryEmbedding(ours.rope, 64, ours.max_position, CPU).table
    cos, sin = TorchOps().rope(table, positions, torch.bfloat16)
    assert torch.equal(rotate(q, cos, sin), wanted)


def pair(name: str, folder: Path) -> tuple[CausalLM, transformers.PreTrainedModel]:
    write_tiny_model(folder, "llama", max_position_embeddings=TRAINED, rope_parameters=parameters(name))
    files = ModelFiles(folder, "safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return load_model(files, load_model_config(files), TorchOps(), torch.float32, CPU), theirs.eval()


@pytest.mark.parametrize("name", ROPES)
def test_models_equal_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path)
    length = min(ours.config.max_position, 120)
    if "dynamic" in name:
        length = TRAINED  # beyond it there is no one right answer: see the next test
    tokens = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        hidden = paged_hidden(ours, [tokens], chunk=19)[0]
        wanted = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
        torch.testing.assert_close(ours.logits(hidden).log_softmax(-1), wanted, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "dynamic_uneven"])
def test_dynamic_ntk_decodes_as_transformers_beyond_its_context(name: str, tmp_path: Path) -> None:
    """From a prompt within the trained context, token by token, to the stretched end; in any chunking."""
    ours, theirs = pair(name, tmp_path)
    end = ours.config.max_position
    assert end == int(TRAINED * ROPES[name]["factor"])
    prompt = torch.randint(VOCAB, (TRAINED - 9,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        paged = Paged(ours, capacity=end, rows=1, block_size=4)
        hidden = paged.step({0: prompt})[0]
        output = theirs(torch.tensor([prompt]), use_cache=True)
        tokens, mine = list(prompt), [hidden]
        while True:
            logits = ours.logits(hidden[-1:])
            torch.testing.assert_close(
                logits.log_softmax(-1), output.logits[0, -1:].log_softmax(-1), atol=5e-4, rtol=1e-4
            )
            if len(tokens) == end:
                break
            tokens.append(int(logits.argmax()))
            hidden = paged.step({0: tokens[-1:]})[0]
            mine.append(hidden)
            output = theirs(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
        rechunked = paged_hidden(ours, [tokens], chunk=33)[0]
    torch.testing.assert_close(rechunked, torch.cat(mine), atol=2e-4, rtol=1e-4)


def test_a_shorter_table_is_the_start_of_the_longer(tmp_path: Path) -> None:
    """An engine that serves less than the model's context asks for a smaller table."""
    for name in ROPES:
        _, ours = configs(name, 24, tmp_path)
        whole = RotaryEmbedding(ours.rope, 24, ours.max_position, CPU).table
        for length in (1, 17, TRAINED, ours.max_position):
            assert torch.equal(RotaryEmbedding(ours.rope, 24, length, CPU).table, whole[:length])


def test_divisors_are_llama3_as_gguf_stores_it(tmp_path: Path) -> None:
    _, ours = configs("llama3", 64, tmp_path)
    plain = dataclasses.replace(ours.rope, type="default")
    divisors = frequencies(plain, 64, 1) / frequencies(ours.rope, 64, 1)
    stored = RopeConfig(theta=ours.rope.theta, divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(frequencies(stored, 64, 1), frequencies(ours.rope, 64, 1))


# config.json, in the forms it has had


def rope_of(folder: Path, **settings: Any) -> ModelConfig:
    config = tiny_config(max_position_embeddings=TRAINED).to_dict()
    config.pop("rope_parameters")
    folder.joinpath("config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"], **settings}))
    return load_model_config(ModelFiles(folder, "safetensors"))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ROPES)
def test_both_generations_of_config_json_mean_the_same(name: str, key: str, tmp_path: Path) -> None:
    new = rope_of(tmp_path, rope_parameters=parameters(name))
    scaling = parameters(name)
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old = rope_of(tmp_path, rope_theta=theta, rope_scaling={key: kind, **scaling})
    assert old == new


def test_no_scaling_is_default(tmp_path: Path) -> None:
    assert rope_of(tmp_path, rope_theta=5e5, rope_scaling=None).rope == RopeConfig(theta=5e5)
    assert rope_of(tmp_path).rope == RopeConfig(theta=1e4)


@pytest.mark.parametrize(
    ("name", "longest"),
    [("default", TRAINED), ("linear", TRAINED), ("llama3", TRAINED), ("dynamic", 2 * TRAINED), ("yarn_all", 120)],
)
def test_longest_sequence(name: str, longest: int, tmp_path: Path) -> None:
    assert rope_of(tmp_path, rope_parameters=parameters(name)).max_position == longest


@pytest.mark.parametrize(
    ("rope", "fault"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not supported"),
        ({"type": "su", "factor": 2.0}, "'su'"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_type": "linear", "factor": "two"}, "not valid"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_what_is_not_understood_is_refused(rope: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        rope_of(tmp_path, rope_parameters=rope)
