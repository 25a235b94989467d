"""RoutingCore: index, load and policy as one object, which decides and reserves in one step.

It is all of the router but Serve: no event loop, no network, its clock is a function. ``python -m loadtest.router``
simulates fleets with this very class. What it is told may be late, lost or wrong: it is a hint, and costs time, never
an answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.routing.index import PrefixIndex
from deployments.routing.load import Fleet, Floats, LoadReport, ReplicaInfo, Slots
from deployments.routing.policies.base import Candidates, RoutingPolicy, least
from deployments.routing.policies.power_of_two import PowerOfTwo
from nanoengine.cache.events import PrefixEvents
from nanoengine.cache.prefix_hash import ROUTER_BLOCK, HashArray, prefix_hashes, prefix_root

logger = logging.getLogger("ray.serve")

EXPECT_S = 2.0  # how long after a prompt should have been prefilled its blocks are still expected
NO_HASHES: HashArray = np.empty(0, np.uint64)


class RouteRequest(NamedTuple):
    """What is known of a call before it has a replica."""

    prompt: npt.NDArray[np.int32]  # int32 [prompt length]; empty where the call brought none
    cache_salt: str = ""
    session: str = ""


class Question(NamedTuple):
    """A request, looked up once for all replicas; of ``RoutingCore.look_up``."""

    request: RouteRequest
    hashes: HashArray
    depth: npt.NDArray[np.int64]  # leading blocks that each slot holds
    cached: Floats  # tokens of them that its engine can use


class Choice(NamedTuple):
    """A replica for a request, and what it is expected to find there."""

    replica: str
    slot: int
    cached_tokens: int
    wait_s: float  # before anything is done for it, at the replica where that is least


@dataclass(slots=True)
class _Replica:
    slot: int
    info: ReplicaInfo
    seq: int = 0  # of its last prefix events
    in_step: bool = False  # whether none are missing; before the first snapshot all are
    asked_at: float = field(default=float("-inf"))  # when a snapshot was last asked for


class RoutingCore:
    """What one router knows and does. One thread. No method raises, whatever replicas say."""

    def __init__(self, policy: RoutingPolicy, clock: Callable[[], float], rng: random.Random | None = None) -> None:
        """``clock``: seconds, of any origin."""
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self._policy = policy
        self._fallback = PowerOfTwo(rng=rng)
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []  # by slot; "" where it is free
        self._free: list[int] = []
        self._live: Slots = np.empty(0, np.intp)  # of replicas that there are
        self._grain: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # block size of each slot's engine
        self._roots: dict[tuple[str, str], int] = {}
        self._model = ""

    # -- what it is told -----------------------------------------------------------------------------------------

    def set_replicas(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """These replicas there are now, by unique id."""
        now = self._clock()
        for name in [name for name in self._replicas if name not in replicas]:
            slot = self._replicas.pop(name).slot
            self._names[slot] = ""
            self.fleet.leave(slot)
            self.index.drop(slot)
        for name, info in replicas.items():
            if name not in self._replicas:
                self._join(name, info, now)
            elif info != self._replicas[name].info:
                self._set_info(self._replicas[name], info)
        self._live = np.array(sorted(one.slot for one in self._replicas.values()), np.intp)

    def _join(self, name: str, info: ReplicaInfo, now: float) -> None:
        if not self._free:
            self._free = self.index.sweep()
        if self._free:
            slot = self._free.pop()
            self._names[slot] = name
        else:
            slot = len(self._names)
            self._names.append(name)
            self.index.widen(slot + 1)
            self.fleet.widen(slot + 1)
            self._grain = np.concatenate((self._grain, [1]))
        replica = self._replicas[name] = _Replica(slot, info)
        self._set_info(replica, info)
        self.fleet.join(slot, now)

    def _set_info(self, replica: _Replica, info: ReplicaInfo) -> None:
        replica.info = info
        self._grain[replica.slot] = info.block_size
        self._model = info.model

    def forget(self, name: str) -> None:
        """This replica was found gone. It gets nothing from now on, whoever else has noticed."""
        if name in self._replicas:
            self.set_replicas({other: one.info for other, one in self._replicas.items() if other != name})

    def load(self, name: str, report: LoadReport) -> None:
        """A replica's report, as ``Fleet.report``."""
        if (replica := self._replicas.get(name)) is not None:
            self.fleet.report(replica.slot, report, self._clock())
            if report.prefixes > replica.seq:
                replica.in_step = False

    def prefixes(self, name: str, events: PrefixEvents) -> None:
        """A replica's prefix events. After a gap what is known stays in use until a snapshot comes: it is mostly right,
        and what a later event removes was removed."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        try:
            stored, removed = events.stored_hashes(), events.removed_hashes()
        except ValueError:  # not whole hashes: nothing of ours
            replica.in_step = False
            return
        if events.cleared:
            self.index.clear(replica.slot)
            replica.in_step = True
        elif events.seq != replica.seq + 1:
            replica.in_step = False
        replica.seq = events.seq
        self.index.remove(replica.slot, removed)
        self.index.store(replica.slot, stored)

    def wants(self) -> list[str]:
        """Replicas that should send a snapshot: each is named once a second until it has. Call it now and then."""
        now = self._clock()
        self._free += self.index.sweep()
        self.index.expire(now)
        self.fleet.look(now)
        late = []
        for name, replica in self._replicas.items():
            if replica.info.caches and not replica.in_step and now - replica.asked_at > 1.0:
                replica.asked_at = now
                late.append(name)
        return late

    # -- what it is asked ----------------------------------------------------------------------------------------

    def look_up(self, request: RouteRequest) -> Question:
        """Hash a prompt and find what each replica has of it."""
        length = len(request.prompt)
        if self._policy.uses_prefixes and length > 1:
            hashes = prefix_hashes(self._root(request.cache_salt), request.prompt)
            self.index.expire(self._clock())
        else:
            hashes = NO_HASHES
        depth = self.index.match(hashes)
        # An engine finds whole blocks of its own size, and always computes the last token.
        usable = np.minimum(depth * ROUTER_BLOCK, max(0, length - 1))
        usable -= usable % self._grain
        return Question(request, hashes, depth, usable.astype(np.float64))

    def _root(self, salt: str) -> int:
        if not salt:
            root = self._roots.get((self._model, ""))
            if root is None:
                root = self._roots[self._model, ""] = prefix_root(self._model)
            return root
        return prefix_root(self._model, salt=salt)

    @property
    def dead(self) -> Set[str]:
        """Replicas that said that their engine ended, or do not say anything any more."""
        slots = self.fleet.dead | self.fleet.gone
        return {self._names[slot] for slot in slots} if slots else frozenset()

    def choose(self, question: Question, excluded: Collection[str] = (), *, even_dead: bool = False) -> Choice | None:
        """The replica for a request, but none of ``excluded`` and none whose engine is dead; None where that is all."""
        slots = self._live
        dead = set() if even_dead else self.fleet.dead | self.fleet.gone
        if excluded or dead:
            allowed = np.ones(len(self._names), np.bool_)
            allowed[[*dead, *(self._replicas[name].slot for name in excluded if name in self._replicas)]] = False
            slots = slots[allowed[slots]]
        if not len(slots):
            return None
        candidates = self._candidates(question, slots)
        try:
            policy = self._policy if len(question.request.prompt) else self._fallback
            index = policy.choose(candidates)
            slot = int(slots[index])
        except Exception:
            logger.exception("the routing policy failed; taking the less loaded of two replicas")
            slot = int(slots[self._fallback.choose(candidates)])
        return Choice(self._names[slot], slot, int(question.cached[slot]), least(candidates.loads.wait))

    def _candidates(self, question: Question, slots: Slots) -> Candidates:
        every = len(slots) == len(self._names)
        loads = self.fleet.loads(self._clock(), None if every else slots)
        cached = question.cached if every else question.cached[slots]
        request = question.request
        return Candidates(self._names, slots, len(request.prompt), cached, loads, request.session)

    def reserve(self, question: Question, choice: Choice, request_id: str, call: int) -> None:
        """The request goes there: what it will cost and what it will leave in the cache counts from now on."""
        now, slot = self._clock(), choice.slot
        tokens = len(question.request.prompt) - choice.cached_tokens
        self.fleet.reserve(slot, request_id, call, tokens, now)
        new = question.hashes[question.depth[slot] :]
        replica = self._replicas.get(choice.replica)
        if len(new) and replica is not None and replica.info.caches:
            self.index.expect(slot, new, float(self.fleet.figures.free_at[slot]) + EXPECT_S)

    def release(self, name: str, request_id: str) -> None:
        """A call ended, however."""
        if (replica := self._replicas.get(name)) is not None:
            self.fleet.release(replica.slot, request_id)
