"""What engine process and its owner say to each other: msgpack frames over a socket pair, one per step each way.

A frame is a 4-byte little-endian length and that many bytes. No pickle: a frame can only ever be one of these types.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from nanoengine.cache.events import PrefixEvents
from nanoengine.errors import EngineOverloadedError, InvalidRequestError, Refusal
from nanoengine.outputs import EngineInfo, Load, MemorySummary, PromptScores, TokenLogprob
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.scheduler import Finished

HEADER = 4  # bytes


class Start(msgspec.Struct, tag=True, array_like=True):
    """Owner to engine, once and first: what to be."""

    config: str  # EngineConfig as JSON
    eos_token_ids: tuple[int, ...]  # of the tokenizer
    num_tokens: int  # that it has
    log_prefixes: bool = False  # whether updates are to carry prefix events


class Add(msgspec.Struct, tag=True, array_like=True):
    """Owner to engine: a new request."""

    key: int
    tokens: bytes  # int32 ids of the prompt, and of what there is of the answer
    params: SamplingParams
    priority: int
    cache_salt: str
    generated: int  # how many of the tokens are the answer's


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Owner to engine: nobody waits for this request any more."""

    key: int


class Inspect(msgspec.Struct, tag=True, array_like=True):
    """Owner to engine: send a ``Memory`` with this number."""

    number: int


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Engine to owner, once: the model is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Engine to owner, last words: why the process ends. ``load_error``: the model or configuration is at fault."""

    message: str
    load_error: bool


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Engine to owner: a request that is not served, now or ever, and why."""

    key: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None  # seconds: it may be served then

    @classmethod
    def of(cls, key: int, error: Refusal) -> Refused:
        if isinstance(error, EngineOverloadedError):
            return cls(key, str(error), retry_after=error.retry_after)
        return cls(key, error.message, error.param, error.code)

    def error(self) -> Refusal:
        """The error that this one was made of."""
        if self.retry_after is not None:
            return EngineOverloadedError(self.message, retry_after=self.retry_after)
        return InvalidRequestError(self.message, param=self.param, code=self.code)


class Memory(msgspec.Struct, tag=True, array_like=True):
    """Engine to owner: where its memory went."""

    number: int
    summary: MemorySummary


class Update(msgspec.Struct, tag=True, array_like=True):
    """Engine to owner, after each step and each idle change: new tokens, ends, and the load."""

    keys: bytes  # int64 request of each new token
    tokens: bytes  # int32
    finished: list[Finished]
    started: list[tuple[int, int]]  # (key, prompt tokens found in the prefix cache)
    logprobs: dict[int, TokenLogprob]  # by index into keys
    load: Load
    began: float  # when those that ``started`` were admitted; time.monotonic(), a clock that both ends share
    prefixes: PrefixEvents | None = None
    scores: list[tuple[int, PromptScores]] = []


ToEngine = Start | Add | Abort | Inspect
FromEngine = Ready | Failed | Refused | Memory | Update

_encoder = msgspec.msgpack.Encoder()


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of ``ToEngine`` or ``FromEngine`` frames."""
    return msgspec.msgpack.Decoder(kind)


def frame(message: object) -> bytes:
    """One message as bytes to send."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame's body, waiting for it; None at the end of the stream."""
    header = _read_exactly(sock, HEADER)
    return None if header is None else _read_exactly(sock, int.from_bytes(header, "little"))


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = sock.recv_into(view)
        if received == 0:
            return None
        view = view[received:]
    return bytes(buffer)
