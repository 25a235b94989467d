"""Server-sent events and whole answers, from the same chunks.

A streamed chunk costs one string escape and a join: everything else in its event is made once a request. (A pydantic
model and a JSON dump per chunk cost 30 to 60 microseconds, which at 20,000 tokens a second is more than a core.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from deployments.ingress.errors import ApiError
from deployments.messages import Chunk, TokenInfo

_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of one request; the prompt of several choices counts once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None  # of the completion's; None: not looked for

    def asdict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Pieces(Protocol):
    """What logprobs need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class Choice:
    """One sequence's answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # how many there were with each piece of text
    logprobs: list[TokenInfo] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.tokens.append(chunk.completion_tokens)
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason
        self.prompt_tokens = chunk.prompt_tokens
        self.cached_tokens = chunk.cached_tokens
        self.completion_tokens = chunk.completion_tokens


def usage_of(choices: Sequence[Choice], n: int) -> Usage:
    """``choices`` are in order of prompt, ``n`` of each prompt."""
    firsts = choices[::n]
    return Usage(
        sum(c.prompt_tokens for c in firsts),
        sum(c.cached_tokens for c in firsts),
        sum(c.completion_tokens for c in choices),
    )


class Format(Protocol):
    """One endpoint's shape of an answer."""

    def event(self, index: int, chunk: Chunk) -> bytes:
        """The server-sent events for what choice ``index`` produced; may be none."""

    def end(self, usage: Usage) -> bytes:
        """The events after the last chunk of the last choice."""

    def error(self, error: ApiError) -> bytes:
        """What a stream ends with when it fails after its first byte: nothing that says it is complete follows."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer without streaming, as JSON."""


class _Frame:
    """Bytes of a stream's events that are the same for all of them."""

    def __init__(self, id: str, object: str, created: int, model: str, include_usage: bool) -> None:
        head = _json({"id": id, "object": object, "created": created, "model": model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def end(self, usage: Usage) -> bytes:
        """The extra event of ``stream_options.include_usage``, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":' + _json(usage.asdict()) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool, pieces: Pieces | None) -> None:
        self._answer = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._frame = _Frame(id, "chat.completion.chunk", created, model, include_usage)
        self._pieces = pieces
        self._started: set[int] = set()

    def event(self, index: int, chunk: Chunk) -> bytes:
        if _silent(chunk):
            return b""
        role = b""
        if index not in self._started:  # the role comes with the first text: an event of its own would only cost
            self._started.add(index)
            role = b'"role":"assistant",'
        return b"".join(
            (
                self._frame.head,
                b'{"index":%d,"delta":{%b"content":' % (index, role),
                _json(chunk.text),
                b'},"logprobs":',
                _json(self._logprobs(chunk.logprobs)) if self._pieces else b"null",
                _finish(chunk),
                self._frame.tail,
            )
        )

    def end(self, usage: Usage) -> bytes:
        return self._frame.end(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = dict(self._answer)
        answer["choices"] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs) if self._pieces else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer["usage"] = usage.asdict()
        return _json(answer)

    def _logprobs(self, infos: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
        if infos is None or self._pieces is None:
            return None
        content = []
        for info in infos:
            entry = self._entry(info.token_id, info.logprob)
            entry["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in info.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        assert self._pieces is not None
        raw = self._pieces.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionFormat:
    """text_completion, streamed and whole."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool, pieces: Pieces | None) -> None:
        self._answer = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._frame = _Frame(id, "text_completion", created, model, include_usage)
        self._pieces = pieces
        self._offsets: dict[int, int] = {}

    def event(self, index: int, chunk: Chunk) -> bytes:
        if _silent(chunk):
            return b""
        logprobs = b"null"
        if self._pieces and chunk.logprobs is not None:
            logprobs = _json(self._logprobs(chunk.logprobs, self._offsets.get(index, 0)))
            self._offsets[index] = self._offsets.get(index, 0) + sum(
                len(self._token(info.token_id)) for info in chunk.logprobs
            )
        return b"".join(
            (
                self._frame.head,
                b'{"index":%d,"text":' % index,
                _json(chunk.text),
                b',"logprobs":',
                logprobs,
                _finish(chunk),
                self._frame.tail,
            )
        )

    def end(self, usage: Usage) -> bytes:
        return self._frame.end(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = dict(self._answer)
        answer["choices"] = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice.logprobs, 0) if self._pieces else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer["usage"] = usage.asdict()
        return _json(answer)

    def _token(self, token_id: int) -> str:
        """A token as OpenAI spells it: its text, or its bytes where they are no text of their own."""
        assert self._pieces is not None
        raw = self._pieces.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _logprobs(self, infos: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
        tokens = [self._token(info.token_id) for info in infos]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(info.logprob) for info in infos],
            "top_logprobs": [{self._token(i): _finite(p) for i, p in info.top} for info in infos],
            "text_offset": offsets,
        }


def _silent(chunk: Chunk) -> bool:
    """Whether there is nothing to tell yet: its text is held back as what may become a stop string, or a character."""
    return not chunk.text and chunk.finish_reason is None and not chunk.logprobs


def _finish(chunk: Chunk) -> bytes:
    if chunk.finish_reason is None:
        return b',"finish_reason":null}'
    return finished(chunk.finish_reason, chunk.stop_reason)


def finished(reason: str, stop_reason: str | int | None) -> bytes:
    """The end of a choice's last event."""
    return b',"finish_reason":"%b","stop_reason":%b}' % (reason.encode(), _json(stop_reason))


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's value for "very unlikely" is -9999."""
    return max(logprob, -9999.0)
