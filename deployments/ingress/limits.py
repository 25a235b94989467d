"""Admission: how many requests one ingress holds at once, and whether it takes any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.ingress.errors import overloaded, unavailable


class Admission:
    """Counts requests in flight, and refuses the one too many, or all that come once it is closed. For one event
    loop."""

    def __init__(self, limit: int, retry_after_s: Callable[[], float]) -> None:
        """``retry_after_s``: what to tell the one too many."""
        self.in_flight = 0
        self._closed = False
        self._limit = limit
        self._retry_after_s = retry_after_s

    def close(self) -> None:
        self._closed = True

    def check_open(self) -> None:
        """Raises ``ApiError`` (503) once it is closed."""
        if self._closed:
            raise unavailable("the service is being stopped; try again", self._retry_after_s())

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a place until the block is left, however it is left. Raises ``ApiError``: 429 when there is none."""
        self.check_open()
        if self.in_flight >= self._limit:
            raise overloaded(f"{self._limit} requests are in flight here; try again later", self._retry_after_s())
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
