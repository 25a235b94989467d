"""Fleet, policies and RoutingCore, without Ray and with a clock of their own."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.replica import EngineReplica
from deployments.routing.accuracy import PATIENCE, Accuracy
from deployments.routing.core import EXPECT_S, Choice, RouteRequest, RoutingCore
from deployments.routing.load import SILENT_S, Fleet, LoadReport, Loads, ReplicaInfo, read_report
from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import Candidates, RoutingPolicy
from deployments.routing.policies.least_work import LeastWork
from deployments.routing.policies.lmetric import LMetric
from deployments.routing.policies.power_of_two import PowerOfTwo
from deployments.routing.policies.prefix import Prefix
from deployments.routing.policies.round_robin import RoundRobin
from deployments.routing.policies.session import Session
from nanoengine.cache.events import PrefixEvents
from nanoengine.cache.prefix_hash import prefix_hashes, prefix_root
from nanoengine.outputs import Load

TOKENS = np.random.default_rng(0).integers(0, 50_000, 6400).astype(np.int32)
INFO = ReplicaInfo("model", 16, True)
RATE = 10_000.0


def stored(tokens: np.ndarray, seq: int = 1, *, cleared: bool = False, salt: str = "") -> PrefixEvents:
    hashes = prefix_hashes(prefix_root("model", salt=salt), tokens)
    return PrefixEvents(seq, cleared, hashes.tobytes(), b"")


# -- load ----------------------------------------------------------------------------------------------------------


class Now:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def report(number: int, active: int = 0, backlog: float = 0, open_: int = 0, newest: int = -1, **more: Any) -> Any:
    return LoadReport(number=number, active=active, backlog_tokens=backlog, ingresses={"me": (open_, newest)}, **more)


def fleet(slots: int = 3) -> Fleet:
    fleet = Fleet()
    fleet.ingress = "me"
    fleet.widen(slots)
    for slot in range(slots):
        fleet.join(slot, 0.0)
    return fleet


def seen(fleet: Fleet, slot: int, now: float = 0.0) -> tuple[float, float]:
    """(active, backlog) of a slot, the latter to a millionth of a token."""
    loads = fleet.loads(now, np.array([slot]))
    return float(loads.active[0]), round(float(loads.backlog[0]), 6)


def test_reservations_count_at_once_and_until_released() -> None:
    f = fleet()
    f.reserve(0, "r1", 0, 100, 0.0)
    f.reserve(0, "r2", 1, 50, 0.0)
    assert seen(f, 0) == (2, 150)
    f.release(0, "r1")
    f.release(0, "r2")
    assert seen(f, 0)[0] == f.reserved == 0


def test_report_replaces_what_it_includes_and_only_that() -> None:
    f = fleet()
    for call in range(4):
        f.reserve(0, f"r{call}", call, 100, 0.0)
    # The report has calls 0 and 1 of mine (both open, 30 tokens of them still to prefill), and three of others'.
    f.report(0, report(1, active=5, backlog=30, open_=2, newest=1, kv_usage=0.5), 0.0)
    assert seen(f, 0) == (3 + 4, 30 + 200)
    f.release(0, "r0")
    assert seen(f, 0) == (3 + 3, 30 + 200)
    f.report(0, report(1, active=50), 0.0)
    assert seen(f, 0) == (3 + 3, 30 + 200), "a report that was overtaken"


def test_work_shrinks_as_time_goes_by_at_the_known_rate() -> None:
    f = fleet()
    f.report(0, report(1, backlog=1000, prefill_rate=500.0), 10.0)
    assert [seen(f, 0, now)[1] for now in (10.0, 11.0, 12.0, 99.0)] == [1000, 500, 0, 0]
    f.reserve(0, "r", 0, 300, 11.0)
    assert seen(f, 0, 11.0)[1] == 800


def test_reports_through_serve_count_only_while_no_others_come() -> None:
    f = fleet()
    f.report(0, report(0, active=3), 0.0)
    f.report(0, report(0, active=4), 1.0)
    assert seen(f, 0)[0] == 4
    f.report(0, report(7, active=5), 2.0)
    f.report(0, report(0, active=1), 2.5)
    assert seen(f, 0)[0] == 5
    f.report(0, report(0, active=6), 2.0 + SILENT_S)
    assert seen(f, 0)[0] == 6
    f.report(0, report(1, active=2), 5.0)
    assert seen(f, 0)[0] == 2, "a channel that was opened again"


def test_fan_out_shares_one_request_id() -> None:
    f = fleet()
    for call in range(3):
        f.reserve(0, "same", call, 10, 0.0)
    f.reserve(1, "same", 3, 10, 0.0)
    for left in (2, 1, 0):
        f.release(0, "same")
        assert seen(f, 0)[0] == left
    f.release(0, "same")  # one too many is harmless
    assert (seen(f, 0)[0], seen(f, 1)[0]) == (0, 1)


def waits(fleet: Fleet, now: float) -> list[float]:
    return [round(float(wait), 6) for wait in fleet.loads(now).wait]


def test_a_request_waits_for_others_prompts_and_for_a_place() -> None:
    f = fleet()
    f.report(0, report(1, backlog=RATE, prefill_rate=RATE, place_s=0.3), 10.0)
    f.report(1, report(1, backlog=RATE, prefill_rate=RATE, place_s=3.0), 10.0)
    f.report(2, report(1), 10.0)
    assert waits(f, 10.0) == [1.3, 4.0, 0.0]
    assert waits(f, 10.5) == [0.5, 3.0, 0.0], "both pass with time: no report is needed for it"
    assert waits(f, 20.0) == [0.0, 0.0, 0.0]
    f.reserve(0, "r", 0, int(2 * RATE), 20.0)
    assert waits(f, 20.0) == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("open_", "load", "seconds"),
    [
        (9, Load(running=9), 0.0),
        (10, Load(running=10), 0.3),  # the first of ten that stay for 100 steps of 20 + 10 ms
        (30, Load(running=10, waiting=20), 21 * 0.3),
        (6, Load(running=4, waiting=2, blocks_total=100, blocks_used=95), 3 * 100 * 0.024 / 4),  # no blocks for more
        (6, Load(running=4, waiting=2, blocks_total=100, blocks_used=50), 0.0),
    ],
)
def test_a_replica_knows_how_long_a_place_in_its_batch_takes(open_: int, load: Load, seconds: float) -> None:
    counts = SimpleNamespace(total=lambda: open_)
    engine = SimpleNamespace(_info=SimpleNamespace(max_num_seqs=10), _open=counts, _output_tokens=100.0)
    measured = dataclasses.replace(load, step_base=0.02, step_decode=0.001)
    assert EngineReplica._place_s(engine, measured) == pytest.approx(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("stats", [{"active": "many"}, {"active": None}, {"ingresses": 7}, None, 5])
def test_strange_reports_are_none(stats: Any) -> None:
    assert read_report(stats) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(0, 99))))
def test_fleet_adds_up_whatever_happens(steps: list[tuple[int, int, bool, int]]) -> None:
    """Reserve, release and reports in any order: with all released, only the reports are left."""
    f = fleet()
    held: list[tuple[int, str]] = []
    for call, (slot, request, reserve, tokens) in enumerate(steps):
        if reserve:
            f.reserve(slot, f"r{request}", call, tokens, float(call))
            held.append((slot, f"r{request}"))
        elif held:
            f.release(*held.pop(tokens % len(held)))
        if tokens % 5 == 0:
            for other in range(3):
                f.report(other, report(call, active=tokens, newest=call - 2, prefill_rate=3.0), float(call))
        assert f.reserved == len(held)
        assert all(seen(f, other, call + 1.0)[1] >= 0 and seen(f, other)[0] >= 0 for other in range(3))
    for pair in held:
        f.release(*pair)
    for slot in range(3):
        f.report(slot, report(1000), 0.0)
        assert seen(f, slot) == (0, 0)


# -- policies ------------------------------------------------------------------------------------------------------


def candidates(tokens: int = 1000, session: str = "", **arrays: Any) -> Candidates:
    count = max((len(values) for values in arrays.values()), default=3)
    waits = [tokens / RATE for tokens in arrays.get("backlog", [0.0] * count)]
    defaults: dict[str, Any] = {"token_s": [1 / RATE] * count, "wait": waits}
    fields = ("cached", *Loads._fields)
    values = {name: np.array(arrays.get(name, defaults.get(name, [0.0] * count)), float) for name in fields}
    names = [f"r{i}" for i in range(count)]
    return Candidates(names, np.arange(count), tokens, values.pop("cached"), Loads(**values), session)


def shares(policy: RoutingPolicy, c: Candidates, times: int = 900) -> Counter[int]:
    return Counter(policy.choose(c) for _ in range(times))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_among_any_candidates(name: str) -> None:
    for count in (1, 2, 7):
        c = candidates(active=list(range(count)), cached=[900.0] * count, session="s")
        assert set(shares(POLICIES[name](), c, 50)) <= set(range(count))


@pytest.mark.parametrize("name", ["prefix", "least_work", "lmetric", "power_of_two"])
def test_ties_are_broken_at_random(name: str) -> None:
    counts = shares(POLICIES[name](rng=random.Random(0)), candidates())  # type: ignore[call-arg]
    assert min(counts[i] for i in range(3)) > 200


def test_prefix_goes_where_it_is_cached_until_waiting_there_costs_more() -> None:
    policy = Prefix()
    owned = [900.0, 0.0, 0.0]
    assert set(shares(policy, candidates(cached=owned), 50)) == {0}
    assert set(shares(policy, candidates(cached=owned, backlog=[500.0, 0, 0]), 50)) == {0}
    assert 0 not in shares(policy, candidates(cached=owned, backlog=[2000.0, 0, 0]), 50)


def test_prefix_counts_the_wait_for_a_place_in_the_batch() -> None:
    c = candidates(cached=[900.0, 0, 0], wait=[1.0, 0, 0.5])
    assert set(shares(Prefix(), c, 50)) == {1}


def test_prefix_counts_what_is_evicted_only_where_the_cache_is_full() -> None:
    """Cold work goes to a new replica first, as long as it does not have to wait there for much longer."""
    c = candidates(fullness=[1.0, 1.0, 0.0], backlog=[0, 0, 500.0])
    assert set(shares(Prefix(), c, 50)) == {2}
    assert 2 not in shares(Prefix(displacement=0, busy_displacement=0), c, 50)


def test_prefix_avoids_a_replica_short_of_kv_blocks() -> None:
    c = candidates(cached=[900.0, 0, 0], kv_usage=[1.0, 0.5, 0.5])
    assert 0 not in shares(Prefix(), c, 50)


def test_prefix_bounds_skew_whatever_the_index_says() -> None:
    c = candidates(tokens=60_000, cached=[59_000.0, 0, 0], backlog=[200_000.0, 10_000, 10_000], active=[1.0, 1, 1])
    assert 0 not in shares(Prefix(kv_weight=0), c, 50)


def test_prefix_weighs_decodes_by_their_measured_harm() -> None:
    c = candidates(active=[30.0, 0, 30.0], harm=[0.1, 0.1, 0.1], cached=[500.0, 0, 0])
    assert set(shares(Prefix(), c, 50)) == {1}
    assert set(shares(Prefix(decode_weight=0), c, 50)) == {0}


def test_least_work_prefers_fewer_tokens_then_fewer_sequences() -> None:
    policy = LeastWork(sequence_tokens=100)
    assert policy.choose(candidates(active=[1.0, 5, 2], backlog=[1000.0, 0, 400])) == 1
    assert policy.choose(candidates(active=[1.0, 2], backlog=[1000.0, 400])) == 1


def test_lmetric_is_the_product() -> None:
    assert LMetric().choose(candidates(tokens=100, cached=[90.0, 0], active=[4.0, 0], backlog=[20.0, 0])) == 1
    assert LMetric().choose(candidates(tokens=100, cached=[90.0, 0], active=[4.0, 1], backlog=[20.0, 0])) == 0


def test_power_of_two_never_takes_the_most_loaded() -> None:
    counts = shares(PowerOfTwo(rng=random.Random(0)), candidates(active=[1.0, 2, 9]))
    assert set(counts) == {0, 1}
    assert counts[0] > counts[1]


def test_round_robin_takes_turns_also_when_replicas_go() -> None:
    policy = RoundRobin()
    assert sorted(policy.choose(candidates()) for _ in range(3)) == [0, 1, 2]
    assert len({policy.choose(candidates(active=[0.0, 0])) for _ in range(2)}) == 2


def test_session_keeps_together_and_moves_only_what_it_must() -> None:
    policy = Session()
    homes = {}
    for n in range(200):
        homes[n] = policy.choose(candidates(session=f"s{n}", active=[3.0] * 5))
        assert policy.choose(candidates(session=f"s{n}", active=[3.0] * 5)) == homes[n]
    assert min(Counter(homes.values()).values()) > 20
    for n, home in homes.items():
        fewer = policy.choose(candidates(session=f"s{n}", active=[3.0] * 4))
        assert fewer == home or home == 4, "only the lost replica's sessions move"
    busy = policy.choose(candidates(session="s0", active=[3.0 if i != homes[0] else 30.0 for i in range(5)]))
    assert busy != homes[0], "a bound on load comes before affinity"
    quiet = [0.0 if i != homes[0] else 3.0 for i in range(5)]
    assert policy.choose(candidates(session="s0", active=quiet)) == homes[0], "but on a quiet fleet"


@pytest.mark.parametrize(
    ("name", "options"),
    [("prefix", {"displacement": -1}), ("prefix", {"max_skew": 0.5}), ("session", {"bound": 1.0})],
)
def test_impossible_options_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        POLICIES[name](**options)  # type: ignore[call-arg]


# -- the core ------------------------------------------------------------------------------------------------------


def core(*replicas: str, policy: RoutingPolicy | None = None) -> RoutingCore:
    made = RoutingCore(policy or Prefix(rng=random.Random(0)), Now(), random.Random(0))
    made.fleet.ingress = "me"
    made.set_replicas(dict.fromkeys(replicas or ("a", "b", "c"), INFO))
    return made


def place(core: RoutingCore, tokens: np.ndarray, call: int = 0, salt: str = "", **more: Any) -> Choice:
    question = core.look_up(RouteRequest(tokens, salt))
    choice = core.choose(question, **more)
    assert choice is not None
    core.reserve(question, choice, f"r{call}", call)
    return choice


def test_a_prompt_goes_where_its_prefix_is() -> None:
    c = core()
    c.prefixes("b", stored(TOKENS[:640]))
    choice = place(c, TOKENS[:700])
    assert (choice.replica, choice.cached_tokens) == ("b", 640)
    assert place(c, TOKENS[:640], 1).cached_tokens == 624, "the last token is computed, and engines share whole blocks"


def test_another_salt_or_model_shares_nothing() -> None:
    c = core()
    c.prefixes("b", stored(TOKENS[:640], salt="x"))
    assert place(c, TOKENS[:700]).cached_tokens == 0
    assert place(c, TOKENS[:700], 1, "x").replica == "b"
    c.set_replicas(dict.fromkeys("abc", ReplicaInfo("other model", 16, True)))
    assert place(c, TOKENS[:700], 2, "x").cached_tokens == 0


def test_an_engine_of_large_blocks_is_not_credited_with_parts_of_them() -> None:
    c = core()
    c.set_replicas(dict.fromkeys("abc", ReplicaInfo("model", 256, True)))
    c.prefixes("b", stored(TOKENS[:320]))
    assert place(c, TOKENS[:700]).cached_tokens == 256


def test_what_was_sent_is_expected_to_be_there_until_it_is_told_or_too_late() -> None:
    c = core()
    first = place(c, TOKENS[:1000])
    assert first.cached_tokens == 0
    second = place(c, TOKENS[:1000], 1)
    assert (second.replica, second.cached_tokens) == (first.replica, 960)
    c._clock.time += EXPECT_S + 1.0
    assert place(c, TOKENS[:1000], 2).cached_tokens == 0
    c.prefixes(first.replica, stored(TOKENS[:1000]))
    c._clock.time += 100
    assert place(c, TOKENS[:1000], 3).cached_tokens == 960


def test_one_hot_prompt_spreads_over_all() -> None:
    c = core()
    c.prefixes("a", stored(TOKENS[:6400]))
    counts = Counter(place(c, TOKENS[:6400], call).replica for call in range(300))
    assert min(counts.values()) > 60, counts


def test_a_burst_of_cold_prompts_is_spread_by_reservations() -> None:
    c = core()
    prompts = np.random.default_rng(1).integers(0, 50_000, (30, 800)).astype(np.int32)
    counts = Counter(place(c, prompt, call).replica for call, prompt in enumerate(prompts))
    assert sorted(counts.values()) == [10, 10, 10]


def test_events_remove_and_clear() -> None:
    c = core()
    c.prefixes("b", stored(TOKENS[:640], 1))
    hashes = prefix_hashes(prefix_root("model"), TOKENS[:640])
    c.prefixes("b", PrefixEvents(2, False, b"", hashes[5:].tobytes()))
    assert c.look_up(RouteRequest(TOKENS[:700])).cached.max() == 320
    c.prefixes("b", PrefixEvents(3, True, b"", b""))
    assert c.look_up(RouteRequest(TOKENS[:700])).cached.max() == 0


def test_a_gap_asks_for_a_snapshot_until_it_comes() -> None:
    c = core("a")
    assert c.wants() == ["a"], "before the first one"
    c.prefixes("a", stored(TOKENS[:64], 4, cleared=True))
    c._clock.time += 2
    assert c.wants() == []
    c.prefixes("a", stored(TOKENS[:128], 5))
    assert c.wants() == []
    c.prefixes("a", stored(TOKENS[:256], 7))
    assert c.look_up(RouteRequest(TOKENS[:700])).cached.max() == 256, "what is known stays in use"
    assert c.wants() == ["a"]
    assert c.wants() == [], "once a second"
    c._clock.time += 2
    assert c.wants() == ["a"]
    c.prefixes("a", stored(TOKENS[:192], 8, cleared=True))
    c._clock.time += 2
    assert c.wants() == []
    assert c.look_up(RouteRequest(TOKENS[:700])).cached.max() == 192


def test_events_of_which_none_arrive_are_a_gap() -> None:
    c = core("a")
    c.prefixes("a", stored(TOKENS[:64], 4, cleared=True))
    c.load("a", report(1, prefixes=4))
    c._clock.time += 2
    assert c.wants() == []
    c.load("a", report(2, prefixes=6))
    assert c.wants() == ["a"]


def test_garbage_instead_of_hashes_is_a_gap() -> None:
    c = core("a")
    c.prefixes("a", PrefixEvents(1, True, b"", b""))
    c.prefixes("a", PrefixEvents(2, False, b"odd", b""))
    c._clock.time += 2
    assert c.wants() == ["a"]


def test_a_replica_that_is_gone_gets_nothing_and_leaves_nothing() -> None:
    c = core()
    c.prefixes("b", stored(TOKENS[:640]))
    place(c, TOKENS[:640])
    c.forget("b")
    assert {place(c, TOKENS[:700], call).replica for call in range(20)} == {"a", "c"}
    c.release("b", "r0")
    c.prefixes("b", stored(TOKENS[:640], 2))
    for _ in range(5):
        c.wants()
    c.set_replicas(dict.fromkeys("acd", INFO))
    assert c._replicas["d"].slot == 1, "its slot is used again"
    question = c.look_up(RouteRequest(TOKENS[:700]))
    assert question.cached[1] == 0


def test_a_replica_that_falls_silent_gets_nothing_more() -> None:
    c = core()
    for name in "ab":
        c.load(name, report(1))
    c.load("c", report(0))  # there has been no way to it but Serve's
    for second in range(1, 8):
        c._clock.time += 1
        c.load("b", report(1 + second))
        c.load("a", report(0, active=second))  # Serve goes on telling what it was told last
        c.wants()
        assert c.dead == ({"a"} if second > 5 else set())
    assert "a" not in {place(c, TOKENS[:100], call).replica for call in range(20)}
    c.load("a", report(2))
    c.wants()
    assert c.dead == set()


def test_dead_and_excluded_replicas() -> None:
    c = core()
    c.load("a", report(1, dead=True))
    assert c.dead == {"a"}
    assert {place(c, TOKENS[:100], call, excluded={"b"}).replica for call in range(9)} == {"c"}
    question = c.look_up(RouteRequest(TOKENS[:100]))
    assert c.choose(question, {"b", "c"}) is None
    assert c.choose(question, {"b", "c", "unheard of"}, even_dead=True) is not None
    assert core("x").choose(core("x").look_up(RouteRequest(TOKENS[:1])), {"x"}) is None


@pytest.mark.parametrize("prompt", [TOKENS[:0], TOKENS[:1], TOKENS[:63]])
def test_short_and_empty_prompts_go_by_load(prompt: np.ndarray) -> None:
    c = core()
    c.load("a", report(1, active=90, backlog=90_000))
    counts = Counter(place(c, prompt, call).replica for call in range(40))
    assert counts["a"] == 0
    assert min(counts["b"], counts["c"]) > 10


def test_a_policy_that_fails_costs_the_hint_not_the_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RoutingPolicy):
        uses_prefixes = True

        def choose(self, candidates: Candidates) -> int:
            raise RuntimeError("broken")

    c = core(policy=Broken())
    assert {place(c, TOKENS[:100], call).replica for call in range(30)} == {"a", "b", "c"}
    assert "the routing policy failed" in caplog.text

    class Wrong(RoutingPolicy):
        def choose(self, candidates: Candidates) -> int:
            return 99

    assert {place(core(policy=Wrong()), TOKENS[:100]).replica} <= {"a", "b", "c"}


def test_a_silent_replica_is_taken_to_be_as_busy_as_the_others() -> None:
    c = core()
    c._clock.time += SILENT_S + 1
    for name in "ab":
        c.load(name, report(1, active=9, backlog=50_000, prefill_rate=RATE))
    question = c.look_up(RouteRequest(TOKENS[:100]))
    counts = Counter(choice.replica for _ in range(60) if (choice := c.choose(question)))
    assert counts["c"] < 40, "no news is not an invitation"


def test_a_choice_says_how_long_at_least_a_request_will_wait() -> None:
    c = core()
    question = c.look_up(RouteRequest(TOKENS[:100]))
    for name, backlog in (("a", 3 * RATE), ("b", 5 * RATE), ("c", 4 * RATE)):
        c.load(name, report(1, backlog=backlog, prefill_rate=RATE))
    choice = c.choose(question)
    assert choice is not None
    assert choice.wait_s == pytest.approx(3.0)
    without = c.choose(question, {"a"})
    assert without is not None
    assert without.wait_s == pytest.approx(4.0)
    c.load("c", report(2))
    free = c.choose(question)
    assert free is not None
    assert free.wait_s == 0.0, "an idle replica is never late, whatever its own prompt takes"


def test_a_new_replica_gets_cold_work_and_known_prefixes_stay() -> None:
    c = core("a", "b")
    for name in "ab":
        c.load(name, report(1, fullness=1.0, prefill_rate=RATE))
    c.prefixes("a", stored(TOKENS[:6400]))
    c.set_replicas(dict.fromkeys("abc", INFO))
    c.load("c", report(1, prefill_rate=RATE))
    cold = np.random.default_rng(2).integers(0, 50_000, 3000).astype(np.int32)
    assert place(c, cold).replica == "c"
    assert place(c, TOKENS[:6400], 1).replica == "a"


def test_poisoned_index_is_bounded_by_load() -> None:
    """One replica claims every prefix there is: it gets its share and no more than it can work off."""
    c = core()
    prompts = np.random.default_rng(3).integers(0, 50_000, (300, 640)).astype(np.int32)
    for seq, prompt in enumerate(prompts, 1):
        c.prefixes("a", stored(prompt, seq))
    actual: Counter[str] = Counter()
    for call, prompt in enumerate(prompts):
        choice = place(c, prompt, call)
        actual[choice.replica] += len(prompt)
        # What it really has to do, it reports.
        c.load("a", report(call + 1, active=call, backlog=actual["a"], newest=call, open_=call, prefill_rate=RATE))
    assert actual["a"] < 0.5 * actual.total()


def test_ids_of_other_replicas_and_events_before_joining_are_ignored() -> None:
    c = core("a")
    c.load("b", report(1))
    c.prefixes("b", stored(TOKENS[:64]))
    c.release("b", "r")
    c.forget("b")
    assert place(c, TOKENS[:100]).replica == "a"


def test_memory_is_flat_over_unique_prompts() -> None:
    c, rng = core(), np.random.default_rng(4)
    sizes = []
    for call in range(6000):
        place(c, rng.integers(0, 50_000, 200).astype(np.int32), call)
        for name in "abc":
            c.release(name, f"r{call}")
        c._clock.time += 0.1
        c.wants()
        if call % 2000 == 1999:
            sizes.append((c.index.nbytes, len(c.index._expected), len(c.index._deadlines)))
    assert len(set(sizes)) == 1 or max(size[1] for size in sizes) < 500


def test_what_was_expected_leaves_no_garbage() -> None:
    """A cycle of references waits for the oldest generation's collection, and that for a quarter of the process."""
    c = core()
    gc.collect()
    gc.disable()
    try:
        for call in range(20):
            place(c, TOKENS[64 * call : 64 * call + 640], call)
        c._clock.time += 100
        c.wants()
        assert not c.index._expected
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.soak
def test_memory_is_flat_over_100_000_unique_prompts() -> None:
    """Of 2,000 tokens, with all that engines tell of them: caches fill, and give up the oldest."""
    c, rng = core(policy=Prefix(rng=random.Random(0))), np.random.default_rng(5)
    held: dict[str, deque[np.ndarray]] = {name: deque() for name in "abc"}
    seqs: Counter[str] = Counter()
    sizes, process = [], psutil.Process()
    for call in range(100_000):
        prompt = rng.integers(0, 150_000, 2000, np.int32)
        name = place(c, prompt, call).replica
        new, seqs[name] = prefix_hashes(prefix_root("model"), prompt), seqs[name] + 1
        held[name].append(new)
        old = held[name].popleft() if len(held[name]) > 800 else new[:0]  # 25,000 hashes: 1.6 million tokens
        c.prefixes(name, PrefixEvents(seqs[name], seqs[name] == 1, new.tobytes(), old.tobytes()))
        for other in "abc":
            c.load(other, report(call + 1, newest=call, prefill_rate=RATE, prefixes=seqs[other]))
        c.release(name, f"r{call}")
        c._clock.time += 0.02
        c.wants()
        if call % 10_000 == 9_999:
            sizes.append((process.memory_info().rss / 1e6, c.index.nbytes / 1e6, len(c.index), len(c.index._expected)))
    print(sizes)
    assert sizes[-1][0] - sizes[1][0] < 2, "MB"
    assert sizes[-1][1] == sizes[1][1]
    assert sizes[-1][2] == sizes[1][2] == 3 * 800 * 31


def test_accuracy_complains_of_errors_that_stay() -> None:
    a = Accuracy()
    assert not any(a.add("good", 500, 480, 1000) for _ in range(1000))
    assert not any(a.add("once", 900 if n % 20 == 0 else 0, 0, 1000) for n in range(1000))
    complaints = [n for n in range(200) if a.add("bad", 900, 0, 1000)]
    assert complaints == [PATIENCE - 1, 2 * PATIENCE - 1, 3 * PATIENCE - 1, 4 * PATIENCE - 1]
    assert any(a.add("unaware", 0, 900, 1000) for _ in range(PATIENCE))
    for n in range(5000):
        a.add(f"ingress {n}", 0, 0, 10)
    assert len(a._errors) <= 1024
