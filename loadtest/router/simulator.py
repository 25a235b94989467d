"""Simulation of one workload on one fleet: arrivals, prefills, decodes, and news on their way to the ingresses."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deployments.routing.core import RouteRequest, RoutingCore
from deployments.routing.load import ReplicaInfo
from deployments.routing.policies.base import RoutingPolicy
from loadtest.router.fleet import MODEL, Engine, Replica
from loadtest.router.rules import Rule
from loadtest.router.workload import BLOCK, Request, Workload, ideal_hit_rate
from nanoengine.cache.events import PrefixEvents

PERIOD_S = 0.1  # of reports and events
GAP_S = 0.002  # between two reports of a replica that has arrivals
LAG_S = 0.002  # from replica to ingress


@dataclass(frozen=True)
class Setting:
    """What is simulated, but for the workload."""

    replicas: int = 8
    ingresses: int = 1
    engine: Engine = field(default_factory=Engine)
    lost: float = 0.0  # fraction of prefix events that don't arrive
    exact: bool = False  # routers know everything at once: an oracle
    max_wait: float = float("inf")  # seconds; a request that no replica would begin with sooner is refused
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it. Times in seconds."""

    ttft: np.ndarray  # of each request that was served, float [n]
    hit_rate: float
    ideal: float  # of one endless cache that sees the requests in the same order
    skew: float  # coefficient of variation of the replicas' busy times
    used: float  # busy fraction of the fleet
    wrong: float  # prompt tokens that the router took to be cached and were not, or the reverse; of all
    refused: int = 0  # requests


class Simulator:
    """Runs once. ``policy`` makes each ingress its own production router; or ``rule`` decides for all."""

    def __init__(
        self,
        workload: Workload,
        setting: Setting,
        *,
        policy: Callable[[random.Random], RoutingPolicy] | None = None,
        rule: Callable[[random.Random], Rule] | None = None,
    ) -> None:
        self.now = 0.0
        self._workload, self._setting = workload, setting
        self._rng = random.Random(setting.seed)
        self._replicas = [Replica(i, setting.engine) for i in range(setting.replicas)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls = itertools.count()
        self._done: list[Request] = []
        self._wrong = 0
        self._open = 0
        self._refused = 0
        self._reporting = [False] * setting.replicas
        self._reported_at = [float("-inf")] * setting.replicas
        self._rule = rule(self._rng) if rule else None
        self._cores: list[RoutingCore] = []
        if policy is not None:
            infos = {replica.name: ReplicaInfo(MODEL, BLOCK, True) for replica in self._replicas}
            for i in range(setting.ingresses):
                rng = random.Random(f"{setting.seed} {i}")
                core = RoutingCore(policy(rng), lambda: self.now, rng)
                core.fleet.ingress = f"i{i}"
                core.set_replicas(infos)
                self._cores.append(core)

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def run(self) -> Outcome:
        """To the end of the last request."""
        for request in self._workload.requests:
            self._at(request.arrival, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._open = len(self._workload.requests)
        if self._cores and not self._setting.exact:
            for i in range(len(self._replicas)):
                self._at(PERIOD_S * (i + 1) / len(self._replicas), lambda i=i: self._tick(i))  # type: ignore[misc]
        while self._open:
            self.now, _, act = heapq.heappop(self._events)
            act()
        done = sorted(self._done, key=lambda request: request.arrival)
        tokens, busy = sum(request.tokens for request in done), np.array([r.busy for r in self._replicas])
        return Outcome(
            ttft=np.array([request.first_token - request.arrival for request in done]),
            hit_rate=sum(request.cached for request in done) / tokens,
            ideal=ideal_hit_rate(done),
            skew=float(busy.std() / busy.mean()),
            used=float(busy.sum() / len(busy) / self.now),
            wrong=self._wrong / tokens,
            refused=self._refused,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        number = next(self._calls)
        core = self._rng.choice(self._cores) if self._cores else None
        expected = 0
        if core is not None:
            if self._setting.exact:
                for replica in self._replicas:
                    self._tell(core, replica)
            question = core.look_up(RouteRequest(request.prompt))
            choice = core.choose(question)
            assert choice is not None
            if choice.wait_s > self._setting.max_wait:
                self._refused += 1
                self._open -= 1
                return
            core.reserve(question, choice, str(number), number)
            request.replica, expected = int(choice.replica[1:]), choice.cached_tokens
        else:
            assert self._rule is not None
            request.replica = self._rule.choose(request, self._replicas, self.now)
        replica = self._replicas[request.replica]
        replica.admit(request)
        if core is not None:
            name = core.fleet.ingress
            replica.open[name] += 1
            replica.newest[name] = number
            self._wrong += abs(expected - request.cached)
            if not self._setting.exact:
                self._report_soon(request.replica)
        request.on_end = lambda: self._ended(request, core, number)
        if len(replica.queue) == 1:
            self._at(replica.start(self.now), lambda: self._prefilled(replica))

    def _prefilled(self, replica: Replica) -> None:
        request = replica.queue.popleft()
        request.first_token = self.now
        engine = replica.engine
        length = request.output * (engine.token_s + engine.harm_s * replica.decoding)
        replica.decoding += 1
        replica.decoding_blocks += len(request.ids)
        self._at(self.now + length, request.on_end)
        if replica.queue:
            self._at(replica.start(self.now), lambda: self._prefilled(replica))

    def _ended(self, request: Request, core: RoutingCore | None, number: int) -> None:
        replica = self._replicas[request.replica]
        replica.decoding -= 1
        replica.decoding_blocks -= len(request.ids)
        replica.output += 0.05 * (request.output - replica.output)
        if core is not None:
            replica.open[core.fleet.ingress] -= 1
            core.release(replica.name, str(number))
        self._done.append(request)
        self._open -= 1
        if (following := self._workload.after(request, self.now)) is not None:
            self._open += 1
            self._at(following.arrival, lambda: self._arrive(following))

    # -- news ----------------------------------------------------------------------------------------------------

    def _tell(self, core: RoutingCore, replica: Replica) -> None:
        if (events := replica.events()) is not None:
            core.prefixes(replica.name, events)
        core.load(replica.name, replica.report(self.now))

    def _tick(self, i: int) -> None:
        """What a replica tells ten times a second."""
        self._send(i, self._replicas[i].events())
        self._at(self.now + PERIOD_S, lambda: self._tick(i))

    def _report_soon(self, i: int) -> None:
        """A request has arrived at a replica: every router should know."""
        if not self._reporting[i]:
            self._reporting[i] = True
            self._at(max(self.now, self._reported_at[i] + GAP_S), lambda: self._send(i, None))

    def _send(self, i: int, events: PrefixEvents | None) -> None:
        replica = self._replicas[i]
        self._reporting[i], self._reported_at[i] = False, self.now
        report = replica.report(self.now)

        def deliver() -> None:
            for core in self._cores:
                if events is not None and self._rng.random() >= self._setting.lost:
                    core.prefixes(replica.name, events)
                core.load(replica.name, report)
                for name in core.wants():
                    core.prefixes(name, self._replicas[int(name[1:])].held.snapshot())

        self._at(self.now + LAG_S, deliver)
