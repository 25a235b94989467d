"""The routers of this process and the channels that they send requests by, by application and deployment.

Serve makes a router inside each handle and gives no way to reach it; an ingress asks it here whether any replica is up,
and leaves here what the router is to send requests by. Reach them as ``registry.ROUTERS``: Serve pickles a router's
module by value, and would copy a name imported from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from deployments.messages import GenerateCall
from deployments.routing.load import LoadReport
from nanoengine.cache.events import PrefixEvents


class Routing(Protocol):
    """What an ingress may ask of its router, from any thread."""

    @property
    def live_replicas(self) -> int:
        """Replicas that are running and whose engines are not known to be dead."""

    def observe(self, replica: str, load: LoadReport | None, prefixes: Sequence[PrefixEvents]) -> None:
        """What a replica, by unique id, tells of itself."""

    def wants(self) -> Collection[str]:
        """Replicas that should be asked for all prefixes that they hold; each is named once."""

    def place(self, call: GenerateCall, session: str) -> str | None:
        """Send a request ahead of Serve's call, which then takes its ``ClaimCheck``, to the replica that is returned.
        None: it has to be called itself. On the event loop of the requests. Raises ``BackPressureError``."""

    def ended(self, call: GenerateCall, replica: str) -> None:
        """Nothing more comes of a request that was placed there. On the same loop."""

    @property
    def replica_metadata(self) -> Mapping[str, Mapping[str, Any]]:
        """What each running replica, by unique id, said of itself when it started."""

    @property
    def placed(self) -> MutableMapping[int, str]:
        """Where each call went, by its number. Who made the call takes it out again."""


class Carrier(Protocol):
    """What a router may ask of its ingress, from any thread."""

    def carry(self, replica: str, call: GenerateCall) -> bool:
        """Send a request to its replica, ahead of Serve's call; False: that has to take it along."""


ROUTERS: WeakValueDictionary[tuple[str, str], Routing] = WeakValueDictionary()
"""Keyed by (application, deployment)."""

CARRIERS: WeakValueDictionary[tuple[str, str], Carrier] = WeakValueDictionary()
"""Keyed like ``ROUTERS``."""
