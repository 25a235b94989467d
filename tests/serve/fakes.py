"""Stand-ins for engines and metrics, so that the API is tested without Ray and without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from deployments.config import AppArgs
from deployments.ingress.api import Api
from deployments.ingress.errors import ApiError
from deployments.ingress.served import Engines, ServedModel, Text
from deployments.messages import Chunk, TokenInfo
from nanoengine.sampling.params import SamplingParams


class FakeEngines:
    """Every sequence gets ``pieces``, one chunk each; ``error`` is raised after ``error_after`` of them."""

    def __init__(self, pieces: Sequence[str] = ("Hel", "lo", " wörld")) -> None:
        self.pieces = list(pieces)
        self.up = True
        self.max_model_len = 4096
        self.finish_reason: Literal["stop", "length"] = "stop"
        self.stop_reason: str | None = None
        self.cached_tokens = 0
        self.error: Exception | None = None
        self.error_after = 0
        self.calls: list[tuple[list[int], SamplingParams, bool]] = []
        self.sessions: list[str] = []
        self.open = 0
        self.hold: asyncio.Event | None = None  # after the first chunk, wait for it

    def available(self) -> bool:
        return self.up

    def retry_after_s(self) -> float:
        return 1.0

    async def memory(self) -> dict[str, Any]:
        return {"replica": "r1", "weights": 5}

    async def until_open(self, sequences: int) -> None:
        while self.open < sequences:  # noqa: ASYNC110  # a test's wait, a few turns of the loop
            await asyncio.sleep(0)

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
        self.calls.append((prompt.tolist(), params, clip))
        self.sessions.append(session)
        self.open += 1
        try:
            tokens = 0
            for index, piece in enumerate(self.pieces):
                if self.error is not None and index == self.error_after:
                    raise self.error
                await asyncio.sleep(0)
                tokens += len(piece.encode())
                last = index == len(self.pieces) - 1
                logprobs = None
                if params.logprobs is not None:
                    top = ((ord("z"), -1.5), (ord("y"), float("-inf")))[: params.logprobs]
                    logprobs = tuple(TokenInfo(byte, -0.5, top) for byte in piece.encode())
                finish, stop = (self.finish_reason, self.stop_reason) if last else (None, None)
                yield Chunk(piece, finish, stop, len(prompt), self.cached_tokens, tokens, logprobs)
                if self.hold is not None:
                    await self.hold.wait()
        finally:
            self.open -= 1


class FakeMetrics:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def first_token(self, seconds: float) -> None:
        self.seen["first_token"] += 1

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.seen["next_tokens"] += tokens

    def spent(self, spans: Mapping[str, float]) -> None:
        self.seen.update(f"spent:{span}" for span in spans)

    def finished(self, reason: str, seconds: float) -> None:
        self.seen[f"finished:{reason}"] += 1

    def rejected(self, reason: str) -> None:
        self.seen[f"rejected:{reason}"] += 1


def dead_engine() -> ApiError:
    return ApiError(503, "the engine has ended", type="server_error", code="engine_unavailable", retry_after=1)


def api_of(args: AppArgs, engines: Engines, text: Text, metrics: FakeMetrics) -> Api:
    """The API of an application with one model."""
    return Api(args.ingress, [ServedModel(args, args.ingress, engines, text, metrics)])
