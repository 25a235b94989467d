"""EngineRouter: Serve's hook through which a handle asks which replica a call goes to. What it decides by is in
``RoutingCore``; here is what Serve needs around it.

Serve's documented hook, ``choose_replicas``, hangs a request for ever when it raises, and hangs all but one of several
calls made under one parent request. So this overrides ``_choose_replica_for_request``, as Ray's own CapacityQueueRouter
does: private API, which is why pyproject.toml pins Ray's minor version and tests/serve keeps a contract test.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.messages import ClaimCheck, GenerateCall, Misplaced
from deployments.routing import registry
from deployments.routing.core import Choice, Question, RouteRequest, RoutingCore
from deployments.routing.load import LoadReport, ReplicaInfo, read_report
from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import RoutingPolicy
from deployments.routing.transport import Transport
from nanoengine.cache.events import PrefixEvents

logger = logging.getLogger("ray.serve")

FULL_WAIT_S = 0.25
"""How long a call waits for room before replicas are probed. A completion wakes it at once; this covers those that
another ingress caused."""

TEND_S = 0.1
"""How often the index is tended: expired, swept, looked through for gaps."""


class Late(BackPressureError):
    """Every replica would begin with a call later than it may wait. ``retry_after_s``: by how much."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0, 0, 429, seconds)
        self._message = f"Request dropped: no replica would begin with it in time, for {seconds:.1f} s to come."


class EngineRouter(RequestRouter):
    """By prefixes and load, by default. It raises ``Late`` and ``Misplaced`` and nothing else, and waits only where no
    replica is up or all are full.

    Serve calls it on the event loop of the handle's router; ``observe`` and ``wants`` are called on the ingress's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initialize_state()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._by_id: dict[str, RunningReplica] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[tuple[str, LoadReport | None, Sequence[PrefixEvents]]] = deque()
        self._reading = False  # whether ``_read_news`` is on its way
        self._tended_at = 0.0
        self._wanted: set[str] = set()
        self._transport = Transport()
        self.replica_metadata: dict[str, dict[str, Any]] = {}
        self.placed: dict[int, str] = {}  # by call number
        self._ahead: dict[str, str] = {}  # where requests are whose call is still to come, by key
        self._unsent: Counter[str] = Counter()  # how many of those each replica has
        registry.ROUTERS[self._deployment_id.app_name, self._deployment_id.name] = self

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes ``request_router_kwargs``, as ``settings`` does."""
        policy, self._max_wait_s = self.settings(**kwargs)
        self._core = RoutingCore(policy, time.monotonic)

    @staticmethod
    def settings(
        policy: str = "prefix", max_wait_s: float | None = None, **options: Any
    ) -> tuple[RoutingPolicy, float | None]:
        """The policy of this name and these options, and how long a call may wait before its prompt is begun, in
        seconds. Raises ``ValueError`` or ``TypeError`` where there is none such."""
        if policy not in POLICIES:
            raise ValueError(f"unknown routing policy {policy!r}: known are {', '.join(POLICIES)}")
        if max_wait_s is not None and not max_wait_s > 0:
            raise ValueError("max_wait_s must be above 0, or null")
        return POLICIES[policy](**options), max_wait_s

    @property
    def live_replicas(self) -> int:
        return len(self._by_id.keys() - self._core.dead)

    # -- choosing ------------------------------------------------------------------------------------------------

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if pending_request.args and isinstance(pending_request.args[0], ClaimCheck):
            return self._claimed(pending_request, pending_request.args[0])
        call = _call(pending_request)
        request = _request(call, pending_request.metadata.session_id)
        attempt, came = 0, time.monotonic()
        while True:
            # Choosing and reserving are one step, with no await between: of two calls the second sees the first.
            question, choice = self._decide(call, request, came)
            if choice is not None:
                request_id = pending_request.metadata.internal_request_id
                self._core.reserve(question, choice, request_id, call.number if call else 0)
                if call is not None:
                    self.placed[call.number] = choice.replica
                    expecting = msgspec.structs.replace(call, expected_cached=choice.cached_tokens)
                    pending_request.args = [self._sent(expecting, choice.replica), *pending_request.args[1:]]
                    self._transport.choose(pending_request, choice.replica)
                return self._by_id[choice.replica]
            await self._wait_for_room()
            attempt += 1
            if attempt % 4 == 0:  # counts may be stale where other ingresses fill the same replicas
                await self._probe_queue_lens(list(self._replicas.values()), 0)

    def place(self, call: GenerateCall, session: str) -> str | None:
        """Choose at once, without Serve, and send the request by a channel. Returns the replica: the ``ClaimCheck`` is
        then to be called, and ``ended`` when that has come to its end, or does not come.

        None where that cannot be: the router has a loop of its own, no replica has room, or the one that is chosen has
        no channel. Serve has to be asked then. Raises ``Late``.
        """
        if self._loop is not asyncio.get_running_loop():
            return None
        question, choice = self._decide(call, _request(call, session), time.monotonic())
        if choice is None:
            return None
        replica, expected = choice.replica, choice.cached_tokens
        if not self._carried(msgspec.structs.replace(call, expected_cached=expected), replica):
            return None
        self._core.reserve(question, choice, call.key, call.number)
        self.placed[call.number] = self._ahead[call.key] = replica
        self._unsent[replica] += 1
        return replica

    def ended(self, call: GenerateCall, replica: str) -> None:
        """Nothing more comes of a request that was placed there."""
        self._arrived(call.key)
        self._core.release(replica, call.key)
        self._wake_next()

    def _claimed(self, request: PendingRequest, check: ClaimCheck) -> RunningReplica:
        """Where Serve's call has to go. Raises ``Misplaced`` if it has been there, or that replica is gone by now."""
        name = self._arrived(check.key)
        if name is None or (replica := self._by_id.get(name)) is None:
            raise Misplaced
        self._transport.choose(request, name)
        return replica

    def _arrived(self, key: str) -> str | None:
        """Where a request is that has waited for its call till now, if one has."""
        if (replica := self._ahead.pop(key, None)) is not None:
            self._unsent[replica] -= 1
            if not self._unsent[replica]:
                del self._unsent[replica]
        return replica

    def _decide(self, call: GenerateCall | None, request: RouteRequest, came: float) -> tuple[Question, Choice | None]:
        """Choose by what is known now; None where all are full. Raises ``Late`` if one that ``came`` then would have to
        wait for too long."""
        if call is not None:
            self._core.fleet.ingress = call.ingress
        self._read_news()
        question = self._core.look_up(request)
        choice = self._choose(call, question)
        if call is not None and not (call.avoid or call.generated):  # what was taken once is not refused
            self._refuse_late(time.monotonic() - came + (choice.wait_s if choice else 0.0))
        return question, choice

    def _carried(self, call: GenerateCall, replica: str) -> bool:
        carrier = registry.CARRIERS.get((self._deployment_id.app_name, self._deployment_id.name))
        return carrier is not None and carrier.carry(replica, call)

    def _sent(self, call: GenerateCall, replica: str) -> GenerateCall | ClaimCheck:
        """What Serve's call has to take to the replica: where there is a channel the request goes ahead by that."""
        return ClaimCheck(call.key) if self._carried(call, replica) else call

    def _refuse_late(self, wait_s: float) -> None:
        """Raises ``Late`` for a call that will have waited for so many seconds."""
        if self._max_wait_s is not None and wait_s > self._max_wait_s:
            raise Late(wait_s - self._max_wait_s)

    def _choose(self, call: GenerateCall | None, question: Question) -> Choice | None:
        """The best of those with room; None where all are full."""
        out, dead = self._excluded(call)
        while (choice := self._core.choose(question, out, even_dead=dead)) is not None:
            if self._has_room(self._by_id[choice.replica]):
                return choice
            out.add(choice.replica)
        return None

    def _excluded(self, call: GenerateCall | None) -> tuple[set[str], bool]:
        """Replicas that failed the call before, and whether dead ones may serve it: where there are no others they may,
        for a hint must not hang it."""
        avoid = set(call.avoid) if call else set()
        dead = self._core.dead
        if not avoid and not dead:
            return avoid, False
        live = self._by_id.keys() - dead
        return (avoid if live - avoid else set()), not live

    def _has_room(self, replica: RunningReplica) -> bool:
        known = self._replica_queue_len_cache.get(replica.replica_id)
        unsent = self._unsent[replica.replica_id.unique_id]
        return known is None or known + unsent < replica.max_ongoing_requests

    async def _wait_for_room(self) -> None:
        """Wait for a completion, first come first served, or a little while."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, FULL_WAIT_S)
        except TimeoutError:
            pass
        finally:
            with suppress(ValueError):  # whoever wakes has taken it off, also one that was over already
                self._waiting.remove(turn)

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    # -- what it is told -----------------------------------------------------------------------------------------

    def observe(self, replica: str, load: LoadReport | None, prefixes: Sequence[PrefixEvents]) -> None:
        """What a replica tells of itself. From any thread."""
        self._news.append((replica, load, prefixes))
        if not self._reading and self._loop is not None:
            self._reading = True
            self._loop.call_soon_threadsafe(self._read_news)

    def wants(self) -> Collection[str]:
        """Replicas that should be asked for all prefixes that they hold; each is named once. From any thread."""
        wanted, self._wanted = self._wanted, set()
        return wanted

    def _read_news(self) -> None:
        self._reading = False
        while self._news:
            replica, load, prefixes = self._news.popleft()
            for events in prefixes:
                self._core.prefixes(replica, events)
            if load is not None:  # after the events that it knows of
                self._core.load(replica, load)
        now = time.monotonic()
        if now - self._tended_at > TEND_S:
            self._tended_at = now
            self._wanted |= set(self._core.wants())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls this once for each call that was sent, however it ended."""
        self._core.release(replica_id.unique_id, internal_request_id)
        self._wake_next()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this when replicas come or go, and with every new report of any of them."""
        super().update_replicas(replicas)
        self._loop = asyncio.get_running_loop()
        self._by_id = {r.replica_id.unique_id: r for r in replicas}
        self.replica_metadata = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        self._transport.keep(self._by_id.keys())
        self._core.set_replicas({id: _info(data) for id, data in self.replica_metadata.items()})
        for id, replica in self._by_id.items():
            if (report := read_report(replica.routing_stats)) is not None:
                self._core.load(id, report)
        self._read_news()
        for _ in range(len(self._waiting)):
            self._wake_next()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve calls this when a call finds a replica gone, before the controller has noticed."""
        super().on_replica_actor_died(replica_id)
        self._by_id.pop(replica_id.unique_id, None)
        self._core.forget(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve calls this when a call does not reach a replica, whatever has become of that."""
        super().on_replica_actor_unavailable(replica_id)
        self._transport.miss(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The abstract method of the base class, which only ``handle.choose_replica(_reserve=False)`` still reaches."""
        call = _call(pending_request)
        question = self._core.look_up(_request(call, pending_request.metadata.session_id if pending_request else ""))
        rest = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        others = set(self._by_id.keys() - rest.keys())
        ranks = []
        while rest and (choice := self._core.choose(question, others)) is not None:
            ranks.append([rest.pop(choice.replica)])
            others.add(choice.replica)
        return ranks + [[replica] for replica in rest.values()]


def _call(pending_request: PendingRequest | None) -> GenerateCall | None:
    call = pending_request.args[0] if pending_request and pending_request.args else None
    return call if isinstance(call, GenerateCall) else None


def _request(call: GenerateCall | None, session: str) -> RouteRequest:
    if call is None:
        return RouteRequest(np.empty(0, np.int32), session=session)
    return RouteRequest(call.prompt, call.cache_salt, session)


def _info(metadata: dict[str, Any] | None) -> ReplicaInfo:
    try:
        return msgspec.convert((metadata or {})["routing"], ReplicaInfo)
    except (KeyError, TypeError, msgspec.ValidationError):
        return ReplicaInfo()  # another version's replica: it is served by its load
