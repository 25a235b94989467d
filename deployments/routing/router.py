"""EngineRouter: Serve's hook through which a handle asks which replica a call goes to.

Serve's documented hook, ``choose_replicas``, hangs a request for ever when it raises, and hangs all but one of several
calls made under one parent request. So this overrides ``_choose_replica_for_request``, as Ray's own CapacityQueueRouter
does: private API, which is why pyproject.toml pins Ray's minor version and tests/serve keeps a contract test.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.messages import GenerateCall
from deployments.routing import registry
from deployments.routing.load import LoadBook
from deployments.routing.policy import POLICIES, LeastLoad, RouteRequest, RoutingPolicy

logger = logging.getLogger("ray.serve")

FULL_WAIT_S = 0.25
"""How long a call waits for room before replicas are probed. A completion wakes it at once; this covers those that
another ingress caused."""


class EngineRouter(RequestRouter):
    """Least load by default. It cannot raise, and waits only where no replica is up or all are full."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = LoadBook()
        self._fallback = LeastLoad()
        self._policy: RoutingPolicy = self._fallback
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._by_id: dict[str, RunningReplica] = {}
        self.replica_metadata: dict[str, dict[str, Any]] = {}
        registry.ROUTERS[self._deployment_id.app_name, self._deployment_id.name] = self

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes ``request_router_kwargs``, as ``policy_of`` does."""
        self._policy = self.policy_of(**kwargs)

    @staticmethod
    def policy_of(policy: str = "least_load", **options: Any) -> RoutingPolicy:
        """The policy of this name and these options. Raises ``ValueError`` or ``TypeError`` where there is none."""
        if policy not in POLICIES:
            raise ValueError(f"unknown routing policy {policy!r}: known are {', '.join(POLICIES)}")
        return POLICIES[policy](**options)

    @property
    def live_replicas(self) -> int:
        return len(self._by_id.keys() - self._book.dead)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        call = pending_request.args[0] if pending_request.args else None
        if isinstance(call, GenerateCall):
            self._book.ingress = call.ingress
        else:
            call = None
        attempt = 0
        while True:
            while not self._by_id:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            chosen = self._choose(call)
            if chosen is not None:
                # Choosing and reserving are one step, with no await between: of two calls the second sees the first.
                self._book.reserve(
                    chosen.replica_id.unique_id,
                    pending_request.metadata.internal_request_id,
                    call.number if call else 0,
                    len(call.prompt) if call else 0,
                )
                return chosen
            await self._wait_for_room()
            attempt += 1
            if attempt % 4 == 0:  # counts may be stale where other ingresses fill the same replicas
                await self._probe_queue_lens(list(self._replicas.values()), 0)

    def _choose(self, call: GenerateCall | None) -> RunningReplica | None:
        """The policy's choice among those with room; None where all are full."""
        candidates = self._candidates(call)
        while candidates:
            id = self._ask_policy(call, candidates)
            if self._has_room(self._by_id[id]):
                return self._by_id[id]
            candidates = [other for other in candidates if other != id]
        return None

    def _candidates(self, call: GenerateCall | None) -> list[str]:
        """Replicas that may serve the call. Where all are dead or failed it before, any: a hint must not hang it."""
        everyone = list(self._by_id)
        if not self._book.dead and not (call and call.avoid):
            return everyone
        live = [id for id in everyone if id not in self._book.dead] or everyone
        return [id for id in live if not call or id not in call.avoid] or live

    def _ask_policy(self, call: GenerateCall | None, candidates: list[str]) -> str:
        loads = self._book.loads(candidates)
        request = RouteRequest(call.prompt, call.cache_salt) if call else RouteRequest(np.empty(0, np.int32))
        try:
            chosen = self._policy.choose(request, loads)
            if chosen in candidates:
                return chosen
            logger.error("the routing policy chose %r, which is none of its candidates", chosen)
        except Exception:
            logger.exception("the routing policy failed; taking the least loaded replica")
        return self._fallback.choose(request, loads)

    def _has_room(self, replica: RunningReplica) -> bool:
        known = self._replica_queue_len_cache.get(replica.replica_id)
        return known is None or known < replica.max_ongoing_requests

    async def _wait_for_room(self) -> None:
        """Wait for a completion, first come first served, or a little while."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, FULL_WAIT_S)
        except TimeoutError:
            pass
        finally:
            if not turn.done() or turn.cancelled():
                self._waiting.remove(turn)

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls this once for each call that was sent, however it ended."""
        self._book.release(replica_id.unique_id, internal_request_id)
        self._wake_next()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this when replicas come or go, and with every new report of any of them."""
        super().update_replicas(replicas)
        self._by_id = {r.replica_id.unique_id: r for r in replicas}
        self._book.update({r.replica_id.unique_id: r.routing_stats for r in replicas})
        self.replica_metadata = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        for _ in range(len(self._waiting)):
            self._wake_next()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve calls this when a call finds a replica gone, before the controller has noticed."""
        super().on_replica_actor_died(replica_id)
        self._by_id.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The abstract method of the base class, which only ``handle.choose_replica(_reserve=False)`` still reaches."""
        call = pending_request.args[0] if pending_request and pending_request.args else None
        call = call if isinstance(call, GenerateCall) else None
        rest = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranks = []
        while rest:
            ranks.append([rest.pop(self._ask_policy(call, list(rest)))])
        return ranks
