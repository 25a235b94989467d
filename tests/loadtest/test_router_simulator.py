"""The simulator: its model by hand, and what the production router has to achieve in it."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.routing.policies.base import Candidates, RoutingPolicy
from deployments.routing.policies.least_work import LeastWork
from deployments.routing.policies.prefix import Prefix
from loadtest.router import rules
from loadtest.router.fleet import Engine, Replica
from loadtest.router.report import write_html
from loadtest.router.simulator import Outcome, Setting, Simulator
from loadtest.router.workload import BLOCK, Request, Workload, agents, groups, ideal_hit_rate, trace


def prefix(rng: random.Random) -> RoutingPolicy:
    return Prefix(rng=rng)


def test_first_tokens_come_when_they_must() -> None:
    """Three prompts, one replica, each second of it by hand."""
    engine = Engine(rate=1000, slowdown=0.1, overhead=0.0, token_s=1.0, harm_s=0.0)
    ids = np.arange(4)
    requests = [
        Request(0.0, ids[:2], 1024, 100),
        Request(0.5, ids[:3], 1536, 100),  # waits for the first; 1,024 cached, but slowed by the first's decoding
        Request(50.0, ids[:2], 1024, 1),  # finds all but its last block, which holds the last token
    ]
    outcome = Simulator(Workload("w", requests), Setting(1, engine=engine), policy=prefix).run()
    assert outcome.ttft == pytest.approx([1.024, 0.524 + 0.512 * 1.1, 0.512 * 1.2])
    assert outcome.hit_rate == pytest.approx((1024 + 512) / (1024 + 1536 + 1024)) == pytest.approx(outcome.ideal)


def test_a_full_cache_evicts_the_end_of_the_oldest_chain_and_says_so() -> None:
    replica = Replica(0, Engine(blocks=5))
    first, second = Request(0.0, np.arange(4), 4 * BLOCK + 1, 1), Request(0.0, np.arange(10, 13), 3 * BLOCK, 1)
    replica.admit(first)
    replica.admit(second)
    assert list(replica.cache) == [1, 0, 12, 11, 10]
    events = replica.events()
    assert events is not None
    assert len(events.stored_hashes()) == 5 * BLOCK // 64
    assert replica.cached(first) == 2 * BLOCK


def test_equal_blocks_have_equal_tokens_and_others_do_not() -> None:
    a, b = Request(0.0, np.array([1, 2, 3]), 1300, 1), Request(0.0, np.array([1, 2, 4]), 1536, 1)
    assert len(a.prompt) == 1300
    assert (a.prompt[:1024] == b.prompt[:1024]).all()
    assert (a.prompt[1024:] != b.prompt[1024:1300]).all()


def test_ideal_is_of_one_endless_cache() -> None:
    requests = [Request(0.0, np.array([1, 2]), 1024, 1), Request(1.0, np.array([1, 2, 3]), 1536, 1)]
    assert ideal_hit_rate(requests) == 1024 / 2560


def run(workload: Workload, setting: Setting | None = None, **how: object) -> Outcome:
    return Simulator(workload, setting or Setting(), **how).run()  # type: ignore[arg-type]


def test_one_hot_prompt_is_spread_evenly() -> None:
    outcome = run(groups(1, 40.0, 1500, 0), policy=prefix)
    assert outcome.skew < 0.05
    assert np.percentile(outcome.ttft, 99) < 0.5
    shipped = run(groups(1, 40.0, 1500, 0), rule=rules.RayPrefix)
    assert shipped.skew > 2, "which is what it is for"


def test_many_groups_stay_together() -> None:
    setting = Setting(engine=Engine(blocks=600))
    outcome = run(groups(150, 40.0, 4000, 0), setting, policy=prefix)
    assert outcome.hit_rate > 0.97 * outcome.ideal
    assert outcome.ttft.mean() < 0.5


def test_several_ingresses_are_as_good_as_one() -> None:
    one = run(agents(60, 10, 0), policy=prefix)
    eight = run(agents(60, 10, 0), Setting(ingresses=8), policy=prefix)
    assert eight.hit_rate > 0.97 * one.hit_rate
    assert eight.ttft.mean() < 1.15 * one.ttft.mean()
    assert eight.wrong < 0.02


def test_more_than_the_fleet_can_do_is_refused_and_the_rest_is_in_time() -> None:
    setting = Setting(engine=Engine(blocks=600), ingresses=2)
    rate, total = 250.0, 1500
    queued = run(groups(20, rate, total, 0), setting, policy=prefix)
    bounded = run(groups(20, rate, total, 0), replace(setting, max_wait=2.0), policy=prefix)
    assert np.percentile(queued.ttft, 99) > 8
    assert bounded.ttft.max() < 2 + 2, "the bound, and its own prompt"
    assert len(bounded.ttft) + bounded.refused == total
    served = [len(one.ttft) / (total / rate + one.ttft.max()) for one in (bounded, queued)]
    assert served[0] > 0.8 * served[1], "no replica idles for it"
    assert run(groups(20, 60.0, 300, 0), replace(setting, max_wait=2.0), policy=prefix).refused == 0


@pytest.mark.parametrize("lost", [0.01, 1.0])
def test_events_that_are_lost_cost_time_and_nothing_else(lost: float) -> None:
    whole = run(agents(60, 10, 0), policy=prefix)
    outcome = run(agents(60, 10, 0), Setting(lost=lost), policy=prefix)
    assert len(outcome.ttft) == 600
    assert outcome.hit_rate > 0.97 * whole.hit_rate, "snapshots fill the gaps"


def test_the_production_policy_beats_load_alone() -> None:
    ours, load = (run(agents(60, 10, 0), policy=kind) for kind in (prefix, lambda rng: LeastWork(rng=rng)))
    assert ours.ttft.mean() < 0.7 * load.ttft.mean()


def test_runs_repeat() -> None:
    first, second = (run(groups(20, 20.0, 300, 3), Setting(ingresses=2, seed=3), policy=prefix) for _ in range(2))
    assert (first.ttft == second.ttft).all()


def test_a_policy_that_fails_is_survived() -> None:
    class Broken(RoutingPolicy):
        def choose(self, candidates: Candidates) -> int:
            raise RuntimeError

    assert len(run(groups(2, 20.0, 50, 0), policy=lambda rng: Broken()).ttft) == 50


@pytest.mark.parametrize("rule", [
    rules.RoundRobin, rules.PowerOfTwo, rules.LeastRequests, rules.RayPrefix, rules.SglangThresholds,
    rules.BoundedHashing, rules.Dynamo,
])  # fmt: skip
def test_every_rule_serves_all(rule: type[rules.Rule]) -> None:
    outcome = run(groups(20, 20.0, 200, 0), replace(Setting(), replicas=3), rule=rule)
    assert len(outcome.ttft) == 200
    assert (outcome.ttft > 0).all()


def test_a_trace_is_read_and_jittered(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n' * 20)
    requests = trace(path, 2.0, 3.0, 0).requests
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    assert 1.5 <= arrivals[0] < arrivals[-1] < 3.0
    assert requests[0].tokens == 600


def test_command_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "loadtest.router", "--only", "agents", "--routers", "prefix,least requests"]
    command += ["--html", str(page), "--trace", str(tmp_path / "none.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "skipped: there is no" in done.stderr
    assert done.stdout.count("\nprefix ") == 1
    assert page.read_text().count("<svg") == 2


def test_names_on_the_page_are_escaped(tmp_path: Path) -> None:
    outcome = Outcome(np.array([0.1, 0.2]), 0.5, 0.6, 0.1, 0.3, 0.0)
    write_html(tmp_path / "p.html", [("<b>", [("<i>", outcome)])])
    assert "<i>" not in (tmp_path / "p.html").read_text()
