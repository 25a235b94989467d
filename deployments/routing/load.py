"""Fleet: what one router knows of its replicas' load, as arrays over slots. No clock, no network.

A replica's report is some 100 ms old. Between two reports a router that looked at nothing else would send all its
requests to whichever replica was reported idle, so to each report it adds what it reserved itself since, and takes its
own part of the report out again where it knows that better: its own open requests. Work that is ahead of a new request
shrinks as time goes by, at the rate at which the replica is known to prefill. The other routers' requests are in the
report, which a replica sends as soon as one of them arrives.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SILENT_S = 2.0  # without a report for so long a replica's load is not known
GONE_S = 5.0  # and after so long it gets nothing more: its process stands still, or there is no way to it
RATE = 8000.0  # prompt tokens per second, as long as no replica has told its own


class LoadReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica says of its load. Zero, of what is measured, is "not known"."""

    number: int = 0  # counts this replica's reports to this router up; 0: it came through Serve, and late
    active: int = 0  # sequences waiting or running
    backlog_tokens: float = 0  # prompt tokens still to compute
    kv_usage: float = 0.0  # fraction of KV blocks that sequences refer to
    dead: bool = False
    ingresses: dict[str, tuple[int, int]] = {}  # of each ingress: sequences open here, and its newest call seen
    prefill_rate: float = 0.0  # prompt tokens per second, with nothing else to do
    slowdown: float = 0.0  # of prefill, by each active sequence, as a fraction
    harm_s: float = 0.0  # seconds that one more sequence will cost each of the others, till it ends
    fullness: float = 0.0  # fraction of KV blocks that hold something: what comes now evicts something else
    place_s: float = 0.0  # seconds till a sequence that comes now has a place in the batch
    prefixes: int = 0  # number of its last prefix events: a router that has fewer has missed some


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica said of itself when it started."""

    model: str = ""  # root of its prefix hashes
    block_size: int = 1  # tokens in one of its engine's KV blocks: it finds whole ones in its cache
    caches: bool = False  # whether it keeps prefixes, and tells which


@dataclass(frozen=True, slots=True)
class _Reservation:
    call: int
    tokens: int


class _Held:
    """This router's calls that are open at one replica."""

    __slots__ = ("by_request", "measured", "newest", "number", "open", "told_at")

    def __init__(self) -> None:
        self.by_request: dict[str, deque[_Reservation]] = defaultdict(deque)  # by Serve's request id
        self.measured = False  # whether the replica has told its rate
        self.number = 0  # of the last report
        self.told_at = math.inf  # when the last one came that did not come through Serve
        self.newest = -1  # call that it includes
        self.open = 0

    def __iter__(self) -> Iterator[_Reservation]:
        return (one for queue in self.by_request.values() for one in queue)


class Fleet:
    """Reports and reservations. A slot's figures mean something from ``join`` to ``leave``."""

    _ARRAYS = (
        *("others", "own", "work", "worked_at", "heard_at", "kv_usage", "rate", "slowdown", "harm", "fullness"),
        "place",
    )

    def __init__(self) -> None:
        self.ingress = ""  # under which name reports count this router's own calls
        self.dead: set[int] = set()  # slots whose engines have ended
        self.gone: set[int] = set()  # slots that reported themselves, and do not any more
        self.others: Floats = np.zeros(0)  # sequences of other routers, by the last report
        self.own: Floats = np.zeros(0)  # this router's open calls
        self.work: Floats = np.zeros(0)  # prompt tokens ahead of a new request, at ``worked_at``
        self.worked_at: Floats = np.zeros(0)
        self.heard_at: Floats = np.zeros(0)  # when the last report came
        self.kv_usage: Floats = np.zeros(0)
        self.rate: Floats = np.zeros(0)  # prompt tokens per second; the others' mean where it is not known
        self.slowdown: Floats = np.zeros(0)
        self.harm: Floats = np.zeros(0)
        self.fullness: Floats = np.zeros(0)
        self.place: Floats = np.zeros(0)  # seconds till its batch has one, at ``heard_at``
        self._held: dict[int, _Held] = {}  # by slot

    def widen(self, slots: int) -> None:
        """Make room for slots 0 to ``slots - 1``."""
        more = slots - len(self.own)
        if more > 0:
            for name in self._ARRAYS:
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more))))

    def join(self, slot: int, now: float) -> None:
        """A replica of which nothing is known yet."""
        self._held[slot] = _Held()
        for name in self._ARRAYS:
            getattr(self, name)[slot] = 0.0
        self.worked_at[slot] = self.heard_at[slot] = now
        self.rate[slot] = self._usual_rate()

    def _usual_rate(self) -> float:
        known = [self.rate[slot] for slot, held in self._held.items() if held.measured]
        return float(np.mean(known)) if known else RATE

    def leave(self, slot: int) -> None:
        self._held.pop(slot, None)
        self.dead.discard(slot)
        self.gone.discard(slot)

    def look(self, now: float) -> None:
        """See who is gone. What Serve tells of them is what they said when they were not."""
        self.gone = {slot for slot, held in self._held.items() if now - held.told_at > GONE_S}

    def report(self, slot: int, report: LoadReport, now: float) -> None:
        """A replica's report. One that is older than the last is ignored, and one through Serve while others come."""
        held = self._held.get(slot)
        if held is None:
            return
        if not report.number:
            if held.number and now - self.heard_at[slot] < SILENT_S:
                return
        elif report.number <= held.number:
            return
        held.number = report.number
        if report.number:
            held.told_at = now
        held.open, held.newest = report.ingresses.get(self.ingress, (0, -1))
        self.others[slot] = max(0, report.active - held.open)
        self.work[slot] = report.backlog_tokens + sum(one.tokens for one in held if one.call > held.newest)
        self.worked_at[slot] = self.heard_at[slot] = now
        self.kv_usage[slot], self.fullness[slot] = report.kv_usage, report.fullness
        self.place[slot] = report.place_s
        self.slowdown[slot], self.harm[slot] = report.slowdown, report.harm_s
        if report.prefill_rate > 0:
            self.rate[slot], held.measured = report.prefill_rate, True
        elif not held.measured:
            self.rate[slot] = self._usual_rate()
        if report.dead:
            self.dead.add(slot)

    def reserve(self, slot: int, request: str, call: int, tokens: int, now: float) -> None:
        """A call with so many prompt tokens to compute goes to ``slot`` now."""
        held = self._held.get(slot)
        if held is None:
            return
        held.by_request[request].append(_Reservation(call, tokens))
        self.own[slot] += 1
        done = self.rate[slot] * (now - self.worked_at[slot])
        self.work[slot] = max(0.0, self.work[slot] - done) + tokens
        self.worked_at[slot] = now

    def release(self, slot: int, request: str) -> None:
        """A call ended, however. Calls of one fan-out share Serve's request id: the oldest of them is released."""
        held = self._held.get(slot)
        if held is None or request not in held.by_request:
            return
        queue = held.by_request[request]
        queue.popleft()
        if not queue:
            del held.by_request[request]
        self.own[slot] -= 1

    def backlog(self, slots: npt.NDArray[np.intp] | slice, now: float) -> Floats:
        """Prompt tokens ahead of a new request at each of ``slots``."""
        return np.maximum(0.0, self.work[slots] - self.rate[slots] * (now - self.worked_at[slots]))

    def wait(self, backlog: Floats, token_s: Floats, slots: npt.NDArray[np.intp] | slice, now: float) -> Floats:
        """Seconds until each of ``slots`` begins with a new request: it has a backlog of so many prompt tokens to
        compute, and its running sequences to decode until they leave their places."""
        return backlog * token_s + np.maximum(0.0, self.place[slots] - (now - self.heard_at[slots]))

    @property
    def reserved(self) -> int:
        """Calls of this router that are open now."""
        return sum(len(queue) for held in self._held.values() for queue in held.by_request.values())


def read_report(stats: Mapping[str, Any] | None) -> LoadReport | None:
    """A report as it comes through Serve; None where it is none, as from another version of the service."""
    try:
        return msgspec.convert(stats, LoadReport)
    except (msgspec.ValidationError, TypeError):
        return None
