"""FirstReplica: what brings one up where there is none, and how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

KNOCK_S = 1.0  # between two calls, where the first one failed


class FirstReplica:
    """Serve starts a first replica where a call waits for one, so a call has to wait: one, on behalf of all requests
    that an ingress holds, and as long as any does. The requests themselves stay with the ingress, which knows their
    deadlines and their number. For one event loop."""

    def __init__(self, call: Callable[[], Any], expected_s: float) -> None:
        """``call`` makes one that any replica answers at once; ``expected_s`` is how long a start takes, until one has
        been seen."""
        self._call = call
        self._expected_s = expected_s
        self._waiting = 0
        self._since = 0.0
        self._knocking: asyncio.Task[None] | None = None

    def left_s(self) -> float:
        """Seconds until it should be up; 0 where none is waited for."""
        return max(0.0, self._since + self._expected_s - time.monotonic()) if self._waiting else 0.0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Waits are to be inside of this block. Left without an exception, one is up."""
        if not self._waiting:
            self._since = time.monotonic()
            self._knocking = asyncio.create_task(self._knock())
        self._waiting += 1
        try:
            yield
            self._expected_s = time.monotonic() - self._since
        finally:
            self._waiting -= 1
            if not self._waiting and self._knocking is not None:
                self._knocking.cancel()

    async def _knock(self) -> None:
        while True:
            response = self._call()
            try:
                with suppress(Exception):  # of a deployment that can't be started: those who wait have deadlines
                    await response
            finally:
                with suppress(Exception):
                    response.cancel()
            await asyncio.sleep(KNOCK_S)
