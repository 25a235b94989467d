"""Pacer: how long a stream waits between two events, so that a busy process sends fewer and larger ones.

An event of a stream costs the same whether it carries one token or twenty, and what lies behind ``send`` (Serve's
queues, Ray, a proxy) takes whatever it is given: a process that makes more events than it can carry builds a queue
there, and new requests wait behind it. Nothing tells how long that queue is, so the pause follows what can be seen: the
process's CPU use, and how late its event loop wakes up. On an idle machine every token is its own event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.05
BUSY = 0.75  # CPU seconds a second above which the process is behind: one Python process cannot use more than one
LATE_S = 0.01  # so much later than asked for, the loop woke up
FIRST_PAUSE_S = 0.004
MAX_PAUSE_S = 0.2  # a reader sees text come in jerks from here on, and would rather see it later than not at all


class Pacer:
    """One per process and event loop. Multiplicative both ways, and slower down than up."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self.pause = 0.0  # seconds between two events of one stream
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last = (clock(), cpu_clock())

    def tick(self) -> None:
        """Look once; ``run`` does every 50 ms."""
        now, cpu = self._clock(), self._cpu_clock()
        wall, used = now - self._last[0], cpu - self._last[1]
        self._last = now, cpu
        if used > BUSY * wall or wall > PERIOD_S + LATE_S:
            self.pause = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, self.pause * 1.5))
        else:
            self.pause = self.pause * 0.9 if self.pause > FIRST_PAUSE_S / 4 else 0.0

    async def run(self) -> None:
        """Keep ``pause`` up to date, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.tick()
