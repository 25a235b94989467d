"""What passes between an ingress and an engine replica: one call down, replies up.

Replies are msgpack bytes: Ray sends bytes as they are, and encoding one takes about a microsecond, where pickling an
object takes ten or more. A refusal is a value, not an exception: an exception raised in a replica is logged there with
its traceback, wrapped and pickled, for what may be a client's typing error.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from nanoengine.outputs import Delta, FinishReason, PromptScores
from nanoengine.sampling.params import SamplingParams


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. ``(ingress, number)`` is unique, and is the engine's key: never a client's own id."""

    ingress: str  # which ingress replica sent it
    number: int  # counts that ingress's calls up by one
    prompt: npt.NDArray[np.int32]  # [prompt length]; after it, what there is of an answer that is to go on
    params: SamplingParams
    model: str  # ``EngineConfig.identity`` of the engine that it is meant for
    generated: int = 0  # tokens at the end of ``prompt`` that are the answer's
    clip: bool = False  # max_tokens is a default: cut it to what the context leaves
    priority: int = 0
    cache_salt: str = ""
    avoid: tuple[str, ...] = ()  # replicas (unique ids) that failed this call before
    expected_cached: int | None = None  # prompt tokens that the router takes the replica to have cached

    @property
    def key(self) -> str:
        return f"{self.ingress}-{self.number}"


class ClaimCheck(msgspec.Struct, frozen=True, array_like=True):
    """What a call of Serve's has of a request that went ahead of it by the channel."""

    key: str  # ``GenerateCall.key``


class Misplaced(Exception):
    """Serve wants another replica for a call whose request is at one already: it was full there, or is being stopped,
    or is gone. The sequence may go on by a new call, with all that came of the first."""


class TokenInfo(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one sampled token and of the likeliest ones, best first, as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """All that one sequence produced since the chunk before; counts are running totals."""

    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenInfo, ...] | None = None
    token_ids: tuple[int, ...] = ()  # what another replica would have to go on from
    prompt_scores: tuple[PromptScores, ...] = ()
    times: tuple[float, float] | None = None  # of the first: seconds in the queue, and from there to it

    @classmethod
    def of(cls, delta: Delta) -> Chunk:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = tuple(TokenInfo(t.token_id, t.logprob, t.top) for t in delta.logprobs)
        return cls(
            delta.text,
            delta.finish_reason,
            delta.stop_reason,
            delta.prompt_tokens,
            delta.cached_tokens,
            delta.completion_tokens,
            logprobs,
            delta.token_ids,
            delta.prompt_scores,
            delta.times,
        )


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """Why a sequence got no (more) tokens. After ``dead`` the replica serves nothing of the ingress's any more; after
    ``cut`` it may. Either way the sequence may go on at another one."""

    kind: Literal["invalid", "overloaded", "dead", "cut", "internal"]
    message: str
    replica: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 1.0


def merged(first: Chunk, second: Chunk) -> Chunk:
    """Two successive chunks of one sequence as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or ()) + (second.logprobs or ())
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        logprobs=logprobs,
        token_ids=first.token_ids + second.token_ids,
        prompt_scores=first.prompt_scores + second.prompt_scores,
        times=first.times,
    )


Reply = Chunk | Refusal

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reply).decode
