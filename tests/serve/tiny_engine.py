"""A real engine with a tiny random model behind the API, without Ray: what a field does to the tokens themselves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.messages import Chunk
from nanoengine.answer import Answer, Made
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.sampling.params import SamplingParams
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model


class TinyEngines:
    """One engine in this process: whoever waits for a token makes the next step."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.tokenizer = load_tokenizer(resolve_model(str(folder)))
        limits = {"dtype": "float32", "device": "cpu", "num_threads": 1, "cpu_kv_cache_bytes": 64 << 20}
        config = EngineConfig.model_validate({"model": str(folder), "max_num_seqs": 16} | limits | settings)
        self.engine = Engine(config, self.tokenizer.eos_token_ids, self.tokenizer.vocab_size)
        self._keys = itertools.count()
        self._made: dict[int, Made] = {}
        self._answers: dict[int, Answer] = {}
        self._errors: dict[int, Exception] = {}

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    def available(self) -> bool:
        return True

    def retry_after_s(self) -> float:
        return 1.0

    async def memory(self) -> dict[str, Any]:
        return {}

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool,
        priority: int,
        cache_salt: str,
        session: str,
    ) -> AsyncGenerator[Chunk]:
        room = self.engine.info.max_model_len - len(prompt)
        if clip and params.max_tokens is not None:
            params = replace(params, max_tokens=min(params.max_tokens, max(1, room)))
        key, answer = next(self._keys), Answer(self.tokenizer, params, prompt.tolist())
        self.engine.add(key, prompt, params, priority=priority, cache_salt=cache_salt)
        self._made[key], self._answers[key] = Made(), answer
        try:
            while True:
                while not (self._made[key].tokens or self._made[key].finish_reason) and key not in self._errors:
                    self._step()
                    await asyncio.sleep(0)
                if key in self._errors:
                    raise self._errors.pop(key)
                made, self._made[key] = self._made[key], Made()
                delta = answer.take(made)
                yield Chunk.of(delta)
                if delta.finish_reason is not None:
                    return
        finally:
            del self._made[key], self._answers[key]
            self.engine.abort(key)

    def _step(self) -> None:
        output = self.engine.step()
        if output is None:
            return
        for key, cached in output.started:
            if key in self._answers:
                self._answers[key].cached_tokens = cached
        for key, scores in output.scores:
            if key in self._made:
                self._made[key].scores.append(scores)
        keys = output.keys.tolist()
        for index, (key, token) in enumerate(zip(keys, output.tokens.tolist(), strict=True)):
            if key in self._made:
                self._made[key].tokens.append(token)
                if index in output.logprobs:
                    self._made[key].logprobs.append(output.logprobs[index])
        for end in output.finished:
            if end.key in self._made:
                self._made[end.key].finish_reason, self._made[end.key].stop_token = end.reason, end.stop_token
        self._errors.update((key, error) for key, error in output.refused if key in self._made)
