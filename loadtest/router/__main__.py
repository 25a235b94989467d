"""Compare routers on simulated fleets.

    python -m loadtest.router                                        # all workloads but traces, all routers
    python -m loadtest.router --trace conversation_trace.jsonl       # and a public trace in Mooncake's format
    python -m loadtest.router --only trace --routers prefix,oracle --seeds 3
    python -m loadtest.router --ingresses 8 --lost 0.01

Replicas are all alike: a first-come-first-served prefill server of 15,900 tokens a second, slowed by one part in a
hundred for each sequence that decodes, 20 ms a request, and a prefix cache of 3,000 or 600 blocks of 512 tokens. Traces
are replayed faster by ``--speed``, with a jitter of up to 3 s, since their times are ticks of that length.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import RoutingPolicy
from loadtest.router import report, rules
from loadtest.router.fleet import Engine
from loadtest.router.simulator import Outcome, Setting, Simulator
from loadtest.router.workload import Workload, agents, groups, trace

Make = Callable[[int], Workload]  # of a seed

RULES: dict[str, Callable[[random.Random], rules.Rule]] = {
    "round robin": rules.RoundRobin,
    "Serve's power of two": rules.PowerOfTwo,
    "least requests": rules.LeastRequests,
    "bounded hashing": rules.BoundedHashing,
    "Ray prefix (as shipped)": rules.RayPrefix,
    "Ray prefix (threshold 10)": partial(rules.RayPrefix, imbalanced=10),
    "SGLang thresholds": rules.SglangThresholds,
    "Dynamo (weight 1)": rules.Dynamo,
    "Dynamo (weight 8)": partial(rules.Dynamo, prefill_weight=8.0),
}
OURS = ("prefix", "lmetric", "least_work")


def simulate(name: str, workload: Workload, setting: Setting) -> Outcome:
    """One router, by the name that it has in the table."""
    if name in RULES:
        return Simulator(workload, setting, rule=RULES[name]).run()
    kind: type[RoutingPolicy] = POLICIES["prefix" if name == "oracle" else name]
    policy: Callable[[random.Random], RoutingPolicy] = lambda rng: kind(rng=rng)  # type: ignore[call-arg]  # noqa: E731
    return Simulator(workload, replace(setting, exact=name == "oracle"), policy=policy).run()


def merged(outcomes: list[Outcome]) -> Outcome:
    """Several seeds' outcomes as one: all times and refusals, means of the rest."""
    means = {
        field: float(np.mean([getattr(one, field) for one in outcomes]))
        for field in ("hit_rate", "ideal", "skew", "used", "wrong")
    }
    refused = sum(one.refused for one in outcomes)
    return Outcome(ttft=np.concatenate([one.ttft for one in outcomes]), refused=refused, **means)


def workloads(args: argparse.Namespace) -> dict[str, tuple[Make, Engine]]:
    """By name: how each is made, and on which engine it runs."""
    large, small = Engine(), Engine(blocks=600)
    made: dict[str, tuple[Make, Engine]] = {}
    for path in args.trace:
        if not path.exists():
            print(f"skipped: there is no {path}", file=sys.stderr)
            continue
        for engine in (large, small):
            name = f"trace {path.stem} x{args.speed:g}, {engine.blocks} blocks"
            made[name] = (partial(trace, path, args.speed, 3.0), engine)
    if not args.trace:
        print(
            "no trace: --trace takes files in Mooncake's format (docs/routing.md says where they are)", file=sys.stderr
        )
    made["150 groups of 6,144 tokens, 40/s, 600 blocks"] = (partial(groups, 150, 40.0, 6000), small)
    made["one hot prompt of 6,144 tokens, 40/s"] = (partial(groups, 1, 40.0, 6000), large)
    made["120 agents of 20 turns, closed loop"] = (partial(agents, 120, 20), large)
    return {name: one for name, one in made.items() if args.only in name}


def main() -> None:
    """Print a table for each workload; write all of them, with plots, as one HTML page."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.router", description=main.__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace; may be given several times")
    parser.add_argument("--speed", type=float, default=2.6, help="how much faster than it was recorded")
    parser.add_argument("--only", default="", help="workloads with this in their names")
    parser.add_argument("--routers", default="", help="names, separated by commas; all by default")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--ingresses", type=int, default=1, help="of ours; others' rules know everything anyway")
    parser.add_argument("--lost", type=float, default=0.0, help="fraction of cache events that never arrive")
    parser.add_argument("--max-wait", type=float, default=float("inf"), help="of ours: refuse what waits for longer")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--html", type=Path, default=None, help="where to write the page")
    args = parser.parse_args()
    known = ("oracle", *OURS, *RULES)
    names = tuple(args.routers.split(",")) if args.routers else known
    if strangers := set(names) - set(known) - set(POLICIES):
        parser.error(f"no such router: {', '.join(strangers)}; there are {', '.join(known)}")

    sections = []
    for title, (make, engine) in workloads(args).items():
        print(f"\n{title}\n{report.head()}", flush=True)
        rows = []
        for name in names:
            runs = []
            for seed in range(args.seeds):
                setting = Setting(args.replicas, args.ingresses, engine, args.lost, max_wait=args.max_wait, seed=seed)
                runs.append(simulate(name, make(seed), setting))
            outcome = merged(runs)
            label = f"{name}, {outcome.refused} refused" if outcome.refused else name
            rows.append((label, outcome))
            print(report.line(report.cells(rows[-1])), flush=True)
        sections.append((title, rows))
    if args.html is not None:
        report.write_html(args.html, sections)
        print(f"\n{args.html}")


if __name__ == "__main__":
    main()
