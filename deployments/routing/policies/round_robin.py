"""RoundRobin: each in turn."""

from __future__ import annotations

import random

from deployments.routing.policies.base import Candidates, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Each replica in turn, whatever its load. For measurements: a baseline, and an even warm-up of all caches."""

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._last = (rng or random.Random()).randrange(1 << 16)  # ingresses start at different replicas

    def choose(self, candidates: Candidates) -> int:
        later = candidates.slots > self._last
        index = int(later.argmax())  # slots ascend; the first again where none is later
        self._last = int(candidates.slots[index])
        return index
