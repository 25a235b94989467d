"""Admission: how many requests one ingress holds at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.ingress.errors import overloaded


class Admission:
    """Counts requests in flight, and refuses the one too many. For one event loop."""

    def __init__(self, limit: int, retry_after_s: Callable[[], float]) -> None:
        """``retry_after_s``: what to tell the one too many."""
        self.in_flight = 0
        self._limit = limit
        self._retry_after_s = retry_after_s

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a place until the block is left, however it is left. Raises ``ApiError`` (429) when there is none."""
        if self.in_flight >= self._limit:
            raise overloaded(f"{self._limit} requests are in flight here; try again later", self._retry_after_s())
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
