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
        """In order of admission. The scheduler stops at the first that does not fit: nobody is overtaken for ever.

        Past those that wait for a long prefill to end, it may take in short ones: see ``Scheduler``.
        """

    def __len__(self) -> int: ...

    def victim(self, running: list[Sequence]) -> Sequence:
        """Whom to preempt; ``running`` is never empty and in order of admission."""


class Fcfs:
    """First come, first served; the last one in gives way.

    The default: nobody starves and it is what a user expects. Its cost is that a long prompt delays those behind it,
    but for the short ones that the scheduler lets past.
    """

    def __init__(self) -> None:
        self._queue: list[Sequence] = []  # by ``order``, so a preempted sequence goes back to its old place

    def order(self, seq: Sequence) -> tuple[int, ...]:
        """What sequences are sorted by, unique."""
        return (seq.arrival,)

    def push(self, seq: Sequence) -> None:
        insort(self._queue, seq, key=self.order)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._queue, self.order(seq), key=self.order)
        assert self._queue[index] is seq
        del self._queue[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def victim(self, running: list[Sequence]) -> Sequence:
        # Whoever comes first in the queue must get through; of equals the newest has computed the least.
        return max(running, key=self.order)


class Priority(Fcfs):
    """The lowest ``priority`` first, as in vLLM; among equals first come, first served.

    A running sequence gives way when blocks run out, not when a more urgent one arrives: it keeps its slot, and what it
    has computed. A steady flow of urgent requests starves the others, which is what was asked for.
    """

    def order(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.priority, seq.arrival)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": Priority}
