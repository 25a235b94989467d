"""What goes wrong around the router, on a real Ray Serve: two ingresses, three engines, answers known in advance.

The promises: no request hangs, no token is wrong, none is lost before its first token; and a stream that has begun goes
on, unless it was the ingress that ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from deployments.routing.core import EXPECT_S
from nanoengine.runner.synthetic import SyntheticRunner, content
from tests.serve.cluster import NAME, Cluster, config, eventually
from tests.serve.faulty import set_faults

MAX_WAIT_S = 6
RATE = 8000  # prompt tokens a second of one engine
PROMPT = 640  # ten of the router's blocks


class Service:
    """The application with the router of ``tests.serve.faulty``, on a cluster of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self._faults = cluster, folder / "faults.json"
        self.set_faults()

    def set_faults(self, **faults: Any) -> None:
        set_faults(self._faults, **faults)

    def deploy(
        self, replicas: int, max_ongoing_requests: int = 1024, prefill_tokens_per_second: int = RATE, **router: Any
    ) -> None:
        """With so many engines, which have so many calls at most; ``router``: its settings."""
        data = config(
            Ingress__num_replicas=2,
            Ingress__graceful_shutdown_timeout_s=5,
            EngineReplica__num_replicas=replicas,
            EngineReplica__max_ongoing_requests=max_ongoing_requests,
            EngineReplica__ray_actor_options={"num_cpus": 0.6},
            EngineReplica__request_router_config={
                "request_router_class": "tests.serve.faulty:UnreliableRouter",
                "request_router_kwargs": {"faults": str(self._faults), "max_wait_s": MAX_WAIT_S, **router},
            },
            args__engine__synthetic={
                "step_seconds": 0.005,
                "prefill_tokens_per_second": prefill_tokens_per_second,
                "max_model_len": 8192,
            },
            args__engine__num_blocks=8192,
            args__engine__max_num_batched_tokens=1024,
        )
        engine = next(one for one in data["applications"][0]["deployments"] if one["name"] == "EngineReplica")
        del engine["autoscaling_config"]
        self.cluster.deploy(data, timeout=150)
        self.ready(replicas)

    def ready(self, replicas: int = 3) -> None:
        """Wait until so many engines are up, both ingresses too, and all is quiet."""
        eventually(lambda: self.cluster.replicas() == replicas, 120, f"{replicas} replicas")
        eventually(lambda: self.cluster.replicas("Ingress") == 2 and self.cluster.healthy(), 120, "two ingresses")

    def rejected(self) -> int:
        """Calls that a replica of Serve's would not have."""
        return self._logged("EngineReplica", "rejecting request")

    def unreached(self) -> int:
        """Calls that did not reach a replica."""
        return self._logged("Ingress", "is temporarily unavailable")

    def _logged(self, deployment: str, words: str) -> int:
        logs = Path(self.cluster.folder).glob(f"session_2*/logs/serve/replica_llm_{deployment}_*.log")
        return sum(log.read_text().count(words) for log in logs)

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of this cluster, and of no other on this machine, with ``title`` in their command lines."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if any(title in word for word in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    cluster = Cluster()
    try:
        service = Service(cluster, tmp_path_factory.mktemp("faults"))
        service.deploy(3)
        yield service
    finally:
        cluster.stop()


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    running.ready()
    yield running
    running.set_faults()


# -- requests whose answers are known ----------------------------------------------------------------------------------


def answer(prompt: list[int], count: int) -> str:
    """What the synthetic model says to a prompt: each token follows from the content of all before it."""
    digest = content(np.array(prompt), np.arange(len(prompt))).sum(keepdims=True)
    text = ""
    for position in range(len(prompt), len(prompt) + count):
        token = SyntheticRunner.token(None, digest)  # type: ignore[arg-type]  # it looks at nothing of its own
        text += chr(token[0])
        digest += content(token, np.array([position]))
    return text


@dataclass
class Ending:
    """How a request ended. ``kind``: "right"; "refused" before its first token, with a time to come back; "broken", by
    an error event after it; "gone", with the ingress that had it; and what must not be: "wrong", "cut"."""

    kind: str
    cached: int = 0
    first_token_s: float = 0.0
    retry_after_s: float = 0.0
    detail: str = ""


async def ask(client: httpx.AsyncClient, prompt: list[int], count: int = 4, **more: Any) -> Ending:
    """One streamed request, which has half a minute: a hang is an error."""
    start = time.monotonic()
    body = {"model": NAME, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    ending, text = Ending("cut"), ""
    async with asyncio.timeout(30), client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            ending.detail = (await response.aread()).decode()
            # In the words of Serve's proxy, which says so where an ingress has ended before it began with its answer.
            if response.status_code == 500 and ending.detail == "Internal Server Error":
                return Ending("gone")
            ending.retry_after_s = float(response.headers.get("retry-after", 0))
            ending.kind = "refused" if response.status_code in (429, 503) and ending.retry_after_s >= 1 else "wrong"
            return ending
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                right = text == answer(prompt, count)
                ending.kind, ending.detail = ("right", "") if right else ("wrong", text)
            elif data:
                event = msgspec.json.decode(data)
                if "error" in event:
                    ending.kind, ending.detail = "broken", data
                    continue
                ending.first_token_s = ending.first_token_s or time.monotonic() - start
                text += "".join(choice["text"] for choice in event["choices"])
                if event.get("usage"):
                    ending.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return ending


@asynccontextmanager
async def clients(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.cluster.url, timeout=30, limits=limits) as client:
        yield client


def prompts(count: int, seed: int, tokens: int = PROMPT) -> list[list[int]]:
    """So many that share nothing, of ids that are characters."""
    return np.random.default_rng(seed).integers(32, 127, (count, tokens)).tolist()


async def ask_all(service: Service, asked: list[list[int]], count: int = 4, users: int = 8) -> list[Ending]:
    """Some at a time; the endings in order."""
    turn = asyncio.Semaphore(users)
    async with clients(service) as client:

        async def one(prompt: list[int]) -> Ending:
            async with turn:
                return await ask(client, prompt, count)

        return await asyncio.gather(*(one(prompt) for prompt in asked))


def kinds(endings: list[Ending]) -> Counter[str]:
    found = Counter(ending.kind for ending in endings)
    assert not found["wrong"] + found["cut"], [one for one in endings if one.kind in ("wrong", "cut")][:3]
    return found


async def known(service: Service, asked: list[list[int]]) -> int:
    """How many of these both ingresses send to where they are cached: each is asked again, by either of them."""
    again = [[*prompt, 65] for prompt in asked for _ in range(2)]
    endings = await ask_all(service, again, users=4)
    assert kinds(endings) == {"right": len(again)}
    return sum(min(a.cached, b.cached) >= PROMPT - 16 for a, b in zip(endings[::2], endings[1::2], strict=True))


async def until_known(service: Service, asked: list[list[int]]) -> None:
    """Both ingresses must find out where these are, within some seconds."""
    deadline = time.monotonic() + 15
    while (found := await known(service, asked)) < len(asked):
        assert time.monotonic() < deadline, f"of {len(asked)} prompts {found} are known"
        await asyncio.sleep(0.5)


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_odd_prompts(service: Service) -> None:
    """Empty, of ids, of one token, eight answers at once: all as they should be, whatever is routed beside them."""
    (prompt,) = prompts(1, seed=1)
    async with clients(service) as client:

        async def post(**body: Any) -> httpx.Response:
            body = {"model": NAME, "max_tokens": 8, "ignore_eos": True, "seed": 1, "temperature": 1, **body}
            return await client.post("/v1/completions", json=body)

        empty, one, texts, eight, alone = await asyncio.gather(
            post(prompt=""), post(prompt=[65]), post(prompt=["A", [66]]), post(prompt=prompt, n=8), post(prompt=[])
        )
    assert [empty.status_code, alone.status_code] == [400, 400]
    assert one.json()["choices"][0]["text"] == answer([65], 8)
    assert [choice["text"] for choice in texts.json()["choices"]] == [answer([65], 8), answer([66], 8)]
    assert [choice["text"] for choice in eight.json()["choices"]] == [answer(prompt, 8)] * 8


async def test_a_salt_shares_with_its_like_alone(service: Service) -> None:
    (prompt,) = prompts(1, seed=60)
    await until_known(service, [prompt])
    async with clients(service) as client:
        assert (await ask(client, prompt, cache_salt="s")).cached == 0
        await asyncio.sleep(0.5)
        again = [await ask(client, [*prompt, 65], cache_salt="s") for _ in range(4)]
    assert min(ending.cached for ending in again) == PROMPT


@pytest.mark.parametrize("lost", [0.01, 1.0])
async def test_prefix_events_that_are_lost(service: Service, lost: float) -> None:
    service.set_faults(lost=lost)
    asked = prompts(24, seed=int(2 + lost))
    assert kinds(await ask_all(service, asked)) == {"right": 24}
    assert kinds(await ask_all(service, asked)) == {"right": 24}
    if lost == 1:
        await asyncio.sleep(EXPECT_S + 0.5)
        assert await known(service, asked) < 24, "the fault is none"
    service.set_faults()
    await until_known(service, asked)


async def test_a_gap_in_the_events(service: Service) -> None:
    await until_known(service, prompts(3, seed=4))
    service.set_faults(gap=1)
    asked = prompts(12, seed=5)
    assert kinds(await ask_all(service, asked)) == {"right": 12}
    await until_known(service, asked)


async def test_an_index_of_wrong_entries(service: Service) -> None:
    """What one replica holds is taken for what another does: answers are right, and no replica is flooded."""
    service.set_faults(swapped=True)
    asked = prompts(24, seed=6)
    for _ in range(3):
        endings = await ask_all(service, asked)
        assert kinds(endings) == {"right": 24}
        assert max(ending.first_token_s for ending in endings) < MAX_WAIT_S
    await asyncio.sleep(EXPECT_S + 0.5)
    assert await known(service, asked) < 24, "the fault is none"
    service.set_faults()
    await until_known(service, asked[:8])


async def test_more_than_the_engines_can_do_in_time(service: Service) -> None:
    """What would wait for too long is refused at once, with the time to come back; what is taken is in time."""
    await ask_all(service, prompts(6, seed=7))  # by which each engine knows how fast it is
    asked = prompts(60, seed=8, tokens=8000)
    start = time.monotonic()
    async with clients(service) as client:
        waiting = [asyncio.create_task(ask(client, prompt)) for prompt in asked]
        done, taken = await asyncio.wait(waiting, timeout=4)
        refused = [one.result() for one in done if one.result().kind == "refused"]
        assert kinds([one.result() for one in done])["broken"] == 0
        # Three engines do 8,000 tokens a second each: in time are some 20 prompts, and those under way.
        assert 20 <= len(refused) <= 45
        assert all("too many requests" in one.detail for one in refused)
        assert all(1 <= one.retry_after_s < 20 for one in refused)
        for one in taken:
            one.cancel()
        await asyncio.gather(*taken, return_exceptions=True)
    assert time.monotonic() - start < 15
    await asyncio.sleep(1)  # the least that they were told
    endings = await ask_all(service, prompts(6, seed=9))
    assert kinds(endings) == {"right": 6}, "and who comes back is served"


async def test_replicas_reject_calls_whose_requests_they_have(service: Service) -> None:
    """Two ingresses do not know of each other's calls, so each sends more than there is room for; and a request is at
    its engine before Serve's call is rejected, and may have got tokens there."""
    await asyncio.to_thread(service.deploy, 3, max_ongoing_requests=2)
    before = service.rejected()
    endings = await ask_all(service, prompts(36, seed=80, tokens=64), count=60, users=18)
    assert kinds(endings) == {"right": 36}
    assert service.rejected() > before, "the fault is none"
    await asyncio.to_thread(service.deploy, 3)


async def test_replicas_that_grpc_does_not_reach(service: Service) -> None:
    """Their calls are made again as actor calls: a few at first, and then none is made in vain."""
    before = service.unreached()
    service.set_faults(unreached=True)
    endings = await ask_all(service, prompts(48, seed=81, tokens=64), count=60)
    assert kinds(endings) == {"right": 48}
    assert 0 < service.unreached() - before < 48, "the fault is none, or is met again and again"
    service.set_faults()


async def streams(service: Service, stop: asyncio.Event, seed: int) -> list[Ending]:
    """Load until told to stop: eight users, streams of a second or so, half of them of a few shared prefixes."""
    rng = np.random.default_rng(seed)
    shared = prompts(4, seed)
    endings: list[Ending] = []
    async with clients(service) as client:

        async def user(number: int) -> None:
            while not stop.is_set():
                own: list[int] = rng.integers(32, 127, 64).tolist()
                try:
                    endings.append(await ask(client, [*shared[number % 4], *own] if number % 2 else own, 100))
                except httpx.TransportError:  # the proxy's end of a connection, if an answer had begun
                    endings.append(Ending("gone"))

        await asyncio.gather(*(user(number) for number in range(8)))
    return endings


@asynccontextmanager
async def under_load(service: Service, seed: int) -> AsyncIterator[list[Ending]]:
    """A second of load, the block's body, another second; then the list is filled with all endings."""
    stop, endings = asyncio.Event(), list[Ending]()
    load = asyncio.create_task(streams(service, stop, seed))
    try:
        await asyncio.sleep(1)
        yield endings
        await asyncio.sleep(1)
    finally:
        stop.set()
        endings += await load


@pytest.mark.soak
async def test_engine_added_and_drained_at_peak(service: Service) -> None:
    """Nothing is lost, not even a stream that has begun: what drains ends its streams first."""
    async with under_load(service, seed=10) as endings:
        for replicas in (4, 3):
            await asyncio.to_thread(service.deploy, replicas)
    assert kinds(endings) == {"right": len(endings)}, [one for one in endings if one.kind != "right"]


async def test_replica_killed_in_the_middle(service: Service) -> None:
    """While it prefills, or while it streams: nothing is lost, and no token is wrong where the streams go on."""
    asked = prompts(6, seed=20, tokens=6000)
    engine = service.processes("nanoengine.process")[0]
    prefills = asyncio.create_task(ask_all(service, asked))
    await asyncio.sleep(0.5)
    engine.parent().kill()
    assert kinds(await prefills) == {"right": 6}
    await asyncio.to_thread(service.ready)
    async with under_load(service, seed=21) as endings:
        replica = service.processes("nanoengine.process")[-1].parent()
        replica.kill()
        replica.wait(10)
    assert kinds(endings) == {"right": len(endings)}, [one for one in endings if one.kind != "right"]


async def test_ingress_killed(service: Service) -> None:
    """What it had is lost with it, and the next one learns what the engines hold."""
    asked = prompts(8, seed=22)
    await ask_all(service, asked)
    async with under_load(service, seed=23) as endings:
        ingress = service.processes("ServeReplica:llm:Ingress")[0]
        ingress.kill()
        ingress.wait(10)
    lost = len(endings) - Counter(ending.kind for ending in endings)["right"]
    assert lost <= 8, endings
    await asyncio.to_thread(service.ready)
    await until_known(service, asked)


# -- for longer --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_faults_one_after_the_other_under_load(service: Service) -> None:
    """Three minutes of streams, and every fault among them, in any order."""
    rng, until = random.Random(0), time.monotonic() + 180
    happened: Counter[str] = Counter()
    async with under_load(service, seed=30) as endings:
        while time.monotonic() < until:
            fault = rng.choice(["lost", "all lost", "gap", "swapped", "none", "replica", "ingress", "scale"])
            happened[fault] += 1
            match fault:
                case "lost" | "all lost":
                    service.set_faults(lost=0.01 if fault == "lost" else 1.0)
                case "gap" | "swapped":
                    service.set_faults(**{fault: happened[fault]})
                case "none":
                    service.set_faults()
                case "replica" | "ingress":
                    title = "nanoengine.process" if fault == "replica" else "ServeReplica:llm:Ingress"
                    process = rng.choice(service.processes(title))
                    (process.parent() if fault == "replica" else process).kill()
                    await asyncio.sleep(2)  # else all may be dead at once, and there is nobody to go to
                    await asyncio.to_thread(service.ready)
                case "scale":
                    await asyncio.to_thread(service.deploy, 4)
                    await asyncio.to_thread(service.deploy, 3)
            await asyncio.sleep(rng.uniform(1, 4))
    found = kinds(endings)
    print(happened, found)
    assert found["right"] > 200
    assert len(endings) - found["right"] <= 8 * happened["ingress"], "with a replica nothing is lost"


@pytest.mark.soak
@pytest.mark.timeout(2400)
async def test_memory_of_the_ingresses_over_100_000_unique_prompts(service: Service) -> None:
    """What they have allocated stays as it is; what they hold of the system's memory grows until the allocator has the
    holes that it needs, and hardly from 30,000 on."""

    def megabytes() -> float:
        return sum(one.memory_info().rss for one in service.processes("ServeReplica:llm:Ingress")) / 1e6

    await asyncio.to_thread(service.deploy, 3, prefill_tokens_per_second=1_000_000)
    sizes = []
    for seed in range(50):
        assert kinds(await ask_all(service, prompts(2000, seed=40 + seed), count=1, users=16)) == {"right": 2000}
        sizes.append(megabytes())
    print([round(size) for size in sizes])
    assert sizes[-1] < sizes[14] + 16, "two processes, and 70,000 prompts that nobody asks for again: 0.1 KB of each"
    await asyncio.to_thread(service.deploy, 3)


@pytest.mark.soak
async def test_a_session_stays_where_it_is(service: Service) -> None:
    """By ``session``, which looks at no prefix: whichever ingress gets a session's prompt again, it is cached."""
    await asyncio.to_thread(service.deploy, 3, policy="session")
    again = [prompt for prompt in prompts(12, seed=50) for _ in range(3)]
    async with clients(service) as client:
        for named in (True, False):
            found = []
            for number, prompt in enumerate(again):
                client.headers["x-session-id"] = str(number // 3) if named else ""
                ending = await ask(client, [*prompt, 65 + named], 1)
                assert ending.kind == "right"
                found.append(ending.cached > 0)
            later = [one for number, one in enumerate(found) if number % 3]
            assert all(later) if named else not all(later)
    await asyncio.to_thread(service.deploy, 3)
