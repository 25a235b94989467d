"""What each token stands for, as bytes: a table read off the tokenizer's decoder, and text made from it piece by piece.

A tokenizer's decoder turns a whole list of tokens into a string. Streaming needs the same text in instalments, at a
microsecond a token. For the decoders that language models use, a token's bytes do not depend on its neighbours (but for
the very first one's leading space), so text is the concatenation of bytes, decoded as UTF-8 with the unfinished
character at the end kept back.

Equal to ``tokenizers``' own decode, with one exception. Where a run of byte-fallback tokens is not valid UTF-8, that
library gives U+FFFD for every byte of the run, whole characters included. Those have been sent by then, so here they
stay, and each byte that is part of no character becomes U+FFFD. For tokenizers with a byte-level decoder there is no
exception.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from nanoengine.errors import ModelLoadError


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("nanoengine.each_byte", _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled as ids come up; ids without a token (a padded vocabulary has some) are empty.

    Raises ``ModelLoadError`` if the tokenizer's decoder is of a kind whose tokens depend on their neighbours.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._token_of = backend.id_to_token
        self._steps: list[Callable[[str], str]] = []
        self._to_bytes: Callable[[str], bytes] = str.encode
        self.errors = "replace"  # codec error handler that treats invalid UTF-8 as the decoder does
        self.mark = ""  # a space mark that the text's first token loses wherever it stands in it ...
        self.strips: tuple[bytes, int] = (b"", 0)  # ... and bytes of which the text loses up to so many at its start
        decoder = backend.decoder
        spec: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
        parts: list[Any] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        fused = False
        for part in parts:
            match part:
                case {"type": "ByteLevel"} if not fused:
                    self._to_bytes = _from_byte_level
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                    self._steps.append(_replacer(old, new))
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not fused:
                    self._steps.append(_replacer(mark, " "))
                    self.mark = "" if scheme == "never" else mark
                case {"type": "ByteFallback"} if not fused:
                    self._to_bytes = _from_byte_fallback
                    self.errors = "nanoengine.each_byte"
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": char, "start": start, "stop": 0} if fused:
                    self.strips = (char.encode(), start)
                case _:
                    raise ModelLoadError(
                        f"the tokenizer's decoder has a part {part} that cannot be streamed: only byte-level (GPT-2, "
                        "Llama 3, Qwen) and SentencePiece-style (Llama 2, Mistral, Gemma) decoders can"
                    )

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:  # not kept: there is no end of such ids
            return b""
        self[token_id] = result = self._bytes(token)
        return result

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        if not self.mark or not self[token_id]:
            return self[token_id]
        return self._bytes((self._token_of(token_id) or "").replace(self.mark, ""))

    def _bytes(self, token: str) -> bytes:
        for step in self._steps:
            token = step(token)
        return self._to_bytes(token)


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_LEVEL[char] for char in token])
    except KeyError:  # an added token, kept as the text it is
        return token.encode()


def _from_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.encode()


class TextDecoder:
    """Text of tokens that arrive in any number of instalments; never gives out half a character.

    A leading space that only marks the start of a text is dropped.
    """

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._bytes_of = table.__getitem__
        self._errors = table.errors
        self._rest = b""  # the start of an unfinished character
        self._first = bool(table.mark)
        self._strips = table.strips[1]

    def push(self, token_ids: Sequence[int], final: bool) -> str:
        """Text that the tokens complete. ``final``: nothing follows, so what is unfinished becomes U+FFFD."""
        at_start = self._first or self._strips
        data = self._start(token_ids) if at_start else b"".join(map(self._bytes_of, token_ids))
        if self._rest:
            data = self._rest + data
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._rest = data[used:]
        return text

    def _start(self, token_ids: Sequence[int]) -> bytes:
        pieces = list(map(self._bytes_of, token_ids))
        for index, piece in enumerate(pieces):
            if self._first and piece:
                pieces[index] = self._table.first(token_ids[index])
                self._first = False
        data = b"".join(pieces)
        char = self._table.strips[0]
        while self._strips and data:
            data, self._strips = (data[len(char) :], self._strips - 1) if data.startswith(char) else (data, 0)
        return data
