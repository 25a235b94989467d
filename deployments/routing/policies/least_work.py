"""LeastWork: the fewest prompt tokens ahead, whatever is cached where."""

from __future__ import annotations

import random

from deployments.routing.policies.base import Candidates, RoutingPolicy, pick_least


class LeastWork(RoutingPolicy):
    """Tokens still to prefill, which delay a new request's first token, plus ``sequence_tokens`` for each sequence
    there, whose decoding slows all others'.

    Counting tokens matters: on a public conversation trace, simulated on 8 replicas, least tokens has 0.4 of the mean
    time to first token that least requests has. What one sequence weighs matters less: the optimum is flat from 64 to
    512. For prompts that share nothing, or where no cache events can be had.
    """

    def __init__(self, *, sequence_tokens: int = 256, rng: random.Random | None = None) -> None:
        self._sequence_tokens = sequence_tokens
        self._rng = rng or random.Random()

    def choose(self, candidates: Candidates) -> int:
        return pick_least(candidates.loads.backlog + self._sequence_tokens * candidates.loads.active, self._rng)
