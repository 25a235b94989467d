"""Pulse: whether a process that says nothing is at work or stuck.

The engine's loop says something at least once a second. While it says nothing it may still be at work: on a GPU the
first use of a shape compiles kernels, on a CPU a step can take long. What is at work uses a processor; what is stopped,
or waits for a lock that nobody gives back, uses none. That takes seconds to tell, not a minute.

A GPU that hangs is not told by it: the thread that waits for it spins.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

QUIET_S = 1.2  # silence that is looked at: a healthy loop is heard of once a second
SPAN_S = 2.5  # over which a stuck process must have used less than ``IDLE``
IDLE = 0.02  # of one processor: a stuck engine still takes in messages
_SAMPLES = 4  # at least: who looks may have stood still himself, and looks once then


class Pulse:
    """Of one process. Ask twice a second or so."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: deque[tuple[float, float]] = deque(maxlen=64)  # (silence, CPU seconds), all of one silence

    def stuck(self, silent_s: float) -> bool:
        """Whether it will not be heard of again. ``silent_s``: since it was heard of last."""
        if silent_s < QUIET_S:
            self._seen.clear()
            return False
        try:
            self._seen.append((silent_s, cpu_seconds(self._pid)))
        except OSError:  # no /proc here, or no process: its end is noticed by other means
            return False
        now, used = self._seen[-1]
        before = [one for one in self._seen if one[0] <= now - SPAN_S]
        return len(self._seen) >= _SAMPLES and bool(before) and used - before[-1][1] < IDLE * (now - before[-1][0])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and the processes that it has begun, compilers among them. Raises ``OSError``."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and of children that have ended
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            try:
                total += cpu_seconds(int(child))
            except OSError:  # it has ended meanwhile
                continue
    return total
