"""Server-sent events and whole answers, from the same chunks.

A streamed chunk costs one string escape and a join: everything else in its event is made once a request. (A pydantic
model and a JSON dump per chunk cost 30 to 60 microseconds, which at 20,000 tokens a second is more than a core.)
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.ingress.errors import ApiError
from deployments.messages import Chunk, TokenInfo
from nanoengine.outputs import PromptLogprob, PromptScores

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is the client's own; None: it was given as ids, or has been cut."""

    ids: npt.NDArray[np.int32]  # [length]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What a request wants in its answer beside text, and what that is made of."""

    pieces: Pieces
    prompts: Sequence[Prompt]
    n: int = 1  # choices of each prompt
    usage: bool = False  # as the last event of a stream
    continuous_usage: bool = False  # in every event
    logprobs: int | None = None  # of how many likeliest tokens, beside each token's own
    prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens "token_id:N": two may have the same text


@dataclass(slots=True)
class Choice:
    """One sequence's answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # how many there were with each piece of text
    logprobs: list[TokenInfo] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_scores: tuple[PromptScores, ...] = ()
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
        self.token_ids.extend(chunk.token_ids)
        self.prompt_scores += chunk.prompt_scores
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason
        self.prompt_tokens = chunk.prompt_tokens
        self.cached_tokens = chunk.cached_tokens
        self.completion_tokens = chunk.completion_tokens

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; an answer without any is the least likely."""
        if not self.logprobs:
            return -math.inf
        return sum(info.logprob for info in self.logprobs) / len(self.logprobs)


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
    """Bytes of a stream's events that are the same for all of them, and what may stand after their choices."""

    def __init__(self, id: str, object: str, created: int, model: str, extras: Extras) -> None:
        head = _json({"id": id, "object": object, "created": created, "model": model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if extras.usage else b"]}\n\n"
        self._include_usage = extras.usage
        self._n = extras.n
        self._newest: dict[int, Chunk] | None = {} if extras.continuous_usage else None

    def tail(self, index: int, chunk: Chunk) -> bytes:
        """The end of an event of choice ``index``."""
        if self._newest is None:
            return self._tail
        self._newest[index] = chunk
        return b'],"usage":' + _json(self._usage(self._newest).asdict()) + b"}\n\n"

    def _usage(self, newest: dict[int, Chunk]) -> Usage:
        """Of all choices so far, so that the last event has the request's."""
        firsts: dict[int, Chunk] = {}
        for index in sorted(newest):
            firsts.setdefault(index // self._n, newest[index])
        return Usage(
            sum(chunk.prompt_tokens for chunk in firsts.values()),
            sum(chunk.cached_tokens for chunk in firsts.values()),
            sum(chunk.completion_tokens for chunk in newest.values()),
        )

    def end(self, usage: Usage) -> bytes:
        """The extra event of ``stream_options.include_usage``, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":' + _json(usage.asdict()) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, id: str, created: int, model: str, extras: Extras) -> None:
        self._answer = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._frame = _Frame(id, "chat.completion.chunk", created, model, extras)
        self._extras = extras
        self._started: set[int] = set()

    def event(self, index: int, chunk: Chunk) -> bytes:
        if _silent(chunk, self._extras):
            return b""
        role = b""
        if index not in self._started:  # the role comes with the first text: an event of its own would only cost
            role = b'"role":"assistant",'
        delta = role + b'"content":' + _json(chunk.text)
        return self._event(index, chunk, delta, self._tokens(chunk), _finish(chunk))

    def _event(self, index: int, chunk: Chunk, delta: bytes, tokens: bytes, finish: bytes) -> bytes:
        """``tokens``: of ``_tokens``, once a chunk."""
        tail = self._frame.tail(index, chunk)
        if self._extras.token_ids and not self._started:
            tail = b'],"prompt_token_ids":%b%b' % (_json(self._extras.prompts[0].ids.tolist()), tail[1:])
        self._started.add(index)
        return b'%b{"index":%d,"delta":{%b}%b%b%b' % (self._frame.head, index, delta, tokens, finish, tail)

    def _tokens(self, chunk: Chunk | None) -> bytes:
        """What an event says of the tokens of a chunk; None: it has none."""
        extras = self._extras
        logprobs = b"null"
        if extras.logprobs is not None and chunk is not None:
            logprobs = _json(self._logprobs(chunk.logprobs))
        ids = b""
        if extras.token_ids:
            ids = b',"token_ids":' + _json(chunk.token_ids if chunk is not None else ())
        return b',"logprobs":' + logprobs + ids

    def end(self, usage: Usage) -> bytes:
        return self._frame.end(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        found = []
        for choice in choices:
            message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
            found.append((message, choice.finish_reason))
        return self._whole(choices, found, usage)

    def _whole(
        self, choices: Sequence[Choice], found: Sequence[tuple[dict[str, Any], str | None]], usage: Usage
    ) -> bytes:
        """``found``: message and finish reason of each choice."""
        extras = self._extras
        answer: dict[str, Any] = dict(self._answer)
        answer["choices"] = []
        for index, (choice, (message, reason)) in enumerate(zip(choices, found, strict=True)):
            entry = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(choice.logprobs) if extras.logprobs is not None else None,
                "finish_reason": reason,
                "stop_reason": choice.stop_reason,
            }
            if extras.token_ids:
                entry["token_ids"] = choice.token_ids
            answer["choices"].append(entry)
        answer["usage"] = usage.asdict()
        if extras.token_ids:
            answer["prompt_token_ids"] = extras.prompts[0].ids.tolist()
        if extras.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _prompt_logprobs(extras, extras.prompts[0], choices[0].prompt_scores)
        return _json(answer)

    def _logprobs(self, infos: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
        if infos is None:
            return None
        content = []
        for info in infos:
            entry = self._entry(info.token_id, info.logprob)
            entry["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in info.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._extras.pieces.token_bytes(token_id)
        token = _by_id(token_id) if self._extras.tokens_as_ids else raw.decode("utf-8", "replace")
        return {"token": token, "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionFormat:
    """text_completion, streamed and whole."""

    def __init__(self, id: str, created: int, model: str, extras: Extras) -> None:
        self._answer = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._frame = _Frame(id, "text_completion", created, model, extras)
        self._extras = extras
        self._places: dict[int, _Place] = {}  # of each choice that has begun

    def event(self, index: int, chunk: Chunk) -> bytes:
        if _silent(chunk, self._extras):
            return b""
        extras = self._extras
        text, logprobs, ids = chunk.text, b"null", b""
        prompt = None
        if index not in self._places:
            prompt = extras.prompts[index // extras.n]
            self._places[index] = self._place(prompt)
            if extras.echo:
                text = self._echoed(prompt) + text
        if extras.logprobs is not None:
            place = self._places[index]
            logprobs = _json(self._logprobs(place, chunk.logprobs or (), prompt, chunk.prompt_scores))
        if extras.token_ids:
            ids = b',"token_ids":' + _json(chunk.token_ids)
            if prompt is not None:
                ids += b',"prompt_token_ids":' + _json(prompt.ids.tolist())
        return b'%b{"index":%d,"text":%b,"logprobs":%b%b%b%b' % (
            self._frame.head, index, _json(text), logprobs, ids, _finish(chunk), self._frame.tail(index, chunk),
        )  # fmt: skip

    def end(self, usage: Usage) -> bytes:
        return self._frame.end(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        extras = self._extras
        answer: dict[str, Any] = dict(self._answer)
        answer["choices"] = []
        for index, choice in enumerate(choices):
            prompt = extras.prompts[index // extras.n]
            logprobs = None
            if extras.logprobs is not None:
                logprobs = self._logprobs(self._place(prompt), choice.logprobs, prompt, choice.prompt_scores)
            entry = {
                "index": index,
                "text": (self._echoed(prompt) if extras.echo else "") + "".join(choice.text),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if extras.token_ids:
                entry |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.ids.tolist()}
            if extras.prompt_logprobs is not None:
                entry["prompt_logprobs"] = _prompt_logprobs(extras, prompt, choice.prompt_scores)
            answer["choices"].append(entry)
        answer["usage"] = usage.asdict()
        return _json(answer)

    def _echoed(self, prompt: Prompt) -> str:
        """A prompt as the beginning of its answer: as it was sent, or its ids' text, special tokens included."""
        return self._spelled(prompt) if prompt.text is None else prompt.text

    def _spelled(self, prompt: Prompt) -> str:
        return b"".join(map(self._extras.pieces.token_bytes, prompt.ids.tolist())).decode("utf-8", "replace")

    def _token(self, token_id: int) -> str:
        """A token as OpenAI spells it: its text, or its bytes where they are no text of their own."""
        if self._extras.tokens_as_ids:
            return _by_id(token_id)
        raw = self._extras.pieces.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By spelling; of tokens that are spelled alike, all but the likeliest by their ids: none takes another's
        place."""
        found: dict[str, float] = {}
        for token_id, logprob in top:
            name = self._token(token_id)
            found[name if name not in found else _by_id(token_id)] = _finite(logprob)
        return found

    def _place(self, prompt: Prompt) -> _Place:
        if not self._extras.echo or prompt.text is None:
            return _Place(0)
        # What the tokenizer has put before the client's text is not in the answer, and takes no room there.
        return _Place(len(prompt.text) - len(self._spelled(prompt)))

    def _logprobs(
        self, place: _Place, infos: Sequence[TokenInfo], prompt: Prompt | None, scores: Sequence[PromptScores]
    ) -> dict[str, Any]:
        """``prompt`` and its ``scores`` with the first tokens of a choice, and else None."""
        ids: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if self._extras.echo and prompt is not None:
            ids = prompt.ids.tolist()
            for entry in _entries(prompt, scores, self._extras.logprobs or 0):
                values.append(entry and _finite(entry.logprob))
                tops.append(entry and self._top(entry.top))
        ids += [info.token_id for info in infos]
        values += [_finite(info.logprob) for info in infos]
        tops += [self._top(info.top) for info in infos]
        return {
            "tokens": [self._token(i) for i in ids],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": [place.take(self._extras.pieces.token_bytes(i)) for i in ids],
        }


class _Place:
    """Where tokens stand in a text, in characters. One that begins within a character stands where that one does."""

    def __init__(self, start: int) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._next = start

    def take(self, raw: bytes) -> int:
        at = max(0, self._next)
        self._next += len(self._decode(raw))
        return at


def _entries(prompt: Prompt, scores: Sequence[PromptScores], top: int) -> list[PromptLogprob | None]:
    """One for each token of a prompt: nothing comes before the first, so there is none of it."""
    return [None, *(entry for some in scores for entry in some.entries(prompt.ids, top))]


def _prompt_logprobs(extras: Extras, prompt: Prompt, scores: Sequence[PromptScores]) -> list[dict[str, Any] | None]:
    """vLLM's shape: of each token and its likeliest alternatives, by id."""
    found: list[dict[str, Any] | None] = []
    for entry in _entries(prompt, scores, extras.prompt_logprobs or 0):
        if entry is None:
            found.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top, 1) if i != entry.token_id]
        found.append(
            {
                str(i): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": extras.pieces.token_bytes(i).decode("utf-8", "replace"),
                }
                for i, logprob, rank in ranked
            }
        )
    return found


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _silent(chunk: Chunk, extras: Extras) -> bool:
    """Whether there is nothing to tell yet: its text is held back as what may become a stop string, or a character."""
    return not (chunk.text or chunk.finish_reason or chunk.logprobs or extras.token_ids or chunk.prompt_scores)


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
