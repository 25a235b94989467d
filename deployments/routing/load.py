"""Fleet: what one router knows of its replicas' load, as one array over slots. No clock, no network.

A replica's report is some 100 ms old. Between two reports a router that looked at nothing else would send all its
requests to whichever replica was reported idle, so to each report it adds what it reserved itself since, and takes its
own part of the report out again where it knows that better: its own open requests. Work that is ahead of a new request
shrinks as time goes by, at the rate at which the replica is known to prefill. The other routers' requests are in the
report, which a replica sends as soon as one of them arrives.

What shrinks with time is kept as the time when it will be nothing, and what follows from a report or a reservation is
computed when that comes: a decision, which looks at all replicas, takes a difference and a few products.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Slots = npt.NDArray[np.intp]

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


class _Reservation(NamedTuple):
    call: int
    tokens: int


class _Held:
    """What belongs to one replica and no decision reads: this router's open calls there, and its last report."""

    __slots__ = ("by_request", "measured", "newest", "number", "open", "others", "own", "rate", "slowdown", "told_at")

    def __init__(self, rate: float) -> None:
        self.by_request: dict[str, deque[_Reservation]] = defaultdict(deque)  # by Serve's request id
        self.own = 0  # how many those are
        self.number = 0  # of the last report
        self.told_at = math.inf  # when the last one came that did not come through Serve
        self.newest = -1  # call that it includes
        self.open = 0
        self.others = 0  # sequences of other routers
        self.rate = rate  # prompt tokens per second; the others' mean where it is not known
        self.measured = False  # whether the replica has told it
        self.slowdown = 0.0

    def __iter__(self) -> Iterator[_Reservation]:
        return (one for queue in self.by_request.values() for one in queue)


class Loads(NamedTuple):
    """The load of replicas at one instant, arrays over them. Not to be changed."""

    backlog: Floats  # prompt tokens to compute before a new request's own
    wait: Floats  # seconds until that is begun: those tokens', and till the batch has a place
    active: Floats  # sequences that wait or run
    kv_usage: Floats  # fraction of KV blocks that sequences refer to
    fullness: Floats  # fraction that hold something, referred to or not
    token_s: Floats  # seconds that a prompt token takes, > 0
    harm: Floats  # seconds that a new sequence costs each active one


class Figures(NamedTuple):
    """What decisions read, arrays over slots: they change with a report, a reservation or a release."""

    free_at: Floats  # when the prompt tokens are computed that are ahead of a new request
    place_at: Floats  # when the batch has a place for it
    rate: Floats  # prompt tokens per second, with nothing else to do
    slowdown: Floats
    active: Floats
    token_s: Floats
    kv_usage: Floats
    fullness: Floats
    harm: Floats
    heard_at: Floats  # when the last report came; never, where the slot is free


class Fleet:
    """Reports and reservations. A slot's figures mean something from ``join`` to ``leave``."""

    def __init__(self) -> None:
        self.ingress = ""  # under which name reports count this router's own calls
        self.dead: set[int] = set()  # slots whose engines have ended
        self.gone: set[int] = set()  # slots that reported themselves, and do not any more
        self._held: dict[int, _Held] = {}  # by slot
        self._heard_since = -math.inf  # no replica's last report is older
        self._array: Floats = np.zeros((len(Figures._fields), 0))
        self.figures = Figures(*self._array)

    def widen(self, slots: int) -> None:
        """Make room for slots 0 to ``slots - 1``."""
        known = self._array.shape[1]
        if slots > known:
            self._array = np.hstack((self._array, np.zeros((len(self._array), slots - known))))
            self.figures = Figures(*self._array)
            self.figures.heard_at[known:] = math.inf

    def join(self, slot: int, now: float) -> None:
        """A replica of which nothing is known yet."""
        held = self._held[slot] = _Held(self._usual_rate())
        self._array[:, slot] = 0.0
        self.figures.heard_at[slot] = now
        self._set_pace(slot, held)

    def _usual_rate(self) -> float:
        known = [held.rate for held in self._held.values() if held.measured]
        return float(np.mean(known)) if known else RATE

    def _set_pace(self, slot: int, held: _Held) -> None:
        """What follows from a rate, a slowdown and a number of sequences."""
        f, active = self.figures, held.others + held.own
        f.rate[slot], f.slowdown[slot], f.active[slot] = held.rate, held.slowdown, active
        f.token_s[slot] = (1.0 + held.slowdown * active) / held.rate

    def leave(self, slot: int) -> None:
        self._held.pop(slot, None)
        self.figures.heard_at[slot] = math.inf
        self.dead.discard(slot)
        self.gone.discard(slot)

    def look(self, now: float) -> None:
        """See who is gone, now and then. What Serve tells of them is what they said when they were not."""
        self._heard_since = float(self.figures.heard_at.min(initial=now))
        self.gone = {slot for slot, held in self._held.items() if now - held.told_at > GONE_S}

    def report(self, slot: int, report: LoadReport, now: float) -> None:
        """A replica's report. One that is older than the last is ignored, and one through Serve while others come."""
        held, f = self._held.get(slot), self.figures
        if held is None:
            return
        if not report.number:
            if held.number and now - f.heard_at[slot] < SILENT_S:
                return
        elif report.number <= held.number:
            return
        held.number = report.number
        if report.number:
            held.told_at = now
        held.open, held.newest = report.ingresses.get(self.ingress, (0, -1))
        held.others = max(0, report.active - held.open)
        held.slowdown = report.slowdown
        if report.prefill_rate > 0:
            held.rate, held.measured = report.prefill_rate, True
        elif not held.measured:
            held.rate = self._usual_rate()
        self._set_pace(slot, held)
        work = report.backlog_tokens + sum(one.tokens for one in held if one.call > held.newest)
        f.free_at[slot], f.place_at[slot], f.heard_at[slot] = now + work / held.rate, now + report.place_s, now
        f.kv_usage[slot], f.fullness[slot], f.harm[slot] = report.kv_usage, report.fullness, report.harm_s
        if report.dead:
            self.dead.add(slot)

    def reserve(self, slot: int, request: str, call: int, tokens: int, now: float) -> None:
        """A call with so many prompt tokens to compute goes to ``slot`` now."""
        held = self._held.get(slot)
        if held is None:
            return
        held.by_request[request].append(_Reservation(call, tokens))
        held.own += 1
        self._set_pace(slot, held)
        free_at = self.figures.free_at
        free_at[slot] = max(now, float(free_at[slot])) + tokens / held.rate

    def release(self, slot: int, request: str) -> None:
        """A call ended, however. Calls of one fan-out share Serve's request id: the oldest of them is released."""
        held = self._held.get(slot)
        if held is None or request not in held.by_request:
            return
        queue = held.by_request[request]
        queue.popleft()
        if not queue:
            del held.by_request[request]
        held.own -= 1
        self._set_pace(slot, held)

    def loads(self, now: float, slots: Slots | None = None) -> Loads:
        """Of these slots, or of all, without a copy."""
        f = self.figures if slots is None else Figures(*self._array.take(slots, axis=1))
        backlog, active, token_s = np.maximum(f.free_at - now, 0.0) * f.rate, f.active, f.token_s
        if self._heard_since < now - SILENT_S:
            silent = f.heard_at < now - SILENT_S
            if silent.any() and not silent.all():  # no news are no invitation
                backlog, active = (np.where(silent, np.maximum(x, x[~silent].mean()), x) for x in (backlog, active))
                token_s = (1.0 + f.slowdown * active) / f.rate
        wait = backlog * token_s + np.maximum(f.place_at - now, 0.0)
        return Loads(backlog, wait, active, f.kv_usage, f.fullness, token_s, f.harm)

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
