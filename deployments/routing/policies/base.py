"""What a routing policy is given, and has to say. Pure: no Ray, no clock, no waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.routing.load import Floats, Loads, Slots


@dataclass(slots=True)
class Candidates:
    """The replicas that may serve a request, at this instant: arrays of one length, at least 1. Not to be changed."""

    names: Sequence[str]  # unique ids by slot
    slots: Slots
    prompt_tokens: int
    cached: Floats  # prompt tokens that are in the replica's cache, or will be when it gets there
    loads: Loads
    session: str = ""  # what the caller says belongs together

    def __len__(self) -> int:
        return len(self.slots)


class RoutingPolicy(Protocol):
    """Chooses one of the candidates. May raise: the router then takes the least loaded of two."""

    uses_prefixes: bool = False  # whether it looks at ``cached``: the prompt is not hashed for one that doesn't

    def choose(self, candidates: Candidates) -> int:
        """Index into the candidates' arrays."""


def least(x: Floats) -> float:
    """``x.min()``, in a quarter of its time."""
    return float(x[x.argmin()])


def pick_least(costs: Floats, rng: random.Random) -> int:
    """The least of ``costs``."""
    return pick_one((costs == least(costs)).nonzero()[0], rng)


def pick_one(equal: Slots, rng: random.Random) -> int:
    """One of those that are equally good, at random.

    Never the first of them: several routers would then agree to flood the same replica.
    """
    return int(equal[rng.randrange(len(equal))])
