"""What a routing decision costs, and what a router's index weighs, on a fleet of a given size.

    python -m loadtest.routing_cost                       # 256 replicas with a cache of 100,000 blocks of 16 tokens
    python -m loadtest.routing_cost --replicas 16 --blocks 20000

A decision is all that the router does for a request whose tokens are known: hash, look up, choose, reserve. Tokenising
comes before and takes longer. The first half of each prompt is known, and all replicas hold it; the rest is new. Times
are of the thread's CPU, so that other processes on the machine don't count; ``--wall`` takes the clock on the wall.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable

import numpy as np

from deployments.routing.core import RouteRequest, RoutingCore
from deployments.routing.load import LoadReport, ReplicaInfo
from deployments.routing.policies.prefix import Prefix
from nanoengine.cache.events import PrefixEvents
from nanoengine.cache.prefix_hash import ROUTER_BLOCK, HashArray, prefix_hashes, prefix_root

BLOCK = 16
SHARED = 0.1  # of each cache, the same on all replicas


def percentiles(act: Callable[[int], None], times: int, clock: Callable[[], float]) -> str:
    """p50 and p99 of ``act(0)`` to ``act(times - 1)``, as text."""
    seconds = np.empty(times)
    for i in range(times):
        begin = clock()
        act(i)
        seconds[i] = clock() - begin
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return f"p50 {p50:6.0f} us   p99 {p99:6.0f} us"


def fill(core: RoutingCore, replicas: int, blocks: int, shared: HashArray) -> None:
    """Tell the router of full caches."""
    rng = np.random.default_rng(0)
    for i in range(replicas):
        own = rng.integers(1, 2**63, blocks - len(shared)).astype(np.uint64) * np.uint64(2)
        core.prefixes(f"r{i}", PrefixEvents(1, True, np.concatenate((shared, own)).tobytes(), b""))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.routing_cost", description=main.__doc__)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=100_000, help=f"of {BLOCK} tokens, in each replica's cache")
    parser.add_argument("--times", type=int, default=3000)
    parser.add_argument("--wall", action="store_true", help="measure by the wall clock")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.thread_time
    rng = np.random.default_rng(1)
    held = args.blocks * BLOCK // ROUTER_BLOCK

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    core = RoutingCore(Prefix(), time.monotonic)
    core.set_replicas({f"r{i}": ReplicaInfo("model", BLOCK, True) for i in range(args.replicas)})
    known = rng.integers(0, 150_000, int(held * SHARED) * ROUTER_BLOCK).astype(np.int32)
    begin = time.perf_counter()
    fill(core, args.replicas, held, prefix_hashes(prefix_root("model"), known))
    filled = time.perf_counter() - begin
    for i in range(args.replicas):
        load = rng.integers(0, 60)
        core.load(f"r{i}", LoadReport(1, int(load), float(load * 500), 0.5, prefill_rate=16_000, fullness=1.0))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    total = int(core.index.held.sum())
    print(f"{args.replicas} replicas x {args.blocks} blocks of {BLOCK} tokens = {total} holdings of {ROUTER_BLOCK}")
    print(f"index            {core.index.nbytes / 1e6:6.0f} MB   {core.index.nbytes / total:.1f} bytes a holding")
    print(f"process          {peak:6.0f} MB   more at its peak than before, growing the index included")
    print(f"filling          {total / filled / 1e6:6.2f} million holdings a second")

    for tokens in (512, 4096, 16_384, 65_536):
        half = min(tokens // 2, len(known))
        prompts = [
            np.concatenate((known[:half], rng.integers(0, 150_000, tokens - half).astype(np.int32))) for _ in range(50)
        ]
        gc.collect()

        def decide(i: int, prompts: list[np.ndarray] = prompts) -> None:
            question = core.look_up(RouteRequest(prompts[i % len(prompts)]))
            choice = core.choose(question)
            assert choice is not None
            core.reserve(question, choice, f"{i}", i)

        print(f"decision {tokens:6d} tokens      {percentiles(decide, args.times if tokens < 10_000 else 500, clock)}")
        core.index.expire(time.monotonic() + 1e6)

    events = [rng.integers(1, 2**63, 16).astype(np.uint64) for _ in range(args.times)]

    def told(i: int) -> None:
        core.prefixes(f"r{i % args.replicas}", PrefixEvents(i, False, events[i].tobytes(), events[i - 500].tobytes()))

    print(f"events, 16 stored, 16 removed {percentiles(told, args.times, clock)}")
    reports = [LoadReport(2 + i, 5, 100.0, 0.5, prefill_rate=16_000) for i in range(args.times)]

    def reported(i: int) -> None:
        core.load(f"r{i % args.replicas}", reports[i])

    print(f"load report                   {percentiles(reported, args.times, clock)}")


if __name__ == "__main__":
    main()
