"""A fleet that follows its load, on a real Serve: engines of fixed rate, so that replicas add capacity on two cores."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ray import serve

from tests.serve.cluster import NAME, Cluster, config, eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

RATE = 2.0  # requests a second that one replica can do: prompts of 250 tokens, at some 500 a second
TTFT_S = 2.5  # objective for nine of ten requests
DOWN_S = 15.0


def deploy(cluster: Cluster, smallest: int = 1, *, cpus: float = 0.5, largest: int = 7, **changes: Any) -> None:
    """The configuration as it is, but for engines, bounds, and a shorter delay before replicas are given up."""
    engine = {
        "model": "synthetic",
        "num_blocks": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "synthetic": {"step_seconds": 0.01, "prefill_tokens_per_second": 500, "max_model_len": 2048},
    }
    scaling = "EngineReplica__autoscaling_config__"
    data = config(
        **{
            "args__engine": engine,
            f"{scaling}min_replicas": smallest,
            f"{scaling}max_replicas": largest,
            f"{scaling}downscale_delay_s": DOWN_S,
            "EngineReplica__ray_actor_options": {"num_cpus": cpus},
        },
        **changes,
    )
    cluster.deploy(data, timeout=180)
    eventually(lambda: counts() == (smallest, smallest), 120, "the least")


def counts() -> tuple[int, int]:
    """Replicas that there should be, running or starting; and those that run."""
    states = serve.status().applications["llm"].deployments["EngineReplica"].replica_states
    running = states.get("RUNNING", 0)
    return running + states.get("STARTING", 0) + states.get("PENDING_INITIALIZATION", 0), running


def controller_log(cluster: Cluster) -> str:
    return "".join(path.read_text() for path in Path(cluster.folder).rglob("controller_*.log"))


def ordered() -> int:
    return counts()[0]


@dataclass
class Asked:
    at: float  # seconds since the load began
    status: int = 0
    retry_after: int = 0
    ttft: float = float("inf")
    tokens: int = 0


async def ask(client: httpx.AsyncClient, begin: float, number: int, leave: bool = False) -> Asked:
    """One stream of 8 tokens. ``leave``: after the first."""
    one = Asked(time.monotonic() - begin)
    prompt = [32 + (number * 7 + i) % 90 for i in range(250)]
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as got:
        one.status, one.retry_after = got.status_code, int(got.headers.get("retry-after", 0))
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                one.ttft = min(one.ttft, time.monotonic() - begin - one.at)
                if '"usage":{' in line:
                    one.tokens = 8
                if leave:
                    break
    return one


class Watch:
    """What was ordered, and how many were running, as time goes by."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self.counts: list[tuple[float, int]] = []
        self.running: list[tuple[float, int]] = []

    async def run(self) -> None:
        while True:
            count, running = await asyncio.to_thread(counts)
            for log, value in ((self.counts, count), (self.running, running)):
                if not log or log[-1][1] != value:
                    log.append((time.monotonic() - self._begin, value))
            await asyncio.sleep(0.25)  # the controller has to answer this


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncIterator[tuple[httpx.AsyncClient, float, Watch]]:
    begin = time.monotonic()
    watch = Watch(begin)
    task = asyncio.create_task(watch.run())
    try:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300, limits=httpx.Limits()) as client:
            yield client, begin, watch
    finally:
        task.cancel()


async def load(client: httpx.AsyncClient, begin: float, rate: Callable[[float], float], seconds: float) -> list[Asked]:
    """Open loop: ``rate(t)`` requests a second, evenly."""
    tasks, start, due = [], time.monotonic(), 0.0
    for number in itertools.count():
        due += 1 / rate(due)
        if due > seconds:
            return await asyncio.gather(*tasks)
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(client, begin, number)))
    raise AssertionError


@pytest.mark.parametrize("before", [0.0, RATE / 2], ids=["idle", "half"])
async def test_a_step_is_met_within_a_start_and_ten_seconds_and_given_up_after(cluster: Cluster, before: float) -> None:
    """From no request at all, with engines that have not measured themselves yet; and from half of what one can do."""
    deploy(cluster)
    async with watched(cluster) as (client, begin, watch):
        if before:
            await load(client, begin, lambda t: before, 10)
        else:
            await asyncio.sleep(10)
        step = time.monotonic() - begin
        asked = await load(client, begin, lambda t: 4 * RATE, 100)
        await asyncio.to_thread(eventually, lambda: ordered() == 1, DOWN_S + 60, "the least again")
    up = [(time - step, count) for time, count in watch.counts if time > step]
    first = up[0][0]
    # Up means: as many running as the load alone, at full use, takes.
    started = next(time for time, count in watch.running if count >= 5) - step
    late = [one for one in asked if one.at - step > started + 10]
    p90 = float(np.quantile([one.ttft for one in late], 0.9))
    print(f"ordered after {first:.1f} s, five up after {started:.1f} s, p90 from 10 s on {p90:.2f} s; {up}")
    assert up[0][1] > 1
    assert first < 5
    assert {one.status for one in late} == {200}
    assert p90 < TTFT_S
    rises = [b > a for (_, a), (_, b) in itertools.pairwise(watch.counts)]
    assert rises == sorted(rises, reverse=True), "up, and then down"
    assert {one.status for one in asked} <= {200, 429}


@pytest.mark.parametrize("shape", ["constant", "ramp", "sawtooth"])
async def test_it_does_not_flap(cluster: Cluster, shape: str) -> None:
    """20 minutes at 15 times the speed: every delay but that of a start is as much shorter."""
    fast = {"metrics_interval_s": 0.2, "look_back_period_s": 1.0, "upscale_delay_s": 0.1}
    deploy(cluster, **{f"EngineReplica__autoscaling_config__{key}": value for key, value in fast.items()})
    rate = {
        "constant": lambda t: 5.0,
        "ramp": lambda t: 0.5 + 6.5 * (1 - abs(t / 40 - 1)),
        "sawtooth": lambda t: 1.0 + 6.0 * (t % 10) / 10,  # teeth shorter than the delay of DOWN_S
    }[shape]
    async with watched(cluster) as (client, begin, watch):
        asked = await load(client, begin, rate, 80)
        await asyncio.to_thread(eventually, lambda: ordered() == 1, DOWN_S + 60, "the least again")
    print(shape, [(round(time, 1), count) for time, count in watch.counts])
    rises = [b > a for (_, a), (_, b) in itertools.pairwise(watch.counts)]
    assert rises == sorted(rises, reverse=True), "up as the load grows, down as it goes, and no replica twice"
    assert max(count for _, count in watch.counts) > 2
    assert {one.status for one in asked} <= {200, 429}


async def test_from_zero_what_waits_is_answered_and_what_does_not_fit_told_when(cluster: Cluster) -> None:
    """The first request starts a replica; 100 come meanwhile, for 60 of which there is room."""
    deploy(cluster, 0, args__ingress__start_wait_s=120, args__ingress__max_inflight_requests=60)
    assert cluster.healthy(), "a request can be served, if late"
    async with watched(cluster) as (client, begin, watch):
        first = asyncio.create_task(ask(client, begin, 0))
        await asyncio.sleep(0.5)
        rest = await asyncio.gather(*(ask(client, begin, number) for number in range(1, 101)))
        alone = await first
        await asyncio.to_thread(eventually, lambda: ordered() == 0, DOWN_S + 60, "none again")
        again = await ask(client, begin, 101)
    print(f"first token after {alone.ttft:.1f} s, and from zero once more {again.ttft:.1f} s; {watch.counts}")
    assert (alone.status, alone.tokens, again.status) == (200, 8, 200)
    kinds = [one.status for one in rest]
    assert (kinds.count(200), kinds.count(429)) == (59, 41)
    assert all(one.tokens == 8 for one in rest if one.status == 200)
    # Nothing is known of a start's length but what the file says.
    assert {one.retry_after for one in rest if one.status == 429} <= set(range(110, 121))


async def test_who_leaves_before_anything_is_up_does_not_keep_it_up(cluster: Cluster) -> None:
    deploy(cluster, 0, args__ingress__start_wait_s=120)
    async with watched(cluster) as (client, begin, _):
        task = asyncio.create_task(ask(client, begin, 0))
        await asyncio.to_thread(eventually, lambda: ordered() == 1, 30, "a start")
        task.cancel()
        await asyncio.to_thread(eventually, lambda: ordered() == 0, DOWN_S + 120, "none again")
        assert task.cancelled(), "it was answered: nobody left"


async def test_bursts_whose_clients_leave_do_not_hold_it_up(cluster: Cluster) -> None:
    """Case D02: rejections and disconnects leave nothing counted, of five bursts."""
    deploy(cluster, 2, EngineReplica__max_ongoing_requests=4)
    async with watched(cluster) as (client, begin, watch):
        for _ in range(5):
            tasks = [asyncio.create_task(ask(client, begin, number, leave=number % 3 == 0)) for number in range(60)]
            await asyncio.gather(*tasks)
        assert max(count for _, count in watch.counts) > 2, "or nothing has to come down"
        # At most a look back and a delay until it comes down, and a delay more if that is in two steps.
        took = await asyncio.to_thread(eventually, lambda: ordered() == 2, 10 + 2 * DOWN_S + 5, "the least again")
    print(f"the least again after {took:.1f} s; {watch.counts}")
    left = await asyncio.to_thread(cluster.load)
    assert left.running == left.waiting == 0


async def test_what_cannot_start_is_given_up_and_what_runs_is_not(cluster: Cluster) -> None:
    """D06: an order that the cluster has no room for neither holds up a scale-down nor costs the replica that runs."""
    deploy(cluster, cpus=2.5, largest=4)
    running = await asyncio.to_thread(lambda: httpx.get(f"{cluster.url}/debug/memory", timeout=10).json()["replica"])
    async with watched(cluster) as (client, begin, watch):
        asked = await load(client, begin, lambda t: 1.5 * RATE, 30)
        assert max(count for _, count in watch.counts) > 1
        assert cluster.replicas() == 1
        await asyncio.to_thread(eventually, lambda: ordered() == 1, DOWN_S + 60, "the least again")
    assert {one.status for one in asked} == {200}
    after = await asyncio.to_thread(lambda: httpx.get(f"{cluster.url}/debug/memory", timeout=10).json()["replica"])
    assert after == running


async def test_an_unknown_argument_leaves_the_count_and_the_log_says_so(cluster: Cluster) -> None:
    """Past ``deployments.check``, which names it. Serve alone would stand in the middle of the deployment for ever."""
    deploy(cluster, EngineReplica__autoscaling_config__policy__policy_kwargs={"target_queue": 3})
    async with watched(cluster) as (client, begin, _):
        assert (await ask(client, begin, 0)).status == 200
    assert counts() == (1, 1)
    assert "EngineReplica stays at 1 replicas: TypeError" in controller_log(cluster)
