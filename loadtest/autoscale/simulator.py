"""Simulation of one workload on one fleet that a scaler sizes: arrivals, prefills, decodes, starts, drains, reports."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from ray.serve._private.common import TimeStampedValue

from loadtest.autoscale.workload import Request, Workload
from loadtest.router.fleet import Engine

TICK_S = 0.5  # between two decisions: Serve's 0.1 s takes five times as long, and decides the same
SAMPLE_S = 0.5  # between two samples of a replica's figures: metrics_interval_s of serve_config.yaml
KEEP_S = 60.0  # of samples
SLOT_S = 10.0  # of which each is within the objective or lost


@dataclass(frozen=True)
class Setting:
    """What is simulated, but for workload and scaler."""

    engine: Engine = field(default_factory=lambda: Engine(rate=4000.0, overhead=0.005, token_s=0.025, harm_s=0.0005))
    kv_tokens: int = 60_000  # that one replica's KV cache holds
    start_s: float = 20.0  # from order to ready, a tenth more or less
    smallest: int = 1
    largest: int = 16
    ttft_s: float = 3.0  # the objective: the first token within so long,
    token_s: float = 0.05  # and further ones so far apart at most,
    share: float = 0.9  # for so many of the requests that come within ten seconds
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    lost_minutes: float  # in which the objective was missed
    minutes: float  # with requests
    replica_hours: float  # from order to end
    events: int  # changes of the target
    wrong_way: int  # of those, changes that take the one before back within a start time and a half
    ttft: np.ndarray  # of each request, seconds, float [n]
    counts: list[tuple[float, int]]  # the target, whenever it changed
    final: int  # replicas at the end


class Replica:
    """First come, first prefilled, one at a time; sequences decode beside that, and slow it."""

    def __init__(self, name: str, ordered_at: float, start_s: float) -> None:
        self.name = name
        self.ordered_at = ordered_at
        self.start_s = start_s
        self.ready = False
        self.draining = False
        self.queue: deque[Request] = deque()  # the first of them is being prefilled
        self.decoding = 0
        self.kv = 0  # tokens of those in the batch
        self.prefilled = 0  # prompt tokens, since start
        self.began = self.free_at = 0.0  # of the prefill that is under way

    @property
    def active(self) -> int:
        return len(self.queue) + self.decoding

    def done(self, now: float) -> float:
        """Prompt tokens computed of the first in the queue."""
        if not self.queue or self.free_at <= self.began:
            return 0.0
        return self.queue[0].tokens * min(1.0, (now - self.began) / (self.free_at - self.began))

    def backlog(self, now: float) -> float:
        return sum(request.tokens for request in self.queue) - self.done(now)

    def stats(self, now: float, setting: Setting) -> dict[str, float]:
        """As ``EngineReplica.record_autoscaling_stats``."""
        waiting = max(0, len(self.queue) - 1)
        rate = setting.engine.rate / (1 + setting.engine.slowdown * self.decoding)
        return {
            "waiting": waiting,
            "running": self.active - waiting,
            "kv_usage": min(1.0, self.kv / setting.kv_tokens),
            "prefill_rate": rate if self.prefilled else 0.0,
            "arrived_tokens": self.prefilled + self.done(now) + self.backlog(now),
            "cached_tokens": 0.0,
        }


class Scaler(Protocol):
    """Decides how many replicas there should be."""

    def desired(self, fleet: Fleet) -> int:
        """Within the setting's bounds or not: the fleet sees to those."""


class Fleet:
    """The simulation; runs once. Scalers read it."""

    def __init__(self, workload: Workload, setting: Setting, scaler: Callable[[Workload, Setting], Scaler]) -> None:
        self.now = 0.0
        self.setting = setting
        self.target = setting.smallest
        self.scaled_up_at: float | None = None
        self.samples: dict[str, dict[str, list[TimeStampedValue]]] = {}  # by figure and replica
        self.totals: list[tuple[float, float, float]] = []  # (time, requests in all, those held for want of a replica)
        self._workload = workload
        self._scaler = scaler(workload, setting)
        self._rng = random.Random(setting.seed)
        self._replicas: list[Replica] = []
        self._held: deque[Request] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._ended: list[tuple[float, float]] = []  # of each replica that has ended: from, to
        self.counts: list[tuple[float, int]] = []

    @property
    def running(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.ready and not replica.draining]

    def mean(self, window: float, held: bool = False) -> float:
        """Requests in the system, or those held, over the last ``window`` seconds."""
        recent = list(itertools.takewhile(lambda one: one[0] > self.now - window, reversed(self.totals)))
        return sum(one[2 if held else 1] for one in recent) / len(recent) if recent else 0.0

    def run(self) -> Outcome:
        for request in self._workload.requests:
            self._at(request.arrival, lambda request=request: self._arrive(request))  # type: ignore[misc]
        for _ in range(self.target):
            replica = self._ordered()
            replica.ready = True
        self.counts = [(0.0, self.target)]
        self._at(0.0, self._sample)
        self._at(0.0, self._tick)
        while self._events and (self.now < self._workload.seconds or self._busy()):
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._outcome()

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _busy(self) -> bool:
        return bool(self._held) or any(replica.active for replica in self._replicas)

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        running = self.running
        if not running:
            self._held.append(request)
            return
        rate, harm = self.setting.engine.rate, self.setting.engine.harm_s * 100
        replica = min(running, key=lambda one: one.backlog(self.now) / rate + one.active * harm)
        replica.queue.append(request)
        if len(replica.queue) == 1:
            self._prefill(replica)

    def _prefill(self, replica: Replica) -> None:
        engine, request = self.setting.engine, replica.queue[0]
        work = request.tokens / engine.rate * (1 + engine.slowdown * replica.decoding) + engine.overhead
        replica.began, replica.free_at = self.now, self.now + work
        replica.kv += request.tokens + request.output
        self._at(replica.free_at, lambda: self._prefilled(replica))

    def _prefilled(self, replica: Replica) -> None:
        engine, request = self.setting.engine, replica.queue.popleft()
        replica.prefilled += request.tokens
        replica.decoding += 1
        request.first_token = self.now
        request.token_s = engine.token_s + engine.harm_s * replica.decoding
        self._at(self.now + request.output * request.token_s, lambda: self._finished(replica, request))
        if replica.queue:
            self._prefill(replica)

    def _finished(self, replica: Replica, request: Request) -> None:
        replica.decoding -= 1
        replica.kv -= request.tokens + request.output
        if replica.draining and not replica.active:
            self._end(replica)

    # -- replicas ------------------------------------------------------------------------------------------------

    def _ordered(self) -> Replica:
        replica = Replica(f"r{next(self._names)}", self.now, self.setting.start_s * self._rng.uniform(0.9, 1.1))
        self._replicas.append(replica)
        return replica

    def _up(self, replica: Replica) -> None:
        if replica in self._replicas:  # else it was taken back
            replica.ready = True
            held, self._held = self._held, deque()
            for request in held:
                self._arrive(request)

    def _end(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        self._ended.append((replica.ordered_at, self.now))
        for by_replica in self.samples.values():
            by_replica.pop(replica.name, None)

    def _tick(self) -> None:
        desired = max(self.setting.smallest, min(self.setting.largest, self._scaler.desired(self)))
        if desired != self.target:
            if desired > self.target:
                self.scaled_up_at = self.now
            self.target = desired
            self.counts.append((self.now, desired))
        staying = [replica for replica in self._replicas if not replica.draining]
        for _ in range(self.target - len(staying)):
            replica = self._ordered()
            self._at(self.now + replica.start_s, lambda replica=replica: self._up(replica))  # type: ignore[misc]
        # As Serve: those that still start go first.
        staying.sort(key=lambda one: (one.ready, -one.ordered_at))
        for replica in staying[: max(0, len(staying) - self.target)]:
            replica.draining = True
            if not replica.active:
                self._end(replica)
        self._at(self.now + TICK_S, self._tick)

    def _sample(self) -> None:
        held = float(len(self._held))
        self.totals.append((self.now, held + sum(replica.active for replica in self._replicas), held))
        for replica in self.running:
            for name, value in replica.stats(self.now, self.setting).items():
                series = self.samples.setdefault(name, {}).setdefault(replica.name, [])
                series.append(TimeStampedValue(self.now, value))
                if len(series) > KEEP_S / SAMPLE_S:
                    del series[0]
        self._at(self.now + SAMPLE_S, self._sample)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        setting, end = self.setting, self._workload.seconds
        spans = self._ended + [(replica.ordered_at, end) for replica in self._replicas]
        missed: dict[int, list[bool]] = {}
        for request in self._workload.requests:
            late = request.first_token - request.arrival > setting.ttft_s or request.token_s > setting.token_s
            missed.setdefault(int(request.arrival // SLOT_S), []).append(late)
        return Outcome(
            lost_minutes=sum(np.mean(late) > 1 - setting.share for late in missed.values()) * SLOT_S / 60,
            minutes=len(missed) * SLOT_S / 60,
            replica_hours=sum(min(to, end) - begin for begin, to in spans) / 3600,
            events=len(self.counts) - 1,
            wrong_way=_wrong_way(self.counts, 1.5 * setting.start_s),
            ttft=np.array([request.first_token - request.arrival for request in self._workload.requests]),
            counts=self.counts,
            final=self.target,
        )


def _wrong_way(counts: Sequence[tuple[float, int]], within: float) -> int:
    steps = [(time, after - before) for (_, before), (time, after) in itertools.pairwise(counts)]
    return sum(a * b < 0 and later - time <= within for (time, a), (later, b) in itertools.pairwise(steps))
