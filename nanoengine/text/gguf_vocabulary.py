"""The tokenizer inside a GGUF file: its vocabulary, and the splitting rules that llama.cpp's names stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from nanoengine.errors import ModelLoadError
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.weights.gguf import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def load(path: Path) -> Tokenizer:
    """Read the tokenizer out of a GGUF file's metadata.

    Raises ``ModelLoadError`` if there is none, or of a kind that is not supported.
    """
    metadata = GGUFFile.open(path).metadata

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    tokens, kind = get("tokens"), get("model")
    if kind not in ("gpt2", "llama") or tokens is None:
        raise ModelLoadError(
            f"{path} has a tokenizer of kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are "
            "supported: use the model's safetensors folder with its tokenizer.json instead"
        )
    if kind == "gpt2":
        pre = get("pre", "default")
        backend = _byte_level(path, tokens, get("merges", []), pre)
        add_bos = get("add_bos_token", pre in _ADD_BOS)
    else:
        unknown = tokens[get("unknown_token_id", 0)]
        backend = _sentence_piece(tokens, get("scores"), unknown, get("add_space_prefix", True))
        add_bos = get("add_bos_token", True)

    types = get("token_type", [_NORMAL] * len(tokens))
    added = [
        AddedToken(token, special=type_ != _USER_DEFINED, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)  # they have their ids already; this makes them be found whole in a text

    def role(name: str, default: int | None) -> str | None:
        token_id = get(name, default)
        return None if token_id is None else tokens[token_id]

    spm = kind == "llama"
    bos_token, eos_token = role("bos_token_id", 1 if spm else None), role("eos_token_id", 2 if spm else None)
    add_around(backend, bos_token if add_bos else None, eos_token if get("add_eos_token", False) else None)
    return Tokenizer(
        backend,
        bos_token=bos_token,
        eos_token=eos_token,
        more_eos_ids=[get(name) for name in ("eot_token_id", "eom_token_id") if get(name) is not None],
        chat_templates=_chat_templates(metadata),
    )


def add_around(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Make ``encode(add_special_tokens=True)`` put these tokens before and after a text; None for none."""
    template = [*([bos_token] if bos_token else []), "$A", *([eos_token] if eos_token else [])]
    special = [(token, backend.token_to_id(token)) for token in (bos_token, eos_token) if token]
    backend.post_processor = TemplateProcessing(single=template, pair=None, special_tokens=special)


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    names = metadata.get("tokenizer.chat_templates", [])
    templates = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return templates


# -- byte-level BPE -------------------------------------------------------------------------------------------------


def _plain() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_plain()]


# tokenizer.ggml.pre -> how the model's own tokenizer.json splits text
_PRE_TOKENIZERS = {
    "default": _plain,
    "gpt-2": _plain,
    "smollm": _digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
}
_ADD_BOS = ("llama-bpe",)  # where a file does not say
_NFC = ("qwen2", "deepseek-r1-qwen")
_WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word that is a token is taken whole, whatever the merges would give


def _byte_level(path: Path, tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{path} splits text by the rule {pre!r}; known are {', '.join(sorted(_PRE_TOKENIZERS))}: "
            "use the model's safetensors folder with its tokenizer.json instead"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    return backend


# -- SentencePiece BPE ----------------------------------------------------------------------------------------------


def _sentence_piece(
    tokens: list[str], scores: list[float], unknown: str, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE merges the adjacent pair whose whole has the best score: the same as merges in that order."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
