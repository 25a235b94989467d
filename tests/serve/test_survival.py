"""Replicas, ingresses and controllers come and go under streams of known content: see docs/faults.md."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.cluster import NAME, Cluster, eventually
from tests.serve.survival import StreamLoad, processes, service

ENGINE, INGRESS = "ray::ServeReplica:llm:EngineReplica", "ray::ServeReplica:llm:Ingress"
ROUNDS = {"scale-down": 10, "update": 5, "kill replica": 5, "kill controller": 3, "kill ingress": 2}


def settled(cluster: Cluster, replicas: int) -> None:
    """So many engines run, and no other is still being stopped."""

    def so_many() -> bool:
        return cluster.replicas() == replicas == len(processes("nanoengine.process"))

    eventually(so_many, 120, f"{replicas} engines")


def idle(cluster: Cluster) -> None:
    """No sequence goes on that nobody reads: whichever engine is asked says so."""

    def is_idle() -> bool:
        loads = [cluster.load() for _ in range(6)]
        return all(load.running == load.waiting == load.blocks_used == 0 for load in loads)

    eventually(is_idle, 15, "idle engines")


def test_streams_outlive_the_replica_that_they_began_on(cluster: Cluster) -> None:
    cluster.deploy(service(2))
    settled(cluster, 2)
    load = StreamLoad(cluster.url, 6, 400)
    time.sleep(2)
    cluster.deploy(service(1))
    settled(cluster, 1)
    load.stop()
    found = load.take()
    assert set(found) == {"whole"}, found


@pytest.mark.soak
@pytest.mark.parametrize("title", [ENGINE, "nanoengine.process"])
def test_streams_outlive_a_process_that_stands_still(cluster: Cluster, title: str) -> None:
    """It holds all its connections and says nothing. Nobody waits for it much longer than it takes to be sure."""
    cluster.deploy(service(2))
    settled(cluster, 2)
    load = StreamLoad(cluster.url, 6, 400)
    time.sleep(2)
    before = processes(ENGINE)
    (victim, *_) = processes(title)
    victim.suspend()
    try:
        time.sleep(15)
        streams = list(load.ended)
        assert len(streams) >= 6, "those that had begun there have ended, and others have begun"
        assert max(stream.ended - stream.begun for stream in streams) < 8 + 5 + 8  # a stream, silence, and some
        eventually(lambda: set(processes(ENGINE)) - set(before), 120, "another in its place")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()
    load.stop()
    settled(cluster, 2)
    found = load.take()
    assert set(found) == {"whole"}, found


@pytest.mark.soak
def test_a_new_version_that_cannot_start_leaves_the_old_one(cluster: Cluster) -> None:
    cluster.deploy(service(2))
    settled(cluster, 2)
    before = {process.pid for process in processes("nanoengine.process")}
    load = StreamLoad(cluster.url, 6, 200)
    broken = service(2, args__engine={"model": "./no-such-folder"})
    for deployment in broken["applications"][0]["deployments"]:
        deployment["max_constructor_retry_count"] = 2
    with pytest.raises(RuntimeError, match="DEPLOY_FAILED"):
        cluster.deploy(broken, timeout=180)
    time.sleep(5)
    assert {process.pid for process in processes("nanoengine.process")} == before
    cluster.deploy(service(2, args__engine_stall_s=70))
    load.stop()
    found = load.take()
    assert set(found) == {"whole"}, found


@pytest.mark.soak
def test_an_update_of_the_only_engine_loses_nothing(cluster: Cluster) -> None:
    cluster.deploy(service(1, Ingress__num_replicas=1))
    settled(cluster, 1)
    (before,) = processes("nanoengine.process")
    load = StreamLoad(cluster.url, 6, 300)
    time.sleep(2)
    cluster.deploy(service(1, Ingress__num_replicas=1, args__engine_stall_s=50), timeout=180)
    eventually(lambda: before not in processes("nanoengine.process"), 60, "a new engine alone")
    load.stop()
    found = load.take()
    assert set(found) == {"whole"}, found


@pytest.mark.soak
def test_health_is_green_under_full_load(cluster: Cluster) -> None:
    cluster.deploy(service(2, args__ingress__max_inflight_requests=40))
    settled(cluster, 2)
    before = processes("nanoengine.process") + processes(ENGINE)
    load = StreamLoad(cluster.url, 120, 60)
    seconds = []
    for _ in range(100):
        begun = time.monotonic()
        assert httpx.get(f"{cluster.url}/health", timeout=30).status_code == 200
        seconds.append(time.monotonic() - begun)
        time.sleep(0.1)
    load.stop()
    found = load.take()
    assert set(found) == {"whole", "status 429"}, found
    assert processes("nanoengine.process") + processes(ENGINE) == before
    print(f"/health: p50 {sorted(seconds)[50]:.2f} s, worst {max(seconds):.2f} s; {dict(found)}")


LOOK = """
import sys, time, urllib.request
while True:
    begun = time.monotonic()
    assert urllib.request.urlopen(sys.argv[1], timeout=60).status == 200
    print(time.monotonic() - begun, flush=True)
    time.sleep(0.1)
"""


@pytest.mark.soak
def test_a_storm_of_long_prompts_and_of_bodies_too_large_is_borne(cluster: Cluster) -> None:
    """Case D13: 1,500 prompts of 2,000 characters at once, and bodies of 5 and 10 MB among them."""
    cluster.deploy(service(2))
    settled(cluster, 2)

    def all_processes() -> list[psutil.Process]:
        return processes("nanoengine.process") + processes(ENGINE) + processes(INGRESS)

    before = all_processes()
    statuses: Counter[int] = Counter()
    large: list[int] = []

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=240, limits=limits) as client:

            async def ask(number: int) -> None:
                body = {"model": NAME, "prompt": f"{number:4} ".ljust(2000, "x"), "max_tokens": 8}
                statuses[(await client.post("/v1/completions", json=body)).status_code] += 1

            async def ask_too_much(body: dict[str, Any]) -> None:
                large.append((await client.post("/v1/completions", json=body)).status_code)

            await asyncio.gather(
                ask_too_much({"model": NAME, "prompt": "x" * 10_000_000}),
                ask_too_much({"model": NAME, "prompt": "x", "metadata": {f"{i}": "y" for i in range(400_000)}}),
                *(ask(number) for number in range(1500)),
            )

    # Health is looked at by a process of its own: this one has 1,500 requests to send, and would tell its own delays.
    looking = subprocess.Popen([sys.executable, "-c", LOOK, f"{cluster.url}/health"], stdout=subprocess.PIPE, text=True)
    asyncio.run(storm())
    looking.terminate()
    seconds = [float(line) for line in looking.communicate()[0].split()]
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    print(f"{dict(statuses)}, {large}; /health: p99 {p99:.2f} s of {len(seconds)}")
    assert set(statuses) <= {200, 429}
    assert statuses[200] > 0
    assert set(large) <= {413, 429}
    assert p99 < 5, "a sixth of an ingress's health_check_timeout_s"
    assert all_processes() == before
    idle(cluster)


@pytest.mark.soak
def test_scale_down_takes_those_that_are_still_starting(cluster: Cluster) -> None:
    cluster.deploy(service(1))
    settled(cluster, 1)
    (engine,) = processes("nanoengine.process")
    load = StreamLoad(cluster.url, 4, 200)
    cluster.deploy(service(3), wait=False)
    eventually(lambda: len(processes(ENGINE)) > 1, 30, "others that start")
    cluster.deploy(service(1))
    settled(cluster, 1)
    load.stop()
    assert processes("nanoengine.process") == [engine]
    found = load.take()
    assert set(found) == {"whole"}, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_is_lost(cluster: Cluster) -> None:
    cluster.deploy(service(3))
    settled(cluster, 3)
    rng = random.Random(0)

    def scale_down(number: int) -> None:
        cluster.deploy(service(2))
        settled(cluster, 2)
        cluster.deploy(service(3))
        settled(cluster, 3)

    def update(number: int) -> None:
        """Of the engines alone, or of the ingresses too."""
        before = {process.pid for process in processes("nanoengine.process")}
        changes: dict[str, Any] = {"args__engine_stall_s": 50 + number}
        cluster.deploy(service(3, **changes), timeout=180)
        eventually(lambda: before.isdisjoint(p.pid for p in processes("nanoengine.process")), 180, "new engines")
        settled(cluster, 3)

    def kill(title: str) -> Callable[[int], None]:
        def one(number: int) -> None:
            victim: psutil.Process = rng.choice(processes(title))
            victim.kill()
            eventually(lambda: not victim.is_running(), 10, "its end")
            time.sleep(6)
            eventually(cluster.healthy, 60, "health")
            eventually(lambda: len(processes(INGRESS)) == 2, 60, "two ingresses")
            settled(cluster, 3)

        return one

    def kill_replica(number: int) -> None:
        kill(ENGINE if number % 2 == 0 else "nanoengine.process")(number)

    events: dict[str, Callable[[int], None]] = {
        "scale-down": scale_down,
        "update": update,
        "kill replica": kill_replica,
        "kill controller": kill("ray::ServeController"),
        "kill ingress": kill(INGRESS),
    }
    table: dict[str, Counter[str]] = {}
    for name, event in events.items():
        load = StreamLoad(cluster.url, 16, 400)
        time.sleep(4)
        for number in range(ROUNDS[name]):
            event(number)
        load.stop()
        idle(cluster)
        table[name] = load.take()
        print(f"{name} x {ROUNDS[name]}: {dict(table[name])}")
    for name, found in table.items():
        assert found["wrong"] == 0, (name, found)
        if name != "kill ingress":
            assert set(found) == {"whole"}, (name, found)
    assert table["kill ingress"]["cut"] <= 2 * 16
