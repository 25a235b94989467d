"""Tokenizers from each source: ids against transformers, against a naive BPE, and against what the files say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.errors import InvalidRequestError, ModelLoadError
from nanoengine.text.gguf_vocabulary import add_around
from nanoengine.text.tokenizer import Tokenizer, load_tokenizer
from nanoengine.weights.sources import PACKAGED_MODELS, ModelFiles, cache_directory
from tests.engine.trained_tokenizers import (
    AWKWARD,
    BACKENDS,
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    SPECIAL,
    byte_level_parts,
    sentence_piece_parts,
    trained,
)


def smollm2_path() -> Path:
    """SmolLM2's GGUF, where it is on this machine already."""
    if path := os.environ.get("NANOSERVE_TEST_GGUF"):
        return Path(path)
    found = sorted(cache_directory().rglob(Path(PACKAGED_MODELS["smollm2-135m-instruct"].member).name))
    if not found:
        pytest.skip("SmolLM2's GGUF is not in the cache (make serve once, or set NANOSERVE_TEST_GGUF)")
    return found[0]


# -- Hugging Face folders ---------------------------------------------------------------------------------------------


def write_folder(folder: Path, kind: str, **config: object) -> ModelFiles:
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles(folder, "safetensors")


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}, "pad_token": "</s>"},
    ],
    ids=str,
)
@pytest.mark.parametrize("around", [(None, None), ("<s>", None), ("<s>", "</s>")], ids=str)
def test_ids_and_text_equal_transformers(tmp_path, kind, config, around):
    from transformers import AutoTokenizer

    files = write_folder(tmp_path, kind, **config)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    add_around(backend, *around)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_ids == {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    for text in AWKWARD:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(AWKWARD) == [ours.encode(text) for text in AWKWARD]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    backend = BACKENDS["byte_level"]()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles(tmp_path, "safetensors"))
    assert tokenizer.decode(tokenizer.encode("a long text of more than four tokens")) == (
        "a long text of more than four tokens"
    )
    assert len(tokenizer.encode("a")) == 1


def test_tokens_and_roles_that_only_the_configuration_knows(tmp_path):
    size = BACKENDS["byte_level"]().get_vocab_size()
    files = write_folder(
        tmp_path,
        "byte_level",
        eos_token="hello-end",
        pad_token="[no such token]",
        additional_special_tokens=["<tool call>"],
        added_tokens_decoder={
            str(size): {"content": "hello-end", "special": True, "lstrip": False, "normalized": False},
            "4": {"content": "<|im_end|>", "special": True},
        },
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, size]}))
    tokenizer = load_tokenizer(files)
    assert tokenizer.eos_token_id == size
    assert tokenizer.eos_token_ids == (size, 4)
    assert tokenizer.vocab_size == size + 1  # "[no such token]" got no id
    assert size in tokenizer.encode("a hello-end b")
    assert tokenizer.decode(tokenizer.encode("a<tool call>b")) == "ab"  # special by its role


def test_special_tokens_map_is_read_where_there_is_nothing_newer(tmp_path):
    BACKENDS["llama"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    tokenizer = load_tokenizer(ModelFiles(tmp_path, "safetensors"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_chat_templates_in_all_their_places(tmp_path):
    def templates(**config: object) -> dict[str, str]:
        return load_tokenizer(write_folder(tmp_path, "byte_level", **config)).chat_templates

    assert templates() == {}
    assert templates(chat_template="A") == {"default": "A"}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert templates(chat_template=named) == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert templates(chat_template="A") == {"default": "C"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("D")
    tokenizer = load_tokenizer(write_folder(tmp_path, "byte_level", chat_template=named))
    assert (tokenizer.chat_template, tokenizer.chat_templates["tool_use"]) == ("C", "D")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path, name):
    with pytest.raises(ModelLoadError, match="copy the model's tokenizer files"):
        load_tokenizer(ModelFiles(tmp_path, "safetensors"))
    (tmp_path / name).write_text("x")
    with pytest.raises(ModelLoadError, match=rf"has {name} but no tokenizer\.json.*save_pretrained"):
        load_tokenizer(ModelFiles(tmp_path, "safetensors"))


@pytest.mark.parametrize(("name", "text"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[]")])
def test_damaged_files(tmp_path, name, text):
    files = write_folder(tmp_path, "byte_level")
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name):
        load_tokenizer(files)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        tokenizers.decoders.WordPiece(),
        tokenizers.decoders.CTC(),
        tokenizers.decoders.Sequence([tokenizers.decoders.Fuse(), tokenizers.decoders.Replace("a", "b")]),
        tokenizers.decoders.Replace(tokenizers.Regex("a+"), "b"),
    ],
    ids=str,
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder):
    backend = BACKENDS["byte_level"]()
    if decoder is None:
        state = json.loads(backend.to_str()) | {"decoder": None}
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    else:
        backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="cannot be streamed"):
        Tokenizer(backend)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: str, tokens: list[str], **metadata: object) -> ModelFiles:
    kinds = {"<unk>": 2, "<tool call>": 4} | dict.fromkeys(SPECIAL[1:], 3)  # unknown, user-defined, control
    types = [6 if regex.fullmatch("<0x..>", token) else kinds.get(token, 1) for token in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}", str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles(path, "gguf")


def naive_bpe(symbols: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Merge the best pair, leftmost first, until none is left."""
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in rank]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


def naive_encode(
    text: str,
    split: str,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    nfc: bool = False,
    whole: bool = False,
) -> list[int]:
    """Byte-level BPE as GPT-2's reference code does it, written apart from the code under test.

    ``whole``: a word that is a token is taken as it is, whatever the merges would give.
    """
    alphabet = gpt2_alphabet()
    rank = {pair: i for i, pair in enumerate(merges)}
    ids = []
    for piece in regex.split(f"({'|'.join(map(regex.escape, SPECIAL))})", text):
        if piece in SPECIAL:
            ids.append(vocab[piece])
            continue
        for word in regex.findall(split, unicodedata.normalize("NFC", piece) if nfc else piece):
            symbols = [alphabet[byte] for byte in word.encode()]
            spelled = "".join(symbols)
            ids += [vocab[s] for s in ([spelled] if whole and spelled in vocab else naive_bpe(symbols, rank))]
    return ids


def gpt2_alphabet() -> list[str]:
    chars, extra = [], 0
    for byte in range(256):
        if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD):
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + extra))
            extra += 1
    return chars


SPLITS = {
    "gpt-2": GPT2_SPLIT,
    "default": GPT2_SPLIT,
    "smollm": GPT2_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
}


@pytest.mark.parametrize("pre", SPLITS)
def test_gguf_byte_level_equals_a_naive_bpe(tmp_path, pre):
    split = SPLITS[pre]
    vocab, merges = byte_level_parts(split)
    vocab = vocab | {"zebra": len(vocab)}  # which no merges lead to
    tokens = sorted(vocab, key=vocab.__getitem__)
    spelled = [" ".join(merge) for merge in merges]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "gpt2", tokens, merges=spelled, pre=pre))

    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        want = []
        # smollm cuts out the digits before it splits the rest: a space is never joined to one.
        for part in regex.findall(r"\p{N}|\P{N}+", text) if pre == "smollm" else [text]:
            want += naive_encode(part, split, vocab, merges, nfc=pre == "qwen2", whole=pre == "llama-bpe")
        assert ids == want

    for text in [*AWKWARD, "zebra a zebra"]:
        check(text)
    given(st.text(st.sampled_from("aA e1٣\n\r\t .,'🙂é你<|_\u00a0"), max_size=30))(settings(max_examples=150)(check))()


def test_gguf_sentence_piece_equals_naive_merging_by_score(tmp_path):
    """SentencePiece's rule: of all adjacent pairs whose whole is a piece, join the one with the best score."""
    vocab, merges = sentence_piece_parts()
    tokens = sorted(vocab, key=vocab.__getitem__)
    score = {left + right: float(-rank) for rank, (left, right) in reversed(list(enumerate(merges)))}
    scores = [score.get(token, -1e6 - i) for i, token in enumerate(tokens)]
    files = write_gguf(tmp_path / "m.gguf", "llama", tokens, scores=scores, unknown_token_id=0)
    tokenizer = load_tokenizer(files)

    best = {(a, b): -scores[vocab[a + b]] for a in vocab for b in vocab if a + b in vocab}

    def naive(text: str) -> list[int]:
        ids = []
        for symbol in naive_bpe(list("▁" + text.replace(" ", "▁")), best):
            ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids

    for text in AWKWARD:
        if text and not any(token in text for token in SPECIAL):
            assert tokenizer.encode(text) == [1, *naive(text)]
    assert tokenizer.encode("a<|im_end|>") == [1, *naive("a"), 4]
    assert tokenizer.decode(tokenizer.encode(" x  y 🙂")) == " x  y 🙂"


@pytest.mark.parametrize(
    ("metadata", "first", "last"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
    ids=str,
)
def test_gguf_flags(tmp_path, metadata, first, last):
    vocab, merges = byte_level_parts(GPT2_SPLIT)
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<tool call>"]
    spelled = [" ".join(merge) for merge in merges]
    files = write_gguf(
        tmp_path / "m.gguf",
        "gpt2",
        tokens,
        merges=spelled,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=4,
        chat_template="T",
        **metadata,
    )
    tokenizer = load_tokenizer(files)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == first + plain + last
    assert tokenizer.eos_token_ids == (2, 4)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "T")
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode("<tool call>")[len(first)] == len(tokens) - 1  # found whole, and shown: it is not special
    assert tokenizer.decode(tokenizer.encode("a<tool call>b")) == "a<tool call>b"


@pytest.mark.parametrize(
    ("model", "metadata", "message"),
    [("bert", {}, "kind 'bert'"), ("t5", {}, "kind 't5'"), ("gpt2", {"pre": "martian"}, "rule 'martian'")],
)
def test_gguf_tokenizers_that_are_not_supported(tmp_path, model, metadata, message):
    files = write_gguf(tmp_path / "m.gguf", model, ["<unk>", "a"], merges=["a a"], **metadata)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(files)


# The published tokenizer.json's ids (digits one by one, no joining of a space and a digit, runs of spaces).
def test_smollm2():
    tokenizer = load_tokenizer(ModelFiles(smollm2_path(), "gguf"))
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert tokenizer.encode("<|im_start|>user\nHello  12345<|im_end|>") == (
        tokenizer.encode("<|im_start|>user\nHello  12345<|im_end|>", add_special_tokens=False)
    )
    vocab = {tokenizer._backend.id_to_token(i): i for i in range(tokenizer.vocab_size)}
    merges = [tuple(merge) for merge in json.loads(tokenizer._backend.to_str())["model"]["merges"]]
    for text in AWKWARD:
        if any(token in text for token in ("<|im", "<s>")):
            continue
        want = []
        for part in regex.findall(r"\p{N}|\P{N}+", text):
            want += naive_encode(part, GPT2_SPLIT, vocab, merges)
        assert tokenizer.encode(text) == want
        assert tokenizer.decode(want) == text


# -- synthetic --------------------------------------------------------------------------------------------------------


@given(st.text(max_size=50))
@settings(deadline=None, max_examples=100)
def test_synthetic_is_one_token_per_byte(text):
    tokenizer = load_tokenizer(ModelFiles(Path(), "synthetic"))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_synthetic_has_what_a_service_needs():
    tokenizer = load_tokenizer(ModelFiles(Path(), "synthetic"))
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("a<|im_end|>\n") == [97, 259, 10]
    assert set(tokenizer.eos_token_ids) == {257, 259}
    assert tokenizer.chat_template is not None


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_every_token_s_bytes_give_the_library_s_text(kind):
    """The whole table: between two ordinary tokens, each token adds its bytes and nothing else."""
    tokenizer = trained(kind)
    anchor = tokenizer.token_id("e")
    assert anchor is not None
    for token_id in range(tokenizer.vocab_size):
        whole = tokenizer._backend.decode([anchor, token_id, anchor], skip_special_tokens=False)
        assert "e" + tokenizer.token_bytes(token_id).decode("utf-8", "replace") + "e" == whole
    assert tokenizer.token_bytes(tokenizer.vocab_size + 10) == b""
    assert tokenizer.decode(range(tokenizer.vocab_size, tokenizer.vocab_size + 1000)) == ""
    assert len(tokenizer._bytes) <= tokenizer.vocab_size, "ids without a token have no end, and are not kept"


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_half_of_a_surrogate_pair_is_refused(kind):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        trained(kind).encode("a\ud83d")


def test_a_rendered_template_gets_no_second_beginning():
    tokenizer = trained("llama")
    rendered = "<s><|im_start|>user"
    assert tokenizer.encode(rendered, add_special_tokens=False)[:2] == [1, 3]
    assert tokenizer.encode(rendered)[:3] == [1, 1, 3]  # what a chat must not do


def test_threads_may_share_a_tokenizer():
    tokenizer, want = trained("byte_level"), [trained("byte_level").encode(text) for text in AWKWARD]
    wrong = []

    def work() -> None:
        for _ in range(50):
            if [tokenizer.encode(text) for text in AWKWARD] != want:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_text_needs_neither_torch_nor_transformers():
    code = (
        "import sys, nanoengine.text.tokenizer as t, nanoengine.text.chat, nanoengine.text.detokenizer\n"
        "from pathlib import Path\n"
        "t.load_tokenizer(t.ModelFiles(Path(), 'synthetic')).encode('x')\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
