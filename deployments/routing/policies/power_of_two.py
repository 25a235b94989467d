"""PowerOfTwo: the less loaded of two at random (Mitzenmacher, 2001)."""

from __future__ import annotations

import random

from deployments.routing.policies.base import Candidates, RoutingPolicy


class PowerOfTwo(RoutingPolicy):
    """Of two replicas, the one with fewer sequences. Also what is done where a policy fails, or a call has no tokens:
    it needs no more than a count, and several routers that count differently do not herd."""

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, candidates: Candidates) -> int:
        if len(candidates) == 1:
            return 0
        a, b = self._rng.sample(range(len(candidates)), 2)
        return a if candidates.loads.active[a] <= candidates.loads.active[b] else b
