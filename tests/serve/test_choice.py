"""What the router chooses, against the cost of docs/routing.md: told again in plain Python, one replica at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.core import RouteRequest, RoutingCore
from deployments.routing.load import GONE_S, RATE, SILENT_S, LoadReport, ReplicaInfo
from deployments.routing.policies.prefix import Prefix
from nanoengine.cache.events import PrefixEvents
from nanoengine.cache.prefix_hash import prefix_hashes, prefix_root

TOKENS = np.random.default_rng(0).integers(0, 50_000, 12_800).astype(np.int32)


@dataclass
class Plain:
    """What a router knows of one replica."""

    heard_at: float
    rate: float
    told: LoadReport = field(default_factory=LoadReport)
    measured: bool = False
    work: float = 0.0  # prompt tokens ahead of a new request, at ``worked_at``
    worked_at: float = 0.0
    calls: dict[int, int] = field(default_factory=dict)  # this router's: prompt tokens of each

    def backlog(self, now: float) -> float:
        return max(0.0, self.work - self.rate * (now - self.worked_at))

    def report(self, told: LoadReport, rate: float, now: float) -> None:
        self.told, self.rate, self.measured = told, rate, self.measured or told.prefill_rate > 0
        newest = told.ingresses["me"][1]
        self.work = told.backlog_tokens + sum(tokens for call, tokens in self.calls.items() if call > newest)
        self.worked_at = self.heard_at = now

    def reserve(self, call: int, tokens: int, now: float) -> None:
        self.work, self.worked_at = self.backlog(now) + tokens, now
        self.calls[call] = tokens

    def active(self) -> int:
        return max(0, self.told.active - self.told.ingresses.get("me", (0, 0))[0]) + len(self.calls)


@dataclass
class Reference:
    """The policy as its documentation has it."""

    rng: random.Random
    busy: float

    def choose(self, replicas: list[Plain], prompt: int, cached: list[int], now: float) -> tuple[int, float]:
        """Which of the replicas, and the least wait of any."""
        backlog, active = [r.backlog(now) for r in replicas], [float(r.active()) for r in replicas]
        heard = [r.heard_at >= now - SILENT_S for r in replicas]
        if any(heard):  # the others are taken to be as busy as these
            for values in (backlog, active):
                mean = float(np.mean([value for value, known in zip(values, heard, strict=True) if known]))
                values[:] = [v if known else max(v, mean) for v, known in zip(values, heard, strict=True)]
        self.busy += 0.01 * (sum(tokens > 0 for tokens in backlog) / len(replicas) - self.busy)
        rho = 1.0 + max(0.0, self.busy - 0.8) / 0.2 * (3.0 - 1.0)
        waits, costs, works, enough = [], [], [], []
        for i, r in enumerate(replicas):
            token_s = (1 + r.told.slowdown * active[i]) / r.rate
            waits.append(backlog[i] * token_s + max(0.0, r.told.place_s - (now - r.heard_at)))
            uncached = prompt - cached[i]
            costs.append(
                waits[i]
                + (1 + rho * r.told.fullness) * uncached * token_s
                + 0.2 * r.told.harm_s * active[i]
                + 10 * max(0.0, r.told.kv_usage - 0.9)
            )
            works.append(backlog[i] + uncached)
            enough.append(2.0 / token_s)  # tokens in two seconds
        bound, least_work = 1.5 * float(np.mean(works)), min(works)
        allowed = [i for i, work in enumerate(works) if not (work > bound and work > least_work + enough[i])]
        least = min(costs[i] for i in allowed)
        equal = [i for i in allowed if costs[i] <= least + max(0.01, 0.02 * least)]
        return equal[self.rng.randrange(len(equal))], min(waits)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([0.03, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_the_replica_with_the_least_cost_is_chosen(seed: int, count: int, pause: float, busy: float) -> None:
    """Whatever was reported, reserved and released before: with pauses of some milliseconds fleets are busy, with
    pauses of a second replicas fall silent."""
    rng = random.Random(seed)
    time = 1000.0
    policy = Prefix(rng=random.Random(seed))
    policy._busy = busy  # as after some hundred decisions
    core = RoutingCore(policy, lambda: time)
    core.fleet.ingress = "me"
    names = [f"r{i}" for i in range(count)]
    blocks = [rng.choice([16, 48, 256]) for _ in names]
    core.set_replicas({name: ReplicaInfo("m", size, True) for name, size in zip(names, blocks, strict=True)})
    plain = {name: Plain(time, RATE) for name in names}
    reference = Reference(random.Random(seed), busy)
    numbers = dict.fromkeys(names, 0)
    gone: set[str] = set()
    calls: dict[int, str] = {}

    for step in range(60):
        time += rng.expovariate(1 / pause)
        name = rng.choice(names)
        match rng.choice(["report", "report", "route", "route", "route", "release", "prefixes", "tend"]):
            case "report":
                numbers[name] += 1
                mine = [call for call, at in calls.items() if at == name]
                newest = rng.choice(mine) if mine else -1
                told = LoadReport(
                    number=numbers[name],
                    active=rng.randrange(40),
                    backlog_tokens=rng.choice([0.0, rng.uniform(0, 60_000)]),
                    kv_usage=rng.uniform(0, 1),
                    fullness=rng.choice([0.0, 1.0, rng.random()]),
                    ingresses={"me": (rng.randrange(5), newest)},
                    prefill_rate=rng.choice([0.0, rng.uniform(3000, 30_000)]),
                    slowdown=rng.uniform(0, 0.05),
                    harm_s=rng.uniform(0, 0.1),
                    place_s=rng.choice([0.0, rng.uniform(0, 3)]),
                )
                known = [r.rate for r in plain.values() if r.measured]
                rate = told.prefill_rate or (plain[name].rate if plain[name].measured else np.mean(known or [RATE]))
                plain[name].report(told, float(rate), time)
                core.load(name, told)
            case "route":
                prompt = TOKENS[: rng.choice([1, 700, 12_800, rng.randrange(1, 12_800)])]
                excluded = {name} if rng.random() < 0.3 else set()
                question = core.look_up(RouteRequest(prompt))
                choice = core.choose(question, excluded)
                among = [other for other in names if other not in excluded | gone]
                if not among:
                    assert choice is None
                    continue
                found = [min(64 * int(blocks), len(prompt) - 1) for blocks in question.depth]
                cached = [found[i] // size * size for i, size in enumerate(blocks) if names[i] in among]
                index, wait_s = reference.choose([plain[other] for other in among], len(prompt), cached, time)
                assert choice is not None
                assert (choice.replica, choice.cached_tokens) == (among[index], cached[index]), f"step {step}"
                assert abs(choice.wait_s - wait_s) < 1e-6
                core.reserve(question, choice, f"c{step}", step)
                plain[choice.replica].reserve(step, len(prompt) - choice.cached_tokens, time)
                calls[step] = choice.replica
            case "release" if calls:
                call = rng.choice(list(calls))
                at = calls.pop(call)
                core.release(at, f"c{call}")
                del plain[at].calls[call]
            case "prefixes":
                hashes = prefix_hashes(prefix_root("m"), TOKENS[: rng.randrange(12_800)])
                core.prefixes(name, PrefixEvents(step, True, hashes.tobytes(), b""))
            case "tend":
                core.wants()
                gone = {other for other in names if numbers[other] and time - plain[other].heard_at > GONE_S}
