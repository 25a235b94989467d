"""Standing: which replicas a call may go to, and which it has to leave, as one ingress sees it.

Serve takes a replica that it is about to stop off the list that routers have, and waits for the calls that it has;
after ``graceful_shutdown_timeout_s`` it kills it. The replica itself is not told. So it is the ingress that moves its
streams: those that have not ended by themselves shortly before, for what moves is computed twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

MARGIN_S = 10.0  # before a replica is killed its streams move, or after 3/4 of its time if that is later
FORGET_S = 60.0  # after that: nothing is left there


class Standing:
    """Of the replicas of one deployment, by unique id. No network, no event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drain_s: dict[str, float] = {}  # of each that runs: how long it may take to stop
        self._leaving: dict[str, float] = {}  # when what is left at one that is being stopped has to move
        self._useless: set[str] = set()

    def update(self, running: Mapping[str, Mapping[str, Any] | None]) -> None:
        """These run now; with each, what it said of itself when it started."""
        now = self._clock()
        for name in self._drain_s.keys() - running.keys():
            drain_s = self._drain_s.pop(name)
            self._leaving[name] = now + drain_s - min(MARGIN_S, drain_s / 4)
        for name, data in running.items():
            if name not in self._drain_s:
                self._drain_s[name] = (data or {}).get("drain_s", math.inf)  # inf: of another version of the service
                self._leaving.pop(name, None)
        self._useless &= running.keys()
        for name in [name for name, at in self._leaving.items() if now > at + MARGIN_S + FORGET_S]:
            del self._leaving[name]

    def refuse(self, name: str) -> None:
        """It serves nothing of ours any more."""
        self._useless.add(name)

    def usable(self, suspects: Collection[str], connected: Collection[str]) -> bool:
        """Whether a replica runs that can be asked. ``suspects`` were lost; one of them counts if it is ``connected``
        again."""
        return any(name not in self._useless and (name not in suspects or name in connected) for name in self._drain_s)

    def overdue(self) -> set[str]:
        """Replicas that are being stopped and whose calls have to go on elsewhere now."""
        now = self._clock()
        return {name for name, at in self._leaving.items() if now >= at}
