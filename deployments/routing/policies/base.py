"""What a routing policy is given, and has to say. Pure: no Ray, no clock, no waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deployments.routing.load import Floats


@dataclass(frozen=True, slots=True)
class Candidates:
    """The replicas that may serve a request, at this instant: arrays of one length, at least 1. Not to be changed."""

    names: Sequence[str]  # unique ids by slot
    slots: npt.NDArray[np.intp]
    prompt_tokens: int
    cached: npt.NDArray[np.int64]  # prompt tokens that are in the replica's cache, or will be when it gets there
    backlog: Floats  # prompt tokens that it computes before a new request's own
    wait: Floats  # seconds before it begins with those: that backlog's, and till its batch has a place
    active: Floats  # sequences that wait or run there
    kv_usage: Floats  # fraction of its KV blocks that sequences refer to
    fullness: Floats  # fraction that hold something, referred to or not
    token_s: Floats  # seconds that a prompt token takes there, > 0
    harm: Floats  # seconds that a new sequence costs each active one
    session: str = ""  # what the caller says belongs together

    def __len__(self) -> int:
        return len(self.slots)


class RoutingPolicy(Protocol):
    """Chooses one of the candidates. May raise: the router then takes the least loaded of two."""

    uses_prefixes: bool = False  # whether it looks at ``cached``: the prompt is not hashed for one that doesn't

    def choose(self, candidates: Candidates) -> int:
        """Index into the candidates' arrays."""


def pick_least(costs: Floats, rng: random.Random) -> int:
    """The least of ``costs``."""
    return pick_one(costs == costs.min(), rng)


def pick_one(equal: npt.NDArray[np.bool_], rng: random.Random) -> int:
    """One of those that are equally good, at random.

    Never the first of them: several routers would then agree to flood the same replica.
    """
    (among,) = equal.nonzero()
    return int(among[rng.randrange(len(among))])
