"""A client for streamed completions that costs a few microseconds an event, so that one core can receive what an engine
makes: pieces of the body are kept with the instant at which they came, and read when the measuring is over.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """One request's answer, as it came. Instants are ``time.perf_counter()``."""

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    complete: bool = False  # the body came to its end

    def read(self) -> Reading:
        """Look through the events. An answer that is not whole has an ``error``."""
        marks: list[tuple[float, int]] = []
        text: list[str] = []
        tokens, done, rest, error = 0, False, b"", ""
        for at, piece in self.pieces:
            *events, rest = (rest + piece).split(b"\n\n")
            told = 0
            for data in events:
                if data == b"data: [DONE]":
                    done = True
                elif data.startswith(b"data: "):
                    event = _decode(data[6:])
                    if event.error is not None:
                        error = str(event.error)
                    if event.usage is not None:
                        tokens = event.usage.completion_tokens
                    if event.choices and event.choices[0].text:
                        text.append(event.choices[0].text)
                        told += 1
            if told:
                marks.append((at, told))
        if self.status != 200:
            error = f"status {self.status}: {b''.join(piece for _, piece in self.pieces)[:200]!r}"
        elif not error and not (done and self.complete):
            error = "the stream ended before [DONE]"
        return Reading(self.sent, self.ended, marks, tokens, "".join(text), error)


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says."""

    sent: float
    ended: float
    marks: list[tuple[float, int]]  # when events with text came, and how many at once
    tokens: int  # as the server counts them
    text: str
    error: str


class Connection(asyncio.Protocol):
    """One connection, kept open from request to request. Raises ``OSError`` where the server closes it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[None] | None = None
        self._at = 0.0

    async def post(self, path: str, body: bytes) -> Answer:
        """Send a JSON body, and take the answer to its end."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, self._host, self._port)
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer(time.perf_counter())
        self._done = loop.create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._done
        return self._answer

    def pause(self, paused: bool) -> None:
        """Read nothing for a while, as a slow reader does."""
        if self._transport is not None:
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Leave, whatever is still to come."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def answer(self) -> Answer:
        """Of the last request, as far as it has come."""
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end()

    # What the parser calls.

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((self._at, body))

    def on_message_complete(self) -> None:
        self._answer.complete = True
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._answer.status = self._parser.get_status_code()
            self._answer.ended = time.perf_counter()
            self._done.set_result(None)
