"""Contract with Ray's private request router, which pyproject.toml pins for: run this first after raising the pin."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.messages import ClaimCheck, GenerateCall, Misplaced
from deployments.routing import registry
from deployments.routing.load import LoadReport
from deployments.routing.policies import POLICIES
from deployments.routing.router import EngineRouter
from deployments.routing.transport import PAUSE_S, Transport
from nanoengine.cache.events import PrefixEvents
from nanoengine.cache.prefix_hash import prefix_hashes, prefix_root
from nanoengine.sampling.params import SamplingParams

DEPLOYMENT = DeploymentID(name="EngineReplica", app_name="llm")


def replica(name: str, limit: int = 100, **stats: Any) -> Any:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        max_ongoing_requests=limit,
        routing_stats=stats,
        replica_metadata={"routing": {"model": "m", "block_size": 16, "caches": True}},
        get_queue_len=get_queue_len,
    )


def pending(call: Any = None, request_id: str = "r") -> PendingRequest:
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id)
    return PendingRequest(args=[call] if call is not None else [], kwargs={}, metadata=metadata)


def call(number: int = 0, tokens: int = 10, avoid: tuple[str, ...] = ()) -> GenerateCall:
    prompt = np.zeros(tokens, np.int32)
    return GenerateCall(ingress="me", number=number, prompt=prompt, params=SamplingParams(), model="m", avoid=avoid)


async def choose(router: EngineRouter, request: PendingRequest) -> str:
    return str((await asyncio.wait_for(router._choose_replica_for_request(request), 5)).replica_id.unique_id)


@pytest.fixture
async def router() -> AsyncIterator[EngineRouter]:
    router = EngineRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state(policy="least_work")
    router.update_replicas([replica("a"), replica("b")])
    registry.CARRIERS.clear()
    yield router
    await asyncio.sleep(0.01)  # its own probes


def test_base_class_still_has_what_we_override_and_use() -> None:
    choose = inspect.signature(RequestRouter._choose_replica_for_request)
    assert list(choose.parameters) == ["self", "pending_request", "is_retry"]
    completed = inspect.signature(RequestRouter.on_request_completed)
    assert list(completed.parameters) == ["self", "replica_id", "internal_request_id"]
    for name in ("on_replica_actor_died", "on_replica_actor_unavailable"):
        assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == ["self", "replica_id"]
    for name in ("update_replicas", "initialize_state", "choose_replicas", "_probe_queue_lens"):
        assert hasattr(RequestRouter, name)


@pytest.mark.parametrize("by_reference", [True, False])
async def test_serve_still_looks_at_the_request_for_the_way_of_its_call(by_reference: bool) -> None:
    wrappers: Any = SimpleNamespace(_actor_replica_wrapper=True, _grpc_replica_wrapper=False)
    request = pending()
    assert {"_by_reference", "_on_separate_loop"} <= vars(request.metadata).keys()
    request.metadata._by_reference = by_reference
    assert RunningReplica._get_replica_wrapper(wrappers, request) is by_reference


async def test_is_found_by_the_ingress(router: EngineRouter) -> None:
    assert registry.ROUTERS["llm", "EngineReplica"] is router
    assert router.live_replicas == 2
    router.update_replicas([replica("a", dead=True, number=1), replica("b")])
    assert router.live_replicas == 1


async def test_burst_is_spread_by_reservations(router: EngineRouter) -> None:
    counts = Counter([await choose(router, pending(call(number), f"r{number}")) for number in range(20)])
    assert counts == {"a": 10, "b": 10}


async def test_fan_out_under_one_request_id(router: EngineRouter) -> None:
    chosen = await asyncio.gather(*(choose(router, pending(call(number), "same")) for number in range(64)))
    assert Counter(chosen) == {"a": 32, "b": 32}
    for name in chosen:
        router.on_request_completed(ReplicaID(name, DEPLOYMENT), "same")
    assert router._core.fleet.reserved == 0


@pytest.mark.parametrize(
    "argument", [None, "text", {"prompt": "x"}, call(tokens=0), 7], ids=["none", "text", "dict", "empty", "number"]
)
async def test_strange_arguments_are_routed(router: EngineRouter, argument: Any) -> None:
    assert await choose(router, pending(argument)) in ("a", "b")


async def test_failing_policy_costs_the_hint_not_the_request(router: EngineRouter) -> None:
    def fail(*args: Any) -> str:
        raise RuntimeError("broken")

    router._core._policy = SimpleNamespace(choose=fail, uses_prefixes=True)
    assert {await choose(router, pending(call(n), f"r{n}")) for n in range(4)} == {"a", "b"}
    router._core._policy = SimpleNamespace(choose=lambda candidates: 99, uses_prefixes=False)
    assert await choose(router, pending(call(9))) in ("a", "b")


async def test_dead_and_failed_replicas_are_avoided_while_there_is_another(router: EngineRouter) -> None:
    assert {await choose(router, pending(call(n, avoid=("a",)), f"r{n}")) for n in range(9)} == {"b"}
    router.update_replicas([replica("a", dead=True, number=1), replica("b")])
    assert {await choose(router, pending(call(n), f"s{n}")) for n in range(9)} == {"b"}
    assert await choose(router, pending(call(avoid=("b",)))) == "b", "a hint must not hang a request"
    router.update_replicas([replica("a", dead=True, number=1), replica("b", dead=True, number=1)])
    assert await choose(router, pending(call())) in ("a", "b")


async def test_waits_for_a_replica(router: EngineRouter) -> None:
    router.update_replicas([])
    choosing = asyncio.create_task(choose(router, pending(call())))
    await asyncio.sleep(0.05)
    assert not choosing.done()
    router.update_replicas([replica("c")])
    assert await choosing == "c"


async def test_full_replicas_are_waited_for_and_a_completion_wakes_at_once(router: EngineRouter) -> None:
    router.update_replicas([replica("a", limit=1)])
    id = ReplicaID("a", DEPLOYMENT)
    assert await choose(router, pending(call(0), "r0")) == "a"
    router.on_send_request(id)
    order: list[int] = []

    async def wait(number: int) -> None:
        await choose(router, pending(call(number), f"r{number}"))
        router.on_send_request(id)
        order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in (1, 2)]
    await asyncio.sleep(0.05)
    assert order == []
    loop = asyncio.get_running_loop()
    for number in (0, 1):
        start = loop.time()
        router.decrement_queue_len_cache(id)
        router.on_request_completed(id, f"r{number}")
        await asyncio.sleep(0.02)
        assert order == list(range(1, number + 2)), "first come, first served"
        assert loop.time() - start < 0.2
    await asyncio.gather(*waiting)
    assert not router._waiting


async def late(router: EngineRouter, request: PendingRequest) -> float:
    with pytest.raises(BackPressureError) as raised:
        await choose(router, request)
    assert raised.value.status_code == 429
    assert "in time" in str(raised.value)
    assert raised.value.retry_after_s is not None
    return raised.value.retry_after_s


async def test_a_call_is_refused_when_every_replica_is_late(router: EngineRouter) -> None:
    router.initialize_state(max_wait_s=2)
    router.update_replicas([replica("a"), replica("b")])
    busy = LoadReport(number=1, active=9, backlog_tokens=50_000, prefill_rate=10_000)
    router.observe("a", busy, [])
    assert await choose(router, pending(call(0, tokens=5000))) == "b", "one is not"
    router.observe("b", LoadReport(number=1, active=9, place_s=2.5), [])
    assert await late(router, pending(call(1))) == pytest.approx(0.5 + 2.5 - 2, abs=0.1), "that prompt, and a place"
    assert await choose(router, pending(call(2, avoid=("a",)))) == "b", "it was taken once, and lost its replica"
    assert await choose(router, pending()) in ("a", "b"), "not a request for tokens"
    assert router._core.fleet.reserved == 3
    router.observe("b", LoadReport(number=2, active=9), [])
    assert await choose(router, pending(call(3))) == "b"
    router.initialize_state()
    router.update_replicas([replica("a", active=9, backlog_tokens=10**9)])
    assert await choose(router, pending(call(4))) == "a", "no bound, no refusal"


@pytest.mark.parametrize("full", [True, False])
async def test_no_call_is_held_longer_than_it_may_wait(router: EngineRouter, full: bool) -> None:
    router.initialize_state(max_wait_s=0.3)
    router.update_replicas([replica("a", limit=0)] if full else [])
    if full:
        router.on_new_queue_len_info(ReplicaID("a", DEPLOYMENT), 1)
    start = time.monotonic()
    assert await late(router, pending(call())) >= 0
    assert 0.3 < time.monotonic() - start < 1
    assert not router._waiting
    assert router._core.fleet.reserved == 0


async def test_cancelled_waiter_leaves_nothing(router: EngineRouter) -> None:
    router.update_replicas([replica("a", limit=0)])
    router.on_new_queue_len_info(ReplicaID("a", DEPLOYMENT), 5)
    waiting = asyncio.create_task(choose(router, pending(call())))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not router._waiting
    assert router._core.fleet.reserved == 0


async def test_replica_that_died_is_not_chosen_again(router: EngineRouter) -> None:
    router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    assert {await choose(router, pending(call(n), f"r{n}")) for n in range(9)} == {"b"}


async def test_full_replica_is_passed_over(router: EngineRouter) -> None:
    router.update_replicas([replica("a", limit=3), replica("b", number=1, active=50)])
    router.on_new_queue_len_info(ReplicaID("a", DEPLOYMENT), 3)
    assert await choose(router, pending(call())) == "b", "the least loaded is full"


async def test_decision_is_fast(router: EngineRouter) -> None:
    rng = random.Random(0)
    router.initialize_state(policy="prefix")
    replicas = [
        replica(f"r{i}", number=1, active=rng.randrange(50), backlog_tokens=rng.randrange(9000)) for i in range(256)
    ]
    router.update_replicas(replicas)
    times = []
    for number in range(300):
        request = pending(call(number, tokens=4096), f"r{number}")
        start = time.thread_time()  # others' work on the machine is not ours
        await router._choose_replica_for_request(request)
        times.append(time.thread_time() - start)
    assert sorted(times)[150] < 0.002, f"median {sorted(times)[150] * 1e6:.0f} us of 256 replicas"
    print(f"decision among 256 replicas: median {sorted(times)[150] * 1e6:.0f} us")


async def test_choose_replicas_ranks_all(router: EngineRouter) -> None:
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), pending(call()))
    assert sorted(r.replica_id.unique_id for (r,) in ranks) == ["a", "b"]


async def test_call_is_told_what_its_replica_should_have(router: EngineRouter) -> None:
    router.initialize_state(policy="prefix")
    router.update_replicas([replica("a"), replica("b")])
    prompt = np.arange(640, dtype=np.int32)
    hashes = prefix_hashes(prefix_root("m"), prompt)
    router.observe("b", LoadReport(number=1), [PrefixEvents(1, True, hashes.tobytes(), b"")])
    request = pending(GenerateCall(ingress="me", number=0, prompt=prompt, params=SamplingParams(), model="m"))
    assert await choose(router, request) == "b"
    assert request.args[0].expected_cached == 624


class Carrier:
    """Stand-in for an ingress's channels."""

    def __init__(self, *connected: str) -> None:
        self.connected = connected
        self.carried: list[tuple[str, GenerateCall]] = []
        registry.CARRIERS["llm", "EngineReplica"] = self

    def carry(self, replica: str, call: GenerateCall) -> bool:
        if replica in self.connected:
            self.carried.append((replica, call))
        return replica in self.connected


async def test_a_request_goes_ahead_where_there_is_a_channel(router: EngineRouter) -> None:
    carrier = Carrier("a")
    requests = [pending(call(number), f"r{number}") for number in range(4)]
    chosen = [await choose(router, request) for request in requests]
    for name, request in zip(chosen, requests, strict=True):
        assert isinstance(request.args[0], ClaimCheck if name == "a" else GenerateCall)
        assert request.args[0].key == f"me-{requests.index(request)}"
    assert [(name, sent.expected_cached) for name, sent in carrier.carried] == [("a", 0)] * 2
    assert {router.placed[sent.number] for _, sent in carrier.carried} == {"a"}


async def test_a_call_whose_request_went_ahead_is_not_placed_twice(router: EngineRouter) -> None:
    """Two replicas would answer it."""
    carrier = Carrier("a", "b")
    request = pending(call())
    await choose(router, request)
    with pytest.raises(Misplaced):
        await choose(router, request)
    assert len(carrier.carried) == 1


async def by_grpc(router: EngineRouter, number: int, on_separate_loop: bool = False) -> dict[str, bool]:
    """Whether a call goes that way, by where it goes."""
    request = pending(call(number), f"r{number}")
    request.metadata._on_separate_loop = on_separate_loop
    return {await choose(router, request): not request.metadata._by_reference}


async def test_a_number_alone_goes_by_grpc(router: EngineRouter) -> None:
    """And a prompt, which may be longer than a message of gRPC, does not."""
    carrier = Carrier("a")
    ways = await by_grpc(router, 0) | await by_grpc(router, 1)
    assert ways == {"a": True, "b": False}
    carrier.connected = ("a", "b")
    assert await by_grpc(router, 2, on_separate_loop=True) | await by_grpc(router, 3, on_separate_loop=True) == {
        "a": False,
        "b": False,
    }


async def test_a_replica_that_grpc_did_not_reach_gets_actor_calls_for_a_while(router: EngineRouter) -> None:
    """They find out whether it is dead, upon which Serve says so."""
    carrier, now = Carrier("a", "b"), 0.0
    router._transport = Transport(lambda: now)

    async def reached() -> dict[str, bool]:
        carrier.carried.clear()
        ways = await by_grpc(router, 0) | await by_grpc(router, 1)
        assert len(carrier.carried) == 2, "the request itself goes by the channel all the while"
        return ways

    def miss() -> None:
        for _ in range(3):  # calls were on their way
            router.on_replica_actor_unavailable(ReplicaID("a", DEPLOYMENT))

    for seconds in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S):
        miss()
        router.update_replicas([replica("a"), replica("b")])  # which is no news of it
        now += seconds - 1
        assert await reached() == {"a": False, "b": True}
        now += 2
        assert await reached() == {"a": True, "b": True}
    now += 4 * PAUSE_S  # in which it was reached
    miss()
    now += PAUSE_S
    assert await reached() == {"a": True, "b": True}
    router.update_replicas([replica("b")])
    assert not router._transport._pauses


async def test_a_request_is_placed_without_serve_and_its_call_follows(router: EngineRouter) -> None:
    carrier = Carrier("a", "b")
    calls = [call(number) for number in range(3)]
    assert all(router.place(one, "") for one in calls)
    assert [sent.number for _, sent in carrier.carried] == [0, 1, 2]
    assert router._core.fleet.reserved == 3
    for one in calls[:2]:  # of one fan-out: they have one id
        assert await choose(router, pending(ClaimCheck(one.key), "r")) == router.placed[one.number]
    with pytest.raises(Misplaced):  # Serve wants another replica for it
        await choose(router, pending(ClaimCheck(calls[0].key), "r"))
    with pytest.raises(Misplaced):
        await choose(router, pending(ClaimCheck("unknown"), "r"))
    assert len(carrier.carried) == 3
    router.ended(calls[2], router.placed[2])  # its client has left
    assert router._core.fleet.reserved == 2
    gone = call(7)
    assert router.place(gone, "")
    rest = [one for one in (replica("a"), replica("b")) if one.replica_id.unique_id != router.placed[7]]
    router.update_replicas(rest)
    with pytest.raises(Misplaced):
        await choose(router, pending(ClaimCheck(gone.key), "r7"))
    router.ended(gone, router.placed[7])
    router.update_replicas([replica("a"), replica("b")])
    for one in calls[:2]:
        router.on_request_completed(ReplicaID(router.placed[one.number], DEPLOYMENT), "r")
        router.ended(one, router.placed[one.number])
    assert router._core.fleet.reserved == 0
    assert not router._ahead
    assert not router._unsent


async def test_a_request_is_left_to_serve_where_it_cannot_be_placed(router: EngineRouter) -> None:
    assert not router.place(call(0), ""), "there is no channel at all"
    carrier = Carrier("a")
    router.update_replicas([replica("b")])
    assert not router.place(call(1), ""), "there is none to this replica"
    router.update_replicas([replica("a", limit=2)])
    router._replica_queue_len_cache.update(ReplicaID("a", DEPLOYMENT), 0)
    assert [router.place(call(number), "") for number in (2, 3, 4)] == ["a", "a", None], "it has two places"
    router.ended(call(2), "a")
    assert router.place(call(5), "")
    assert len(carrier.carried) == 3
    assert not await asyncio.to_thread(lambda: asyncio.run(_placed(router))), "the router has a loop of its own"
    router.initialize_state(policy="least_work", max_wait_s=1e-9)
    router.update_replicas([replica("a", number=9, active=500, backlog_tokens=10**9)])
    with pytest.raises(BackPressureError):
        router.place(call(6), "")
    assert len(carrier.carried) == 3


async def _placed(router: EngineRouter) -> str | None:
    return router.place(call(9), "")


async def test_a_wait_that_ends_as_it_is_woken_is_no_error(
    router: EngineRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.routing.router.FULL_WAIT_S", 0)
    waits = [asyncio.create_task(router._wait_for_room()) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
        router._wake_next()  # it passes over those that are over, and takes them off
    await asyncio.gather(*waits)
    assert not router._waiting


async def test_news_are_read_also_when_nothing_is_routed(router: EngineRouter) -> None:
    for number in range(50):
        router.observe("a", LoadReport(number=number, active=7), [])
    await asyncio.sleep(0.01)
    assert not router._news
    assert router._core.fleet.figures.active[0] == 7


async def test_a_gap_is_told_to_the_ingress_once(router: EngineRouter) -> None:
    router.observe("a", None, [PrefixEvents(1, True, b"", b"")])
    router.observe("b", None, [PrefixEvents(1, True, b"", b"")])
    await asyncio.sleep(0.12)
    router.update_replicas([replica("a"), replica("b")])
    router.wants()
    router.observe("a", None, [PrefixEvents(5, False, b"", b"")])
    await asyncio.sleep(1.1)
    router.update_replicas([replica("a"), replica("b")])
    assert router.wants() == {"a"}
    assert router.wants() == set()


async def test_replica_of_another_version_is_served_by_load(router: EngineRouter) -> None:
    router.initialize_state(policy="prefix")
    other = replica("a", active="?")
    other.replica_metadata = {"channel": None}
    router.update_replicas([other, replica("b", number=1, active=50, backlog_tokens=50_000)])
    assert await choose(router, pending(call(0, tokens=300))) == "a"


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_of_the_configuration_routes(router: EngineRouter, policy: str) -> None:
    router.initialize_state(policy=policy)
    router.update_replicas([replica("a"), replica("b")])
    names = {await choose(router, pending(call(n, tokens=n * 50), f"r{n}")) for n in range(20)}
    assert names == {"a", "b"}
