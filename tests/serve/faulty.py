"""The production router, but that what engines tell it of their caches is lost or mixed up on the way, or that calls
do not reach them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray._private.grpc_utils import init_grpc_channel
from ray.serve._private.request_router.replica_wrapper import gRPCReplicaWrapper
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.routing.load import LoadReport
from deployments.routing.router import EngineRouter
from nanoengine.cache.events import PrefixEvents

GARBAGE = b"no whole hashes"


class UnreliableRouter(EngineRouter):
    """What happens is asked of a file, each time: a test changes it while the service runs. Its keys:

    lost: fraction of prefix events that don't arrive;
    gap: when it grows, each replica's next events don't;
    swapped: events of one replica are taken for another's, with garbage after them;
    unreached: calls over gRPC go where nobody listens, and all else works.
    """

    def initialize_state(self, faults: str = "", **kwargs: Any) -> None:
        super().initialize_state(**kwargs)
        self._faults = Path(faults)
        self._rng = random.Random(0)
        self._gaps: dict[str, int] = {}
        self._seen: list[str] = []
        self._nowhere: set[str] = set()  # replicas whose calls over gRPC do not reach them

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        name = replica.replica_id.unique_id
        if json.loads(self._faults.read_text()).get("unreached"):
            if name not in self._nowhere:
                nowhere = ASGIServiceStub(init_grpc_channel("127.0.0.1:1", asynchronous=True))
                replica._grpc_replica_wrapper = gRPCReplicaWrapper(nowhere, replica.actor_id)
                self._nowhere.add(name)
        elif name in self._nowhere:
            replica._grpc_replica_wrapper = None  # Serve makes a new one
            self._nowhere.discard(name)
        return replica

    def observe(self, replica: str, load: LoadReport | None, prefixes: Sequence[PrefixEvents]) -> None:
        faults = json.loads(self._faults.read_text())
        if replica not in self._seen:
            self._seen.append(replica)
        prefixes = [events for events in prefixes if self._rng.random() >= faults.get("lost", 0)]
        if prefixes and self._gaps.get(replica, 0) < faults.get("gap", 0):
            self._gaps[replica] = faults["gap"]
            prefixes = []
        if prefixes and faults.get("swapped"):
            other = self._seen[self._seen.index(replica) - 1]
            garbage = PrefixEvents(prefixes[-1].seq + 5, False, GARBAGE, GARBAGE)
            super().observe(other, None, [*prefixes, garbage])
            prefixes = []
        super().observe(replica, load, prefixes)


def set_faults(file: Path, **faults: Any) -> None:
    """From now on these happen, and no others."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(faults))
    new.replace(file)
