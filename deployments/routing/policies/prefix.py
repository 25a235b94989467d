"""Prefix: the replica where the request, and what it costs the others, is done first. One cost, in seconds."""

from __future__ import annotations

import random

import numpy as np

from deployments.routing.load import Floats, Slots
from deployments.routing.policies.base import Candidates, RoutingPolicy, least, pick_one

TIE_S = 0.01
KV_LIMIT = 0.9
SKEW_S = 2.0


class Prefix(RoutingPolicy):
    """Of each replica

        cost = wait + (1 + rho * fullness) * uncached * token_s
             + decode_weight * harm * active + kv_weight * max(0, kv_usage - 0.9)

    wait: seconds until the request's own prompt is begun; uncached: its tokens that the cache there lacks. With rho the
    policy counts what the new blocks evict: on a cache that is full they cost somebody else about as much again. It
    rises with how busy the fleet is, up to ``busy_displacement``: near saturation nothing but work saved makes room.
    What a sequence does to others' decoding is ``harm``, measured, in seconds of theirs; ``decode_weight`` is what such
    a second weighs against one before a first token.

    There is no switch between affinity and balance. A prefix that everybody wants spreads as soon as waiting for its
    owner costs more than computing it again elsewhere, and a new replica, whose cache is not full, takes cold prompts.
    Two rules bound what an index that is wrong can do: replicas within 10 ms or 2 % of the best are equal, and none
    gets a request that would bring it to ``max_skew`` times the mean work and more than 2 s above the least.
    """

    uses_prefixes = True

    def __init__(
        self,
        *,
        displacement: float = 1.0,
        busy_displacement: float = 3.0,
        decode_weight: float = 0.2,
        kv_weight: float = 10.0,
        max_skew: float = 1.5,
        rng: random.Random | None = None,
    ) -> None:
        """``displacement``: rho of a fleet at rest; ``kv_weight``: seconds, per fraction of KV blocks above 0.9."""
        if min(displacement, busy_displacement, decode_weight, kv_weight) < 0:
            raise ValueError("displacement, busy_displacement, decode_weight and kv_weight must be at least 0")
        if max_skew < 1:
            raise ValueError("max_skew must be at least 1")
        self._displacement = displacement
        self._busy_displacement = busy_displacement
        self._decode_weight = decode_weight
        self._kv_weight = kv_weight
        self._max_skew = max_skew
        self._rng = rng or random.Random()
        self._busy = 0.0  # share of replicas with a backlog, over the last hundred or so decisions

    def choose(self, candidates: Candidates) -> int:
        at, count = candidates.loads, len(candidates)
        self._busy += 0.01 * (np.count_nonzero(at.backlog) / count - self._busy)
        rho = self._displacement + max(0.0, self._busy - 0.8) / 0.2 * (self._busy_displacement - self._displacement)
        uncached = candidates.prompt_tokens - candidates.cached
        costs = at.wait + (1.0 + rho * at.fullness) * uncached * at.token_s + self._decode_weight * at.harm * at.active
        if at.kv_usage.max() > KV_LIMIT:
            costs += self._kv_weight * np.maximum(0.0, at.kv_usage - KV_LIMIT)
        work = uncached + at.backlog
        bound = self._max_skew * float(work.sum()) / count
        best = _least_or_equal(costs)
        if work[best].max() > bound:
            costs[(work > bound) & (work > least(work) + SKEW_S / at.token_s)] = np.inf  # never all: not the least work
            best = _least_or_equal(costs)
        return pick_one(best, self._rng)


def _least_or_equal(costs: Floats) -> Slots:
    """Indices of those that are as good as the best."""
    best = least(costs)
    return (costs <= best + max(TIE_S, 0.02 * best)).nonzero()[0]
