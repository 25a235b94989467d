"""Transport: which of Serve's two ways a call takes to its replica, gRPC or an actor call of Ray's.

Over gRPC a request costs a fifth less CPU. But of a replica that it does not reach it says no more than that; an
actor call finds out whether it has ended, upon which Serve takes it off the router's list. A message has a limit, and a
prompt may be over that. And a call belongs to an event loop: where a router has one of its own, Serve cancels its calls
from another thread. So gRPC is for a call that has a number alone, made on its caller's loop, and not for a replica
that it did not reach a moment ago.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest

from deployments.messages import ClaimCheck

PAUSE_S = 10.0  # how long a replica gets actor calls after one over gRPC did not reach it,
LONGEST_PAUSE_S = 600.0  # and at most, where it is tried again and again


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


class Transport:
    """Of the calls of one router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Replicas are called by their addresses, as Ray calls them; gRPC would ask the proxy that an environment names.
        os.environ.setdefault("no_grpc_proxy", "0.0.0.0/0,::/0")
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}  # the last one of each replica that had one, by unique id

    def choose(self, request: PendingRequest, replica: str) -> None:
        """Set by which way a request, its arguments being what the call takes along, goes to this replica."""
        small, metadata = isinstance(request.args[0], ClaimCheck), request.metadata
        metadata._by_reference = not (small and not self._paused(replica) and not metadata._on_separate_loop)

    def miss(self, replica: str) -> None:
        """A call did not reach it. Where the one that ends a pause does not either, the next is twice as long."""
        if self._paused(replica):  # of others that were on their way
            return
        now, seconds = self._clock(), PAUSE_S
        if (last := self._pauses.get(replica)) is not None and now - last.until < last.seconds:
            seconds = min(2 * last.seconds, LONGEST_PAUSE_S)
        self._pauses[replica] = _Pause(now + seconds, seconds)

    def keep(self, replicas: Collection[str]) -> None:
        """There are these, and no others."""
        self._pauses = {id: pause for id, pause in self._pauses.items() if id in replicas}

    def _paused(self, replica: str) -> bool:
        return replica in self._pauses and self._clock() < self._pauses[replica].until
