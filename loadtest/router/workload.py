"""Workloads for the simulator: prompts as chains of block ids, where equal ids mean equal prefixes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK = 512  # tokens that one id stands for


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, and what became of it."""

    arrival: float
    ids: npt.NDArray[np.int64]  # of its blocks, the last of which may be partial
    tokens: int
    output: int
    agent: int = -1  # who waits for it before asking again
    replica: int = -1
    cached: int = 0
    first_token: float = 0.0
    on_end: Callable[[], None] = lambda: None  # what happens when its last token is there

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """Token ids in which equal blocks are equal, and others differ: int32 [tokens]."""
        block = (self.ids[:, None] * 7919 + np.arange(BLOCK) * 31) & 0x7FFFFFFF
        return block.astype(np.int32).ravel()[: self.tokens]


@dataclass
class Workload:
    """Requests in order of arrival; agents' further ones come when an answer does."""

    name: str
    requests: list[Request]
    agents: list[Iterator[Request]] = field(default_factory=list)  # further requests, ``arrival`` being the think time

    def after(self, request: Request, now: float) -> Request | None:
        """What whoever waited for this answer asks next, and when."""
        if request.agent < 0 or (following := next(self.agents[request.agent], None)) is None:
            return None
        following.arrival += now
        return following


def ideal_hit_rate(requests: list[Request]) -> float:
    """Of one endless cache that sees the requests in this order: cached tokens over prompt tokens."""
    seen: set[int] = set()
    hit = 0
    for request in requests:
        full = request.ids[: (request.tokens - 1) // BLOCK].tolist()
        hit += BLOCK * next((n for n, id in enumerate(full) if id not in seen), len(full))
        seen.update(request.ids[: request.tokens // BLOCK].tolist())
    return hit / sum(request.tokens for request in requests)


def trace(path: Path, speed: float, jitter: float, seed: int) -> Workload:
    """A trace in Mooncake's format (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512 tokens),
    ``speed`` times as fast. Its times are ticks of several seconds: each request gets up to ``jitter`` seconds more, or
    bursts would be simulated that there never were.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        arrival = (row["timestamp"] / 1000 + rng.uniform(0, jitter)) / speed
        requests.append(Request(arrival, np.array(row["hash_ids"]), row["input_length"], row["output_length"]))
    return Workload(path.stem, sorted(requests, key=lambda request: request.arrival))


def groups(count: int, rate: float, total: int, seed: int) -> Workload:
    """``count`` system prompts of 6,144 tokens, one of them before 1,024 of each request's own; Poisson arrivals."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count(count * 12)
    arrivals = np.cumsum(rng.exponential(1 / rate, total)).tolist()
    requests = []
    for arrival, group in zip(arrivals, rng.integers(0, count, total).tolist(), strict=True):
        ids = np.array([*range(group * 12, group * 12 + 12), next(fresh), next(fresh)])
        requests.append(Request(arrival, ids, 14 * BLOCK, 300))
    name = "one hot prompt" if count == 1 else f"{count} groups"
    return Workload(f"{name}, {rate:g}/s", requests)


def agents(count: int, turns: int, seed: int) -> Workload:
    """Agents that share a system prompt of 4,096 tokens. Each asks again when it has its answer and has thought for two
    seconds or so, with all before and 1,024 tokens more."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count(8)

    def ask(agent: int) -> Iterator[Request]:
        ids = list(range(8))
        for _ in range(turns):
            ids = [*ids, next(fresh), next(fresh)]
            yield Request(float(rng.exponential(2.0)), np.array(ids), len(ids) * BLOCK, 200, agent)

    runs = [ask(agent) for agent in range(count)]
    return Workload(f"{count} agents, {turns} turns", [next(run) for run in runs], runs)
