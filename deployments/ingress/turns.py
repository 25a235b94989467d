"""Turns: when Serve's calls go whose requests have gone ahead of them.

Such a call costs ingress and replica more CPU time than all that a first token needs, and nobody waits for it. So it
waits until no request of this ingress waits for its first token, and then they go one after the other, for the next
request may come while they do.
"""

from __future__ import annotations

import asyncio

AFTER_S = 1.0
"""Most that a call waits. Until it is there, other ingresses' routers do not hear from Serve that it takes a place."""
GAP_S = 0.002  # from one call to the next, about what it takes


class Turns:
    """Of one ingress. For one event loop."""

    def __init__(self, after_s: float = AFTER_S, gap_s: float = GAP_S) -> None:
        self._after_s, self._gap_s = after_s, gap_s
        self._expected: set[int] = set()  # calls whose first token has not come
        self._waiting: dict[int, asyncio.Future[None]] = {}  # calls, the oldest first
        self._next: asyncio.TimerHandle | None = None  # when the next may go

    def begun(self, number: int) -> None:
        """A request's first token is here."""
        if number in self._expected:
            self._expected.remove(number)
            self._look()

    def hurry(self, number: int) -> None:
        """No more waiting: the request is done, or there is something that only Serve's call can tell."""
        if (turn := self._waiting.pop(number, None)) is not None and not turn.done():
            turn.set_result(None)

    async def wait(self, number: int) -> None:
        """Until it is this call's turn, whose request is waiting for its first token."""
        loop = asyncio.get_running_loop()
        turn = self._waiting[number] = loop.create_future()
        limit = loop.call_later(self._after_s, self.hurry, number)
        self._expected.add(number)
        try:
            await turn
        finally:
            limit.cancel()
            self._waiting.pop(number, None)
            self.begun(number)  # or it has waited so long that the others need not any more

    def _look(self) -> None:
        if self._next is None and not self._expected and self._waiting:
            self.hurry(next(iter(self._waiting)))
            self._next = asyncio.get_running_loop().call_later(self._gap_s, self._again)

    def _again(self) -> None:
        self._next = None
        self._look()
