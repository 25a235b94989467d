"""Pacer: how long a stream waits between two events, so that a busy process sends fewer and larger ones.

An event of a stream costs the same whether it carries one token or twenty. On an idle machine every token is its own
event; a process that is behind makes a stream wait a little, and it is seen to be by its CPU use, and by how late its
event loop wakes up.

How long is the longest depends on what lies behind ``send``. HAProxy takes what its client takes, and then ``send``
waits: 20 ms are enough to halve the events, and no reader sees them. Serve's Python proxy takes whatever it is given,
and nothing tells how long its queue is: events beyond what it carries, some 2,000 a second, would grow that queue, and
new requests would wait behind it, so there the pause may grow until they are that few.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

PERIOD_S = 0.05
BUSY = 0.75  # CPU seconds a second above which the process is behind: one Python process cannot use more than one
LATE_S = 0.01  # so much later than asked for, the loop woke up
FIRST_PAUSE_S = 0.004
MAX_PAUSE_S = 0.02
MAX_PAUSE_QUEUED_S = 0.2  # a reader sees text come in jerks from here on, and would rather see it later than not at all
HAPROXY = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"  # as Serve reads it, in every process


class Pacer:
    """One per process and event loop. Multiplicative both ways, and slower down than up."""

    def __init__(
        self,
        max_pause: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """``max_pause``: seconds."""
        self.pause = 0.0  # seconds between two events of one stream
        self._max_pause = max_pause
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last = (clock(), cpu_clock())

    def tick(self) -> None:
        """Look once; ``run`` does every 50 ms."""
        now, cpu = self._clock(), self._cpu_clock()
        wall, used = now - self._last[0], cpu - self._last[1]
        self._last = now, cpu
        if used > BUSY * wall or wall > PERIOD_S + LATE_S:
            self.pause = min(self._max_pause, max(FIRST_PAUSE_S, self.pause * 1.5))
        else:
            self.pause = self.pause * 0.9 if self.pause > FIRST_PAUSE_S / 4 else 0.0

    async def run(self) -> None:
        """Keep ``pause`` up to date, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.tick()
