"""Claims: where a request that came by a channel and the call of Serve's that stands for it meet.

The request is there first, by the milliseconds that Serve's call takes, and is not kept waiting for it. The call is
what Serve counts, drains and cancels: once it is here it lasts as long as the work, and ends it if it is cancelled.
(The claim check of integration patterns: what is carried goes one way, and a slip with its number the other.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

CLAIM_S = 10.0  # how long one of the two waits for the other


class Claims:
    """Of one replica. For one event loop."""

    def __init__(self, wait_s: float = CLAIM_S) -> None:
        self._wait_s = wait_s
        self._work: dict[str, asyncio.Future[asyncio.Task[None]]] = {}  # by key, until it is claimed

    def begin(self, key: str, work: Coroutine[Any, Any, None]) -> None:
        """Start the work of a request. Who ends it, if nobody claims it, is whoever sent it."""
        task = asyncio.create_task(work)
        self._meeting(key).set_result(task)
        task.add_done_callback(lambda task: self._over(key, task))

    async def claim(self, key: str) -> None:
        """See the work to its end, and raise what it raises; ``ConnectionError`` where there is none."""
        meeting = self._meeting(key)
        try:
            async with asyncio.timeout(self._wait_s):
                task = await meeting
        except TimeoutError:
            raise ConnectionError("the request did not come by the channel") from None
        finally:
            self._forget(key, meeting)
        await task

    def __len__(self) -> int:
        return len(self._work)

    def _meeting(self, key: str) -> asyncio.Future[asyncio.Task[None]]:
        if (meeting := self._work.get(key)) is None:
            meeting = self._work[key] = asyncio.get_running_loop().create_future()
        return meeting

    def _over(self, key: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen: asyncio would log that nobody has, where nobody claims it
        if (meeting := self._work.get(key)) is not None:  # a short answer is done before its call is here
            asyncio.get_running_loop().call_later(self._wait_s, self._forget, key, meeting)

    def _forget(self, key: str, meeting: asyncio.Future[asyncio.Task[None]]) -> None:
        if self._work.get(key) is meeting:
            del self._work[key]
