"""Tokenizer: text <-> token ids, on the Rust ``tokenizers`` library. transformers is not needed and not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from nanoengine.errors import InvalidRequestError
from nanoengine.scheduling.step import IntArray
from nanoengine.text.token_bytes import TextDecoder, TokenBytes
from nanoengine.weights.sources import ModelFiles


class Tokenizer:
    """One model's tokenizer. Calls release the GIL while they encode and may run in several threads.

    Special tokens that stand in the text ("<|im_end|>") are recognised: that is what a rendered chat template and a
    hand-made prompt for completions need, and what transformers and vLLM do. A rendered template already holds the
    beginning-of-sequence token if the model wants one, so it is encoded with ``add_special_tokens=False``: otherwise
    there would be two. The price is that a user who writes "<|im_end|>" into a message ends it; see ``ChatTemplate``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        more_eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """``chat_templates`` by name: "default" is for ordinary use, "tool_use" for requests with tools if it differs.

        Raises ``ModelLoadError`` if the tokenizer's decoder cannot be streamed.
        """
        backend.no_truncation()  # a tokenizer.json may cut or pad in silence: a leftover of training
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.vocab_size: int = (
            max(backend.get_vocab_size(), *(i + 1 for i in added)) if added else backend.get_vocab_size()
        )
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id: int | None = self.token_id(bos_token)
        self.eos_token_id: int | None = self.token_id(eos_token)
        eos_ids = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *more_eos_ids]))
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        self._bytes = TokenBytes(backend)
        self._tables = {frozenset[int](): self._bytes}  # by the tokens that are hidden

    @property
    def chat_template(self) -> str | None:
        """The template for ordinary chat, or None: a base model."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with what the model wants around them (mostly nothing, or a first token) if asked.

        Raises ``InvalidRequestError`` for text that is not Unicode: a lone surrogate, as JSON's "\\ud800" makes one.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of each text, in parallel."""
        try:
            # The "fast" variant does not track character offsets, which nothing here reads.
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequestError(
                "text must be a string of whole characters: it holds half of a surrogate pair (\\ud800 to \\udfff)",
                code="invalid_value",
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; what is not valid UTF-8 becomes U+FFFD. Equal to what a stream of the same ids gives."""
        return self.decoder(skip_special_tokens=skip_special_tokens).push(ids, final=True)

    def decoder(
        self,
        prompt_ids: Sequence[int] | IntArray = (),
        *,
        skip_special_tokens: bool = True,
        visible: Iterable[int] = (),
    ) -> TextDecoder:
        """A decoder for tokens that come one by one after ``prompt_ids``. ``visible``: special tokens not to skip."""
        hidden = self.special_ids.difference(visible) if skip_special_tokens else frozenset()
        table = self._tables.get(hidden)
        if table is None:
            table = self._tables[hidden] = TokenBytes(self._backend, hidden)
        decoder = TextDecoder(table)
        last = next((i for i in range(len(prompt_ids) - 1, -1, -1) if table[prompt_ids[i]]), None)
        if last is not None:  # the prompt has text, so its start is past
            # It may end inside a character, if it came as ids: three tokens hold all bytes of what is unfinished.
            decoder.push([int(i) for i in prompt_ids[max(0, last - 2) : last + 1]], final=False)
        return decoder

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token stands for its name. Empty for an id without a token."""
        return self._bytes[token_id]

    def token_id(self, token: str | None) -> int | None:
        """The id of a token given in the vocabulary's own spelling."""
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer that comes with a model.

    Raises ``ModelLoadError`` if there is none, or of a kind that is not supported; the message says what to do.
    """
    from nanoengine.text import gguf_vocabulary, hf_folder, synthetic

    match files.format:
        case "safetensors":
            return hf_folder.load(files.root)
        case "gguf":
            return gguf_vocabulary.load(files.root)
        case "synthetic":
            return synthetic.load()
