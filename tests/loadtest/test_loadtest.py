"""The measuring itself, against a server whose times are known."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest import records
from loadtest.records import Record, Summary, summarise
from loadtest.workload import Workload

ROOT = Path(__file__).resolve().parents[2]

# Looked for, never imported here: locust patches sockets, threads and locks of the whole process that imports it, and
# threads that other tests left in this one would then wait for ever.
if find_spec("locust") is None:
    pytest.skip("locust is not installed: pip install '.[loadtest]'", allow_module_level=True)

TTFT, ITL, TOKENS = 0.1, 0.02, 25


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    command = [sys.executable, "-m", "loadtest.mock_server", "--port", "0", "--ttft", str(TTFT), "--itl", str(ITL)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def run(host: str, folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Record], Summary]:
    """A short headless run of the locustfile; its output, records and summary."""
    path = folder / "records.jsonl"
    command = [
        *(sys.executable, "-m", "locust", "--headless", "--only-summary", "-f", "loadtest/locustfile.py"),
        *("--host", host, "--max-tokens", str(TOKENS), "--records", str(path), *options),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    summary = msgspec.json.decode(path.with_suffix(".summary.json").read_bytes(), type=Summary)
    return done, records.read(path), summary


def test_closed_loop_reads_the_times_that_the_server_keeps(mock: str, tmp_path: Path) -> None:
    done, found, summary = run(mock, tmp_path, "--users", "4", "--spawn-rate", "4", "--run-time", "4s")
    assert done.returncode == 0, done.stdout + done.stderr
    ok = [record for record in found if record.outcome == "ok"]
    assert len(ok) == summary.ok >= 8
    assert {record.output_tokens for record in ok} == {len(record.token_times) for record in ok} == {TOKENS}
    assert {(r.prompt_tokens, r.cached_tokens, r.finish_reason, r.request_id) for r in ok} == {(7, 5, "length", "mock")}
    assert summary.output_tokens == sum(len(record.token_times) for record in found) >= TOKENS * summary.ok
    assert re.search(r"time to first token +\d+\.\d", done.stdout)
    # What other work on this machine adds to a time is not the reader's fault, and is least in the quickest quarter.
    # Nothing is subtracted: a reader that waits for more than the first token is late in all of them.
    assert quartile([record.ttft for record in ok]) == pytest.approx(TTFT, rel=0.05)
    assert quartile([record.e2e for record in ok]) == pytest.approx(TTFT + (TOKENS - 1) * ITL, rel=0.05)
    assert summary.itl.p50 == pytest.approx(ITL, rel=0.05)
    assert summary.itl.mean == pytest.approx(ITL, rel=0.05)
    assert summary.tpot.p50 == pytest.approx(ITL, rel=0.05)


def quartile(values: list[float]) -> float:
    return records.quantile(sorted(values), 0.25)


def test_open_loop_sends_at_its_rate_whatever_the_server_does(mock: str, tmp_path: Path) -> None:
    """20 requests a second against answers of 0.6 s: a closed loop of one user would send two."""
    done, found, summary = run(mock, tmp_path, "--users", "1", "--rate", "20", "--run-time", "5s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 60 <= len(found) <= 140, "Poisson, mean about 95"
    assert summary.unfinished > 0, "those in flight at the end are neither successes nor failures"
    assert summary.lag.p50 < 0.01
    arrivals = np.diff(sorted(record.scheduled for record in found))
    assert arrivals.std() / arrivals.mean() == pytest.approx(1, abs=0.35), "exponential gaps have a variation of 1"


def test_records_of_worker_processes_are_merged(mock: str, tmp_path: Path) -> None:
    options = ("--users", "4", "--spawn-rate", "4", "--run-time", "4s", "--processes", "2")
    done, found, summary = run(mock, tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    in_locust = int(re.search(r"Aggregated +(\d+)", done.stdout + done.stderr)[1])
    assert summary.ok == in_locust >= 8
    assert len(found) == summary.ok + summary.unfinished


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("error", "error event: the engine died"),
        ("cut", "the stream ended before [DONE]"),
        ("busy", 'HTTP 429: {"error": {"message": "queue is full", "type": "overloaded"}}'),
    ],
)
def test_faults_are_failures(mock: str, tmp_path: Path, model: str, error: str) -> None:
    done, found, summary = run(mock, tmp_path, "--users", "1", "--run-time", "3s", "--model", model)
    assert done.returncode == 1
    assert summary.ok == 0
    assert summary.failed == summary.errors[error] > 0
    assert summary.failed <= 6, "after a failure a user waits before it asks again"
    assert {record.error for record in found if record.outcome == "failed"} == {error}
    assert error[:20] in done.stdout + done.stderr


def test_unreachable_server_is_a_failure(tmp_path: Path) -> None:
    done, _, summary = run("http://127.0.0.1:9", tmp_path, "--users", "1", "--run-time", "3s")
    assert done.returncode == 1
    assert summary.failed >= 1


@pytest.mark.parametrize("host", ["http://192.0.2.1:8000", "http://localhost.example.org"])
def test_other_hosts_are_refused(host: str) -> None:
    command = [sys.executable, "-m", "locust", "--headless", "-f", "loadtest/locustfile.py", "--host", host, "-t", "1s"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert f"{host} is not this machine" in done.stderr


# --- the parts -------------------------------------------------------------------------------------------------------


def test_sse_events() -> None:
    from loadtest.sse import events

    stream = b': hello\n\ndata: one\n\ndata:two\r\ndata:  lines\r\n\r\nevent: error\ndata: {"a": 1}\nid: 7\n\ndata: cut'
    found = [(event.name, event.data) for event in events(stream.splitlines(keepends=True))]
    assert found == [("message", "one"), ("message", "two\n lines"), ("error", '{"a": 1}')]
    assert "locust" not in sys.modules, "or the other tests of this process run on gevent's threads"


def test_quantiles_are_exact() -> None:
    values = np.random.default_rng(0).exponential(size=37)
    found = records.distribution(list(values))
    expected = np.quantile(values, records.QUANTILES)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx(tuple(expected))
    assert (found.mean, found.max, found.count) == (pytest.approx(values.mean()), values.max(), 37)
    assert records.distribution([]) is None


def test_latency_counts_from_when_a_request_should_have_gone_out() -> None:
    late = Record(
        scheduled=10, sent=11, ended=14, outcome="ok", token_times=[12.0, 13.0, 13.5], output_tokens=4, prompt_tokens=5
    )
    failed = Record(scheduled=10, sent=10, ended=15, outcome="failed", error="HTTP 429")
    unfinished = Record(scheduled=12, sent=12, ended=15, outcome="unfinished", token_times=[13.0])
    summary = summarise([late, failed, unfinished])
    assert (summary.ok, summary.failed, summary.unfinished, summary.errors) == (1, 1, 1, {"HTTP 429": 1})
    assert summary.ttft.max == 2
    assert summary.e2e.max == 4
    assert (summary.itl.count, summary.itl.mean, summary.itl.max) == (2, 0.75, 1)
    assert summary.tpot.max == 0.5, "three tokens after the first in 1.5 s: two of them came in one piece"
    assert summary.lag.max == 1
    assert summary.seconds == 5
    assert summary.output_tokens_per_second == 5 / 5, "one of them in the answer that the end cut"


def test_records_survive_the_file(tmp_path: Path) -> None:
    some = [
        Record(scheduled=1, sent=1, ended=2, outcome="ok", token_times=[1.5], output_tokens=1, finish_reason="stop")
    ]
    records.write(some, summarise(some), tmp_path / "deep" / "run.jsonl")
    assert records.read(tmp_path / "deep" / "run.jsonl") == some


def test_workload_is_seeded_and_shares_prefixes() -> None:
    workload = Workload("m", (5, 50), (8, 16), shared_words=100, groups=3)
    some = [workload.request(random.Random(seed)) for seed in range(60)]
    assert some == [workload.request(random.Random(seed)) for seed in range(60)]
    assert len({request["messages"][0]["content"] for request in some}) == 3
    assert len({request["messages"][1]["content"] for request in some}) == 60
    assert {len(request["messages"][1]["content"].split()) for request in some} == {5, 50}
    assert {request["max_tokens"] for request in some} == {8, 16}
