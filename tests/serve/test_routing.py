"""Load book and policies, without Ray."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.load import LoadBook, ReplicaLoad
from deployments.routing.policy import LeastLoad, RouteRequest

REQUEST = RouteRequest(np.arange(10, dtype=np.int32))


def report(active: int = 0, backlog: int = 0, open_: int = 0, newest: int = -1, **more: Any) -> dict[str, Any]:
    return {"active": active, "backlog_tokens": backlog, "ingresses": {"me": [open_, newest]}, **more}


def book(*replicas: str) -> LoadBook:
    book = LoadBook()
    book.ingress = "me"
    book.update(dict.fromkeys(replicas))
    return book


def test_reservations_count_at_once_and_until_released() -> None:
    b = book("a")
    b.reserve("a", "r1", 0, 100)
    b.reserve("a", "r2", 1, 50)
    assert b.load("a") == ReplicaLoad("a", 2, 150)
    b.release("a", "r1")
    assert b.load("a") == ReplicaLoad("a", 1, 50)
    b.release("a", "r2")
    assert b.load("a") == ReplicaLoad("a", 0, 0)
    assert b.reserved == 0


def test_report_replaces_what_it_includes_and_only_that() -> None:
    b = book("a")
    for call in range(4):
        b.reserve("a", f"r{call}", call, 100)
    # The report has calls 0 and 1 of mine (both open, 30 tokens of them still to prefill), and three of others'.
    b.update({"a": report(active=5, backlog=30, open_=2, newest=1, kv_usage=0.5)})
    assert b.load("a") == ReplicaLoad("a", 3 + 4, 30 + 200, 0.5)
    b.release("a", "r0")  # was in the report: its sequence is gone, the report's tokens stand until the next one
    assert b.load("a") == ReplicaLoad("a", 3 + 3, 30 + 200, 0.5)
    b.release("a", "r3")
    assert b.load("a") == ReplicaLoad("a", 3 + 2, 30 + 100, 0.5)


def test_fan_out_shares_one_request_id() -> None:
    b = book("a", "b")
    for call in range(3):
        b.reserve("a", "same", call, 10)
    b.reserve("b", "same", 3, 10)
    for left in (2, 1, 0):
        b.release("a", "same")
        assert b.load("a").active == left
    b.release("a", "same")  # one too many is harmless
    assert (b.load("a").active, b.load("b").active) == (0, 1)


def test_replicas_that_leave_are_forgotten() -> None:
    b = book("a", "b")
    b.reserve("a", "r", 0, 10)
    b.update({"b": None})
    b.release("a", "r")
    assert b.load("a") == ReplicaLoad("a", 0, 0)
    assert b.reserved == 0


def test_strange_reports_are_no_load() -> None:
    b = book("a")
    b.reserve("a", "r", 0, 10)
    for stats in ({"active": "many"}, {"active": None}, {"ingresses": 7}, {"ingresses": {"me": 3}}, {"other": 1}):
        b.update({"a": stats})
        assert b.load("a") == ReplicaLoad("a", 1, 10)
    b.update({"a": report(dead=True)})
    assert b.dead == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.integers(0, 99))))
def test_book_adds_up_whatever_happens(steps: list[tuple[str, int, bool, int]]) -> None:
    """Reserve, release and reports in any order: with all released, only the reports are left."""
    b = book("a", "b", "c")
    held: list[tuple[str, str]] = []
    for call, (replica, request, reserve, tokens) in enumerate(steps):
        if reserve:
            b.reserve(replica, f"r{request}", call, tokens)
            held.append((replica, f"r{request}"))
        elif held:
            b.release(*held.pop(tokens % len(held)))
        if tokens % 5 == 0:
            b.update({name: report(active=tokens, newest=call - 2) for name in "abc"})
        assert b.reserved == len(held)
        assert all(b.load(name).backlog_tokens >= 0 and b.load(name).active >= 0 for name in "abc")
    for pair in held:
        b.release(*pair)
    b.update({name: report() for name in "abc"})
    assert all(b.load(name) == ReplicaLoad(name, 0, 0) for name in "abc")


def test_least_load_prefers_fewer_tokens_then_fewer_sequences() -> None:
    policy = LeastLoad(sequence_tokens=100)
    loads = [ReplicaLoad("a", 1, 1000), ReplicaLoad("b", 5, 0), ReplicaLoad("c", 2, 400)]
    assert policy.choose(REQUEST, loads) == "b"
    assert policy.choose(REQUEST, loads[::2]) == "c"


def test_ties_are_broken_at_random() -> None:
    policy = LeastLoad(rng=random.Random(0))
    loads = [ReplicaLoad(name, 1, 10) for name in "abc"] + [ReplicaLoad("d", 9, 9)]
    counts = Counter(policy.choose(REQUEST, loads) for _ in range(3000))
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 900


def test_one_router_spreads_a_burst_between_two_reports() -> None:
    """Thirty requests within one report's life: without reservations all of them would go to one replica."""
    b = book("a", "b", "c")
    b.update({"a": report(active=4, backlog=500), "b": report(), "c": report()})
    policy = LeastLoad()
    counts: Counter[str] = Counter()
    for call in range(30):
        chosen = policy.choose(REQUEST, b.loads("abc"))
        b.reserve(chosen, f"r{call}", call, 10)
        counts[chosen] += 1
    assert counts["b"] + counts["c"] > counts["a"] > 0
    assert abs(counts["b"] - counts["c"]) <= 1
