"""Small tokenizers of each kind that language models use, trained on the spot, and text that is hard on them."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from nanoengine.text.gguf_vocabulary import add_around
from nanoengine.text.tokenizer import Tokenizer

AWKWARD = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and trailing  ",
    "tabs\tand\n\nblank\r\nlines \n \n  x",
    "        deep indentation\n\t\tdef f(x):  # comment\n            return {'a': [1, 2.5e-10]}\n",
    "1234567890 3.14159 1,000,000 ١٢٣ Ⅷ ½ 0x1F",
    "I'm you're we'd it'll they've DON'T I'M",
    "naïve café Zürich Ångström e\u0301 \u1e9b\u0323 ﬁ",  # composed, decomposed, compatibility
    "你好世界。こんにちは 안녕하세요 ﷺ ภาษาไทย မြန်မာ",
    # joined emoji and a flag
    "🙂 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea x🙂y",
    "a\u200bb\ufeffc\u00a0d\u2003e\u3000f",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y <|im_end|> z<|im_end|><|im_end|>",
    "<s>[INST] hello [/INST]</s> <unk> <0x41> <0xFF>",
    "<|im_end <|im_end|",
    "▁ underscore ▁▁ Ġ Ċ",
    "a" * 300,
    "\x00\x01\x7f\x80",
    "https://example.org/a?b=c&d=%20#e  ... !!! ---- ====",
]

CORPUS = [text for text in AWKWARD if "<" not in text and "▁" not in text] * 3 + [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def add(a, b):\n    return a + b\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "In the beginning there was the word, and the word was with the reader of the words. It isn't what they'd say.",
    "Prices rose by 12 percent in 2023, and by 1500 in 2024; the 3rd of 45 cases, 678 pages.",
    "hello hello hello world world there the then than that this these those",
]

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")


def special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def parts(backend: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a BPE tokenizer."""
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@cache
def byte_level_parts(split: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return parts(backend)


def byte_level_backend() -> tokenizers.Tokenizer:
    vocab, merges = byte_level_parts(GPT2_SPLIT)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([special(token) for token in SPECIAL])
    # Added tokens are text, not byte-level spelling; one has characters that mean something there.
    backend.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("Ġxyz", normalized=False)])
    return backend


@cache
def sentence_piece_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary as Llama 2's: specials, 256 bytes, then pieces; small, so that much text falls back to bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=80, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    learned, merges = parts(backend)
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [token for token in sorted(learned, key=learned.__getitem__) if token not in tokens]
    return {token: i for i, token in enumerate(tokens)}, merges


def sentence_piece_backend(style: str) -> tokenizers.Tokenizer:
    """``llama``: a space before the text, dropped again in decoding; ``llama5``: the same as transformers 5 builds it;
    ``gemma``: no such space."""
    vocab, merges = sentence_piece_parts()
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    strip = [decoders.Strip(" ", 1, 0)]
    if style == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "llama5":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer, strip = normalizers.Replace(" ", "▁"), []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([special(token) for token in SPECIAL])
    return backend


@cache
def unigram_json() -> str:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.Metaspace()
    return backend.to_str()


BACKENDS = {
    "byte_level": byte_level_backend,
    "llama": lambda: sentence_piece_backend("llama"),
    "llama5": lambda: sentence_piece_backend("llama5"),
    "gemma": lambda: sentence_piece_backend("gemma"),
    "unigram": lambda: tokenizers.Tokenizer.from_str(unigram_json()),
}


@cache
def trained(kind: str) -> Tokenizer:
    """A tokenizer that begins every text with "<s>"."""
    backend = BACKENDS[kind]()
    add_around(backend, "<s>", None)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")
