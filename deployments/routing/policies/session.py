"""Session: what belongs together goes to one replica, by rendezvous hashing (Thaler and Ravishankar, 1998)."""

from __future__ import annotations

import hashlib
import math
import random

from deployments.routing.policies.base import Candidates, RoutingPolicy
from deployments.routing.policies.power_of_two import PowerOfTwo

FEW = 4
"""Sequences that a replica may have whatever the mean is: they hardly slow each other, and on a quiet fleet the bound
would else be one, which a report that is 100 ms old already exceeds."""


class Session(RoutingPolicy):
    """Each session ranks all replicas by a hash, and takes the first of them with room for one more under ``bound``
    times the mean number of sequences (Mirrokni et al., 2018). Nothing has to be shared between ingresses, and when a
    replica comes or goes only its own sessions move. A call without a session goes to the less loaded of two.

    For callers who name sessions and whose prompts tell nothing; else ``prefix`` finds the same replica by itself, and
    a better one when that is busy.
    """

    def __init__(self, *, bound: float = 1.25, rng: random.Random | None = None) -> None:
        if bound <= 1:
            raise ValueError("bound must be above 1")
        self._bound = bound
        self._fallback = PowerOfTwo(rng=rng)

    def choose(self, candidates: Candidates) -> int:
        if not candidates.session:
            return self._fallback.choose(candidates)
        most = max(FEW, math.ceil(self._bound * (float(candidates.loads.active.sum()) + 1) / len(candidates)))
        ranks = sorted(range(len(candidates)), key=lambda i: _weight(candidates, i), reverse=True)
        return next((i for i in ranks if candidates.loads.active[i] + 1 <= most), ranks[0])


def _weight(candidates: Candidates, index: int) -> bytes:
    name = candidates.names[int(candidates.slots[index])]
    return hashlib.blake2b(f"{name}\0{candidates.session}".encode(), digest_size=8).digest()
