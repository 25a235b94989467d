"""The simulated replicas: a prefill server, a batch that decodes, and a prefix cache that tells what it holds."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from deployments.routing.load import LoadReport
from loadtest.router.workload import BLOCK, Request
from nanoengine.cache.events import HeldPrefixes, PrefixEvents, PrefixLog
from nanoengine.cache.prefix_hash import PrefixChain, prefix_root

MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Engine:
    """What every replica is."""

    rate: float = 15_900.0  # prompt tokens a second
    slowdown: float = 0.01  # of that, by each sequence that decodes
    overhead: float = 0.02  # seconds a request
    blocks: int = 3000  # of 512 tokens, in its cache
    token_s: float = 0.015  # between two tokens of a sequence alone
    harm_s: float = 0.0003  # ... and more, by each other sequence


class Replica:
    """First come, first prefilled, one at a time; a block can be shared as soon as its request is here."""

    def __init__(self, number: int, engine: Engine) -> None:
        self.name = f"r{number}"
        self.engine = engine
        self.queue: deque[Request] = deque()  # the first of them is being prefilled
        self.decoding = 0
        self.decoding_blocks = 0  # of the prompts of those
        self.busy = 0.0  # seconds of prefill
        self.free_at = 0.0  # when the first of the queue is done
        self.cache: OrderedDict[int, None] = OrderedDict()  # block ids, least recently used first
        self.log = PrefixLog(BLOCK)
        self.held = HeldPrefixes()
        self.open: Counter[str] = Counter()  # by ingress
        self.newest: dict[str, int] = {}
        self.number = 0
        self.output = 300.0

    @property
    def active(self) -> int:
        return len(self.queue) + self.decoding

    def backlog(self, now: float) -> float:
        """Prompt tokens that a request which comes now has to wait for."""
        rest = max(0.0, self.free_at - now) * self.engine.rate if self.queue else 0.0
        return rest + sum(request.tokens - request.cached for request in list(self.queue)[1:])

    def cached(self, request: Request) -> int:
        """Prompt tokens that it has of a request. Changes nothing."""
        usable = request.ids[: (request.tokens - 1) // BLOCK].tolist()
        return BLOCK * next((n for n, id in enumerate(usable) if id not in self.cache), len(usable))

    def admit(self, request: Request) -> None:
        """Take a request: find its blocks, and make room for those that are not there."""
        request.cached = self.cached(request)
        full = request.ids[: request.tokens // BLOCK].tolist()
        known = request.cached // BLOCK
        self.cache.update(dict.fromkeys(full))
        for id in reversed(full):  # a chain's end is evicted before its start
            self.cache.move_to_end(id)
        if len(full) > known:
            self.log.published(full, known, len(full), request.prompt, PrefixChain(prefix_root(MODEL)))
        while len(self.cache) > self.engine.blocks:
            self.log.evicted(self.cache.popitem(last=False)[0])
        self.queue.append(request)

    def start(self, now: float) -> float:
        """Begin the prefill of the first in the queue; returns when it will be done."""
        request, engine = self.queue[0], self.engine
        work = (request.tokens - request.cached) / engine.rate * (1 + engine.slowdown * self.decoding)
        self.free_at = now + work + engine.overhead
        self.busy += work + engine.overhead
        return self.free_at

    def events(self) -> PrefixEvents | None:
        """What has changed in the cache since the last call."""
        if (events := self.log.take()) is not None:
            self.held.apply(events)
        return self.held.changes()

    def report(self, now: float) -> LoadReport:
        self.number += 1
        return LoadReport(
            number=self.number,
            active=self.active,
            backlog_tokens=self.backlog(now),
            ingresses={name: (self.open[name], newest) for name, newest in self.newest.items()},
            prefill_rate=self.engine.rate,
            slowdown=self.engine.slowdown,
            harm_s=self.engine.harm_s * self.output,
            fullness=len(self.cache) / self.engine.blocks,
            prefixes=self.held.seq,
        )
