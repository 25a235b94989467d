"""Weights from safetensors and GGUF: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file

from nanoengine.errors import ModelLoadError
from nanoengine.layers.ops import TorchOps
from nanoengine.layers.rotary import frequencies
from nanoengine.models.config import load_model_config
from nanoengine.models.registry import CausalLM, load_model
from nanoengine.weights.gguf import GGUFFile, stored_tensors
from nanoengine.weights.sources import ModelFiles
from tests.engine.tiny_models import VOCAB, paged_hidden, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    files = ModelFiles(path, "gguf" if path.suffix == ".gguf" else "safetensors")
    return load_model(files, load_model_config(files), TorchOps(), dtype, torch.device("cpu"))


@torch.inference_mode()
def answers(model: CausalLM) -> torch.Tensor:
    return model.logits(paged_hidden(model, [TOKENS])[0]).log_softmax(-1)


@torch.inference_mode()
def their_answers(model: transformers.PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)


# safetensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("written"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_sharded_equals_single(written: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(written)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(answers(load(tmp_path)), answers(load(written)))


def test_one_file_by_another_name(folder: Path, written: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(answers(load(folder)), answers(load(written)))
    shutil.copy(folder / "weights.safetensors", folder / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"more\.safetensors, weights\.safetensors"):
        load(folder)


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    wanted = answers(load(folder))
    # Where a tied head is stored all the same, the embedding is what counts, as in transformers.
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(VOCAB, 72)}))
    assert torch.equal(answers(load(folder)), wanted)


def test_rotary_buffers_are_ignored(folder: Path, written: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(12)}))
    assert torch.equal(answers(load(folder)), answers(load(written)))


def test_weights_are_cast_to_the_dtype_asked_for(written: Path) -> None:
    assert load(written, torch.bfloat16).embed.weight.dtype == torch.bfloat16  # type: ignore[attr-defined]
    torch.testing.assert_close(answers(load(written, torch.bfloat16)).float(), answers(load(written)), atol=3, rtol=0.3)


def test_missing_weights_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.2\.self_attn\.k_proj\.weight$"):
        load(folder)


def test_an_untied_head_is_not_guessed(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        load(folder)


def test_unexpected_weights_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.router.weight": torch.zeros(3)}))
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.0\.mlp\.router\.weight"):
        load(folder)


def test_biases_that_the_configuration_does_not_have_are_unexpected(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama_biased")
    change_config(folder, attention_bias=False)
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias.* and 12 more"):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change_config(folder, num_key_value_heads=1)
    with pytest.raises(ModelLoadError, match=r"self_attn\.k_proj\.weight has shape \[72, 72\], .* \[24, 72\]"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 7, 200, 0.5, 0.999])
def test_a_short_file_is_refused(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read, download it again"):
        load(folder)


def test_a_damaged_header_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match="download it again"):
        load(folder)


def test_faults_of_an_index(written: Path, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(written).save_pretrained(tmp_path, max_shard_size="200KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, second = sorted(set(whole["weight_map"].values()))[:2]

    moved = next(name for name, file in whole["weight_map"].items() if file == first)
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], moved: second}}))
    with pytest.raises(ModelLoadError, match=f"{re.escape(second)} lacks {re.escape(moved)}"):
        load(tmp_path)

    index.write_text(json.dumps(whole))
    (tmp_path / second).unlink()
    with pytest.raises(ModelLoadError, match=re.escape(second)):
        load(tmp_path)

    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ModelLoadError, match="is not a safetensors index"):
            load(tmp_path)


def test_an_index_that_points_outside_its_folder_is_refused(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    elsewhere = folder.parent / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(elsewhere)
    index = {"weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors files there: none"):
        load(folder)


# GGUF

SIZES = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 128, "head_dim": 32}  # blocks are 32 long

BLOCKS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{BLOCKS[part]}.{kind}"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's ``LlamaModel.permute``."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    folder: Path,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> transformers.PreTrainedModel:
    """Write a checkpoint as llama.cpp's converter would; returns the same model with its weights rounded likewise."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    extra(writer)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        # Norms and biases are never quantised.
        kind = type_ if weights.ndim == 2 else GGMLQuantizationType.F32
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind).copy()))
        if architecture == "llama" and ".q_proj." in name:
            weights = permuted(weights, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            weights = permuted(weights, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def _quantisable() -> list[GGMLQuantizationType]:
    """All types that the library can write with rows of 32 elements; the others are read from random bytes below."""
    found = []
    for kind in GGMLQuantizationType:
        try:
            gguf.quants.quantize(np.ones((1, 32), np.float32), kind)
        except (NotImplementedError, gguf.quants.QuantError):
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", _quantisable(), ids=lambda kind: kind.name)
def test_gguf_of_each_type_equals_transformers(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", **SIZES)
    theirs = write_gguf(tmp_path / "model.gguf", folder, kind)
    torch.testing.assert_close(answers(load(tmp_path / "model.gguf")), their_answers(theirs), atol=5e-4, rtol=1e-4)


def test_the_library_can_write_the_common_types() -> None:
    names = {kind.name for kind in _quantisable()}
    assert {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"} <= names


@pytest.mark.parametrize(
    ("architecture", "family", "settings"),
    [
        ("llama", "llama", {"tie_word_embeddings": True, "initializer_range": 0.15}),
        ("llama", "llama_biased", {}),
        ("llama", "mistral", {"num_key_value_heads": 2}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"head_dim": 64}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True, "initializer_range": 0.15}),
    ],
)
def test_gguf_of_each_architecture(architecture: str, family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, **{**SIZES, **settings})
    theirs = write_gguf(tmp_path / "model.gguf", folder, GGMLQuantizationType.Q8_0, architecture)
    ours = load(tmp_path / "model.gguf")
    torch.testing.assert_close(answers(ours), their_answers(theirs), atol=5e-4, rtol=1e-4)
    assert ours.config.tie_word_embeddings == settings.get("tie_word_embeddings", False)


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind in gguf.quants._type_traits])
def test_pieces_equal_the_whole_for_every_type(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes of each type that the library can read, in pieces, permuted, into another dtype."""
    monkeypatch.setattr("nanoengine.weights.gguf._CHUNK", 3000)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    columns = 512
    packed = np.random.default_rng(0).integers(
        0, 256, (24, columns // GGML_QUANT_SIZES[kind][0] * block_bytes), dtype=np.uint8
    )
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_v.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(gguf.quants.dequantize(packed, kind)).bfloat16()
        stored = {tensor.name: tensor for tensor in stored_tensors(GGUFFile.open(tmp_path / "x.gguf"), 3, 1)}
        q, v = torch.empty(2, 24, columns, dtype=torch.bfloat16)
        stored["model.layers.0.self_attn.q_proj.weight"].read_into(q)
        stored["model.layers.0.self_attn.v_proj.weight"].read_into(v)
    torch.testing.assert_close(v, whole, rtol=0, atol=0, equal_nan=True)
    back = torch.from_numpy(permuted(q.float().numpy(), 3)).bfloat16()
    torch.testing.assert_close(back, whole, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("for_gguf"), **SIZES, num_hidden_layers=2)


def test_gguf_configuration(gguf_folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    write_gguf(tmp_path / "m.gguf", gguf_folder, GGMLQuantizationType.F16, extra=extra)
    ours = load_model_config(ModelFiles(tmp_path / "m.gguf", "gguf"))
    theirs = load_model_config(ModelFiles(gguf_folder, "safetensors"))
    assert ours.eos_token_ids == (2, 7)
    assert ours.dtype == "float16"
    for name in ("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("num_kv_heads", "head_dim", "rope", "max_position", "tie_word_embeddings", "windows", "qkv_bias"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    ropes: dict[str, tuple[dict[str, Any], Callable[[gguf.GGUFWriter], None]]] = {}

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    ropes["linear"] = {"rope_type": "linear", "factor": 4.0}, linear

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    ropes["yarn"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, yarn

    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    }

    def divisors(writer: gguf.GGUFWriter) -> None:
        stretched = load_model_config(ModelFiles(tmp_path / "llama3", "safetensors")).rope
        plain = load_model_config(ModelFiles(tmp_path / "yarn", "safetensors")).rope
        plain = type(plain)(theta=plain.theta)
        writer.add_tensor("rope_freqs.weight", (frequencies(plain, 32, 1) / frequencies(stretched, 32, 1)).numpy())

    ropes["llama3"] = llama3, divisors
    for name, (rope, extra) in ropes.items():
        folder = write_tiny_model(tmp_path / name, **SIZES, rope_parameters={"rope_theta": 10000.0, **rope})
        theirs = write_gguf(tmp_path / f"{name}.gguf", folder, extra=extra)
        ours = load(tmp_path / f"{name}.gguf")
        torch.testing.assert_close(answers(ours), their_answers(theirs), atol=5e-4, rtol=1e-4)
        assert ours.config.max_position == load_model_config(ModelFiles(folder, "safetensors")).max_position


@pytest.mark.parametrize(
    ("fault", "extra"),
    [
        ("rope scaling type 'longrope'", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)),
        ("partial rotary", lambda w: w.add_rope_dimension_count(16)),
        ("mixtures of experts", lambda w: w.add_expert_count(8)),
        ("split GGUF", lambda w: w.add_uint16("split.count", 3)),
        ("blk.0.extra.weight", lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(4, np.float32))),
        ("missing: model.layers.2", lambda w: w.add_block_count(3)),
    ],
)
def test_gguf_that_is_not_supported(
    fault: str, extra: Callable[[gguf.GGUFWriter], None], gguf_folder: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_folder, extra=extra)
    with pytest.raises(ModelLoadError, match=re.escape(fault)):
        load(tmp_path / "m.gguf")


def test_gguf_of_an_unknown_architecture(gguf_folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_folder, architecture="gemma3")
    with pytest.raises(ModelLoadError, match=r"'gemma3' .* supported: llama, qwen2, qwen3"):
        load(tmp_path / "m.gguf")


def test_damaged_gguf(gguf_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, gguf_folder, GGMLQuantizationType.Q4_0)
    data = path.read_bytes()
    for keep in (0, 3, 10, 100, 2000, len(data) // 2, len(data) - 500):
        path.write_bytes(data[:keep])
        with pytest.raises(ModelLoadError, match=r"m\.gguf is (not a|cut short).*"):
            load(path)
    for spoiled in (b"GGML" + data[4:], data[:4] + b"\1" + data[5:], data[:8] + b"\xff" * 8 + data[16:]):
        path.write_bytes(spoiled)
        with pytest.raises(ModelLoadError, match="GGUF"):
            load(path)


def test_loading_keeps_no_second_copy(tmp_path: Path) -> None:
    """The default model's loading needs its own size and little more: a whole second copy would show."""
    folder = write_tiny_model(
        tmp_path / "hf", hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64,
        num_key_value_heads=4, num_hidden_layers=16, vocab_size=VOCAB,
    )  # fmt: skip
    write_gguf(tmp_path / "m.gguf", folder, GGMLQuantizationType.Q8_0)
    script = f"""
import resource, torch
from pathlib import Path
from nanoengine.models.config import load_model_config
from nanoengine.layers.ops import TorchOps
from nanoengine.models.registry import load_model
from nanoengine.weights.sources import ModelFiles
torch.set_num_threads(1)
torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8), 8)  # what the libraries need is not ours
import gguf.quants
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
files = ModelFiles(Path({str(tmp_path / "m.gguf")!r}), "gguf")
model = load_model(files, load_model_config(files), TorchOps(), torch.float32, torch.device("cpu"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024)
"""
    grown = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert size > 150e6
    assert grown < 1.5 * size  # the weights, the quantised file's mapped pages (a quarter), one tensor's pieces
