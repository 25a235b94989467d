"""Scheduling policies: who is admitted next, and who gives way when blocks run out.

A policy *is* the queue of waiting sequences. To add one, write a class with these five methods and name it in
``POLICIES``; the scheduler knows no more of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from nanoengine.scheduling.sequence import Sequence


class Policy(Protocol):
    """The waiting sequences in order of admission."""

    def push(self, seq: Sequence) -> None:
        """A new or preempted sequence joins the queue."""

    def remove(self, seq: Sequence) -> None:
        """A sequence leaves the queue: admitted or aborted."""

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission. The scheduler stops at the first that does not fit: nobody is overtaken for ever."""

    def __len__(self) -> int: ...

    def victim(self, running: list[Sequence]) -> Sequence:
        """Whom to preempt; ``running`` is never empty and in order of admission."""


class Fcfs:
    """First come, first served; the last one in gives way.

    The default: nobody starves and it is what a user expects. Its cost is that one long prompt delays the short ones
    behind it; ``max_prefill_chunk`` bounds that, and the priority and fair policies are for those who need more.
    """

    def __init__(self) -> None:
        self._queue: list[Sequence] = []  # by arrival, so a preempted sequence goes back to its old place

    def push(self, seq: Sequence) -> None:
        insort(self._queue, seq, key=lambda s: s.arrival)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._queue, seq.arrival, key=lambda s: s.arrival)
        assert self._queue[index] is seq
        del self._queue[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def victim(self, running: list[Sequence]) -> Sequence:
        # The newest has computed the least, and whoever came first must get through.
        return max(running, key=lambda s: s.arrival)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs}
