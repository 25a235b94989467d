"""Others' routing rules, told again from their documentation and papers, as baselines.

They see the fleet as it is at that instant, but for what the originals keep of their own: Ray's and SGLang's trees are
histories of what was sent where, from which nothing is ever evicted. That is kinder than any of them has it.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from collections.abc import Sequence
from typing import Protocol

from loadtest.router.fleet import Replica
from loadtest.router.workload import BLOCK, Request


class Rule(Protocol):
    """Chooses a replica, and remembers what it needs."""

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        """Index of a replica, which then gets the request."""


def _least(costs: Sequence[float], rng: random.Random, among: Sequence[int] | None = None) -> int:
    among = range(len(costs)) if among is None else among
    least = min(costs[i] for i in among)
    return rng.choice([i for i in among if costs[i] == least])


class RoundRobin(Rule):
    """Each in turn."""

    def __init__(self, rng: random.Random) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        self._next += 1
        return self._next % len(replicas)


class PowerOfTwo(Rule):
    """Ray Serve's default: of two at random, the one with fewer requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        two = self._rng.sample(range(len(replicas)), min(2, len(replicas)))
        return _least([replica.active for replica in replicas], self._rng, two)


class LeastRequests(Rule):
    """The fewest requests of all."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        return _least([replica.active for replica in replicas], self._rng)


class _Histories:
    """What was sent to each replica, and never forgotten."""

    def __init__(self) -> None:
        self._sent: dict[int, set[int]] = {}

    def match(self, request: Request, replica: int) -> float:
        """The longest prefix that was sent there, as a fraction of the prompt."""
        sent = self._sent.get(replica, set())
        ids = request.ids.tolist()
        return next((n for n, id in enumerate(ids) if id not in sent), len(ids)) / len(ids)

    def size(self, replica: int) -> int:
        return len(self._sent.get(replica, ()))

    def add(self, request: Request, replica: int) -> None:
        self._sent.setdefault(replica, set()).update(request.ids.tolist())


class RayPrefix(Rule):
    """Ray's PrefixCacheAffinityRouter: the replica with the longest match of at least 0.1, else the smallest tree; and
    power of two where queues differ by more than ``imbalanced``, which never happens as it is shipped."""

    def __init__(self, rng: random.Random, imbalanced: float = math.inf) -> None:
        self._rng, self._imbalanced = rng, imbalanced
        self._histories = _Histories()

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        loads = [replica.active for replica in replicas]
        if max(loads) - min(loads) > self._imbalanced:
            chosen = PowerOfTwo(self._rng).choose(request, replicas, now)
        else:
            matches = [self._histories.match(request, i) for i in range(len(replicas))]
            if max(matches) >= 0.1:
                best = [i for i, match in enumerate(matches) if match == max(matches)]
                chosen = _least(loads, self._rng, best)
            else:
                chosen = _least([self._histories.size(i) for i in range(len(replicas))], self._rng)
        self._histories.add(request, chosen)
        return chosen


class SglangThresholds(Rule):
    """SGLang's cache_aware: least requests where they differ by more than 64 and by half, else the best match if that
    is over 0.3 of the prompt, else least requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._histories = _Histories()

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        loads = [replica.active for replica in replicas]
        matches = [self._histories.match(request, i) for i in range(len(replicas))]
        balanced = max(loads) - min(loads) <= 64 or max(loads) <= 1.5 * min(loads)
        if balanced and max(matches) > 0.3:
            chosen = _least([-match for match in matches], self._rng)
        else:
            chosen = _least(loads, self._rng)
        self._histories.add(request, chosen)
        return chosen


class BoundedHashing(Rule):
    """Consistent hashing of the prompt's first 1,024 tokens with loads bounded to 1.25 of the mean (Mirrokni, 2018)."""

    def __init__(self, rng: random.Random) -> None:
        self._ring: list[tuple[int, int]] = []

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        if not self._ring:
            self._ring = sorted((_hash(f"{i}/{node}"), i) for i in range(len(replicas)) for node in range(100))
        most = math.ceil(1.25 * (sum(replica.active for replica in replicas) + 1) / len(replicas))
        start = bisect.bisect(self._ring, (_hash(str(request.ids[:2].tolist())), 0))
        for step in range(len(self._ring)):
            _, i = self._ring[(start + step) % len(self._ring)]
            if replicas[i].active + 1 <= most:
                return i
        raise AssertionError("some replica is at or below the mean")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Dynamo(Rule):
    """Dynamo's cost: blocks to prefill, waiting ones included, and blocks of the sequences that decode."""

    def __init__(self, rng: random.Random, prefill_weight: float = 1.0) -> None:
        self._rng, self._weight = rng, prefill_weight

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        costs = []
        for replica in replicas:
            prefill = (replica.backlog(now) + request.tokens - replica.cached(request)) / BLOCK
            costs.append(self._weight * prefill + replica.decoding_blocks)
        return _least(costs, self._rng)
