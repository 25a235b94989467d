"""Text to token ids, once, in the ingress: off the event loop, so that a long prompt delays nobody's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.config import ReasoningParserName, ToolParserName
from deployments.ingress.dialect import Dialect
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import Tokenizer


class TextFrontend:
    """A model's tokenizer and chat template behind a few threads (the tokenizer releases the GIL)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        threads: int,
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """``sampling_defaults``: fields of ``SamplingParams`` for requests that do not set them."""
        self.sampling_defaults = sampling_defaults or {}
        self._tokenizer = tokenizer
        self._template = ChatTemplate.of(tokenizer)
        self.dialect = Dialect.of(tokenizer, self._template, tool_parser, reasoning_parser)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> npt.NDArray[np.int32]:
        """The prompt [length] of a conversation. Raises ``InvalidRequestError`` where the template refuses it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._chat, messages, options)

    def _chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> npt.NDArray[np.int32]:
        text = self._template.render(messages, **options)
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    async def encode(self, text: str, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """The token ids [length] of plain text."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), np.int32)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        decode = partial(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._tokenizer.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Every token's id is below it."""
        return self._tokenizer.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._tokenizer.token_bytes(token_id)
