"""The autoscaling simulator: its model by hand, and what the production policy has to achieve in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.autoscale.__main__ import SCALERS, main, simulate
from loadtest.autoscale.simulator import Fleet, Outcome, Setting
from loadtest.autoscale.workload import Request, Workload, shaped, trace
from loadtest.router.fleet import Engine

SETTING = Setting()


class Fixed:
    """Orders by the clock."""

    def __init__(self, *orders: tuple[float, int]) -> None:
        self._orders = orders

    def desired(self, fleet: Fleet) -> int:
        return next(count for time, count in reversed(self._orders) if fleet.now >= time)


def fixed(workload: Workload, setting: Setting, *orders: tuple[float, int]) -> Outcome:
    return Fleet(workload, setting, lambda *_: Fixed(*orders)).run()


def test_seconds_are_those_of_the_model() -> None:
    engine = Engine(rate=1000, slowdown=0.1, overhead=0.0, token_s=1.0, harm_s=0.5)
    requests = [Request(0.0, 2000, 100), Request(1.0, 1000, 2)]  # the second waits, and is slowed by the first's tokens
    outcome = fixed(Workload("w", requests, 300), replace(SETTING, engine=engine), (0, 1))
    assert outcome.ttft == pytest.approx([2.0, 1.0 + 1.1])
    assert [request.token_s for request in requests] == [1.5, 2.0]
    assert outcome.replica_hours == pytest.approx(300 / 3600)


def test_replicas_cost_from_order_to_end_and_those_that_start_go_first() -> None:
    setting = replace(SETTING, start_s=100.0)
    outcome = fixed(Workload("w", [], 200), setting, (0, 1), (50, 3), (80, 2), (150, 1))
    assert outcome.replica_hours * 3600 == pytest.approx(200 + 30 + 100, abs=1)
    assert (outcome.events, outcome.wrong_way, outcome.final) == (3, 1, 1)


def test_a_drained_replica_finishes_what_it_has() -> None:
    requests = [Request(float(i), 4000, 400) for i in range(20)]
    outcome = fixed(Workload("w", requests, 100), replace(SETTING, start_s=1.0), (0, 2), (15, 1))
    assert (outcome.ttft > 0).all()
    assert len(outcome.ttft) == 20


def test_what_comes_to_no_replica_is_held_until_one_is_up() -> None:
    """From zero, by Serve's own way past all delays."""
    setting = replace(SETTING, smallest=0)
    outcome = simulate(Workload("w", [Request(10.0, 100, 10)], 600), setting, "ours")
    assert setting.start_s * 0.9 < outcome.ttft[0] < setting.start_s * 1.1 + 2
    assert outcome.counts[1:] == [(pytest.approx(10.5, abs=0.6), 1), (pytest.approx(220, abs=25), 0)]


def test_no_load_is_a_fixed_point() -> None:
    outcome = simulate(Workload("w", [], 1200), SETTING, "ours")
    assert outcome.counts == [(0.0, 1)]


def test_constant_load_does_not_flap() -> None:
    outcome = simulate(shaped("constant", lambda t: 8.0, 1200), SETTING, "ours")
    counts = [count for time, count in outcome.counts if time > 60]
    assert counts == sorted(counts, reverse=True), "once what waited is done, it never asks for more"
    assert outcome.wrong_way == 0
    assert outcome.lost_minutes < 1
    assert outcome.final == 1, "and comes down when it is over"


def test_half_of_what_serve_loses_is_not_lost_and_for_less() -> None:
    """Bursts of a minute or less out of nothing, as in Azure's trace of code completions."""
    bursty = shaped("bursty", lambda t: (20.0, 0.5, 0.5, 8.0, 0.5, 0.5, 0.5)[int(t // 40) % 7], 1200)
    ours, serve = (simulate(bursty, SETTING, name) for name in ("ours", "Serve, target 2"))
    assert serve.lost_minutes > 0.5
    assert ours.lost_minutes <= serve.lost_minutes / 2
    assert ours.replica_hours <= serve.replica_hours


@pytest.mark.parametrize("name", SCALERS)
def test_every_scaler_serves_all_and_comes_back(name: str) -> None:
    outcome = simulate(shaped("spike", lambda t: 10.0 if t < 60 else 1.0, 300), SETTING, name)
    assert (outcome.ttft > 0).all()
    assert all(1 <= count <= SETTING.largest for _, count in outcome.counts)
    assert max(count for _, count in outcome.counts) > 1


def test_runs_repeat() -> None:
    first, second = (simulate(shaped("s", lambda t: 6.0, 120, seed=3), SETTING, "ours") for _ in range(2))
    assert (first.ttft == second.ttft).all()
    assert first.counts == second.counts


def test_traces_are_read_in_both_forms(tmp_path: Path) -> None:
    azure, aibrix = tmp_path / "azure.csv", tmp_path / "aibrix.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,3180,8\n"
    )
    aibrix.write_text("timestamp_ms,prompt_length,output_length\n6011,178,8\n6917,258,40\n")
    assert [(r.arrival, r.tokens, r.output) for r in trace(azure).requests] == [(0, 4808, 10), (1.5, 3180, 8)]
    assert [r.arrival for r in trace(aibrix).requests] == pytest.approx([0, 0.906])
    assert len(trace(aibrix, load=3).requests) == 6


def test_command_prints_tables_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["autoscale", "--only", "nothing", "--html", str(page)])
    main()
    assert capsys.readouterr().out.count("\nServe, target ") == 4
    assert page.read_text().count("<svg") == 2
    monkeypatch.setattr("sys.argv", ["autoscale", "--trace", "none.csv"])
    main()
    assert "skipped: there is no none.csv" in capsys.readouterr().err
