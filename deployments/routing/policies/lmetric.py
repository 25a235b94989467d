"""LMetric: new tokens times batch size, without a parameter (Zhang et al., arXiv 2603.15202)."""

from __future__ import annotations

import random

from deployments.routing.policies.base import Candidates, RoutingPolicy, pick_least


class LMetric(RoutingPolicy):
    """The least product of the tokens that would be prefilled, waiting ones included, and the sequences there.

    Nothing to tune or measure, and close to ``prefix`` at moderate load; its tail is longer, and many groups of shared
    prefixes end up on more replicas each.
    """

    uses_prefixes = True

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, candidates: Candidates) -> int:
        c = candidates
        return pick_least((c.loads.backlog + c.prompt_tokens - c.cached) * (c.loads.active + 1), self._rng)
