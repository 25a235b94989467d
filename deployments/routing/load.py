"""LoadBook: what one router knows of its replicas' load. Plain Python, one event loop, no clock.

A replica's report is up to a second old. Between two reports a router that looked at nothing else would send all its
requests to whichever replica was reported idle, so to each report it adds what it reserved itself since, and it takes
its own part of the report out again where that part is known better here: its own open requests. That sum is exact for
one router, and right up to the others' last second for several.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as a policy sees it, at one instant."""

    replica: str  # unique id
    active: int  # sequences waiting or running
    backlog_tokens: int  # prompt tokens to compute before a new request's own
    kv_usage: float = 0.0  # fraction of KV blocks in use


@dataclass(frozen=True, slots=True)
class _Reservation:
    call: int
    tokens: int


@dataclass(slots=True)
class _Report:
    """The last one of a replica; ``open`` and ``newest`` are this router's own part of it."""

    active: int = 0
    backlog_tokens: int = 0
    kv_usage: float = 0.0
    dead: bool = False
    open: int = 0
    newest: int = -1


class _Entry:
    """One replica. What a decision reads is kept up to date as things happen, for there may be hundreds of replicas."""

    __slots__ = ("count", "held", "load", "replica", "report", "unreported")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.report = _Report()
        self.held: dict[str, deque[_Reservation]] = defaultdict(deque)  # by Serve's request id
        self.count = 0  # reservations held
        self.unreported = 0  # prompt tokens of those that the report doesn't include
        self.refresh()

    def refresh(self) -> None:
        report = self.report
        others = max(0, report.active - report.open)
        self.load = ReplicaLoad(
            self.replica, others + self.count, report.backlog_tokens + self.unreported, report.kv_usage
        )


class LoadBook:
    """Reports and reservations of the replicas of one deployment. No method raises, whatever it is given."""

    def __init__(self) -> None:
        self.ingress = ""  # under which name reports count this router's own calls
        self.dead: frozenset[str] = frozenset()  # replicas that said that their engine ended
        self._entries: dict[str, _Entry] = {}

    def update(self, reports: Mapping[str, Mapping[str, Any] | None]) -> None:
        """All replicas that there are now, each with its newest report (None or empty before its first one)."""
        for replica in [name for name in self._entries if name not in reports]:
            del self._entries[replica]
        for replica, stats in reports.items():
            entry = self._entry(replica)
            entry.report = self._read(stats or {})
            entry.unreported = sum(
                held.tokens for queue in entry.held.values() for held in queue if held.call > entry.report.newest
            )
            entry.refresh()
        self.dead = frozenset(replica for replica in reports if self._entries[replica].report.dead)

    def _read(self, stats: Mapping[str, Any]) -> _Report:
        try:
            open_, newest = stats.get("ingresses", {}).get(self.ingress, (0, -1))
            return _Report(
                active=int(stats.get("active", 0)),
                backlog_tokens=int(stats.get("backlog_tokens", 0)),
                kv_usage=float(stats.get("kv_usage", 0.0)),
                dead=bool(stats.get("dead", False)),
                open=int(open_),
                newest=int(newest),
            )
        except (AttributeError, TypeError, ValueError):
            return _Report()  # another version's report: this router's own reservations still count

    def _entry(self, replica: str) -> _Entry:
        entry = self._entries.get(replica)
        if entry is None:
            entry = self._entries[replica] = _Entry(replica)
        return entry

    def reserve(self, replica: str, request: str, call: int, tokens: int) -> None:
        """A call with a prompt of so many tokens goes to ``replica`` now."""
        entry = self._entry(replica)
        entry.held[request].append(_Reservation(call, tokens))
        entry.count += 1
        entry.unreported += tokens
        entry.refresh()

    def release(self, replica: str, request: str) -> None:
        """A call ended, however. Calls of one fan-out share Serve's request id: the oldest of them is released."""
        entry = self._entries.get(replica)
        if entry is None or request not in entry.held:
            return
        queue = entry.held[request]
        reservation = queue.popleft()
        if not queue:
            del entry.held[request]
        entry.count -= 1
        if reservation.call > entry.report.newest:
            entry.unreported -= reservation.tokens
        entry.refresh()

    def load(self, replica: str) -> ReplicaLoad:
        """The load of ``replica``, this router's own calls included; of a replica never heard of, none."""
        entry = self._entries.get(replica)
        return entry.load if entry else ReplicaLoad(replica, 0, 0)

    def loads(self, replicas: Iterable[str]) -> list[ReplicaLoad]:
        """``load`` of each, in order."""
        entries = self._entries
        return [entries[name].load if name in entries else ReplicaLoad(name, 0, 0) for name in replicas]

    @property
    def reserved(self) -> int:
        """Calls of this router that are open now."""
        return sum(entry.count for entry in self._entries.values())
