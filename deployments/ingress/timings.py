"""Stopwatch: where one request's time went, measured once for its metrics and for a client that asks.

Spans are what one clock has seen, so hosts need not agree on the time: the replica measures its own two, and what is
left of the time that the ingress waited for the first token is the way there and back, the router's choice included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deployments.ingress.served import Metrics
from deployments.messages import Chunk

HEADER = b"x-nanoserve-timings"  # of a request that wants its timings: in Server-Timing, and as a stream's last comment


class Stopwatch:
    """Of one request, from its first byte on. Whatever is asked of it per chunk is a comparison and two stores."""

    def __init__(
        self, metrics: Metrics, begun: float, choices: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``begun``: when the request was received, on ``clock``. What it waits for now is tokens."""
        self._metrics = metrics
        self._clock = clock
        self._begun = begun
        self._ready = clock()
        self._first: float | None = None
        self._last = [begun] * choices
        self._tokens = [0] * choices
        self.spans: dict[str, float] = {"tokenise": self._ready - begun}  # seconds, in order of time

    def observe(self, index: int, chunk: Chunk) -> None:
        """Choice ``index`` got a chunk."""
        now, tokens = self._clock(), chunk.completion_tokens
        if self._first is None:
            self._first = now
            self._metrics.first_token(now - self._begun)
            queue, prefill = chunk.times or (0.0, now - self._ready)
            self.spans["route"] = max(0.0, now - self._ready - queue - prefill)
            self.spans["queue"], self.spans["prefill"] = queue, prefill
        elif self._tokens[index]:
            self._metrics.next_tokens(now - self._last[index], tokens - self._tokens[index])
        self._last[index] = now
        self._tokens[index] = tokens

    def stop(self) -> None:
        """The last token is there."""
        if self._first is not None:
            self.spans["decode"] = max(self._last) - self._first
            self._metrics.spent(self.spans)

    def server_timing(self) -> bytes:
        """The spans so far as a Server-Timing header (W3C), in milliseconds."""
        return ", ".join(f"{name};dur={1e3 * seconds:.3f}" for name, seconds in self.spans.items()).encode()
