"""The ends of a service's life on a real Serve: ready when it can answer and not before, and stopped in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deployments.run import drain
from tests.serve.cluster import LOOPS, NAME, Cluster, config, eventually, free_port

QUICK_S = 2.5  # replica_wait_s, and what a busy machine adds
END_S = 10.0  # for Serve's and Ray's processes to end, once no request is left


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "x", "max_tokens": tokens, "ignore_eos": True, **more}


@dataclass
class Probe:
    """One answer, or none."""

    status: int
    seconds: float
    text: str = ""
    retry_after: str | None = None

    @property
    def enveloped(self) -> bool:
        return '"code":"engine_unavailable"' in self.text and int(self.retry_after or 0) >= 1


def probe(url: str, path: str, asked: dict[str, Any] | None = None) -> Probe:
    begun = time.monotonic()
    try:
        answer = httpx.request("POST" if asked else "GET", url + path, json=asked, timeout=30)
    except httpx.HTTPError:
        return Probe(0, time.monotonic() - begun)
    seconds = time.monotonic() - begun
    return Probe(answer.status_code, seconds, answer.text, answer.headers.get("retry-after"))


def probe_all(url: str) -> tuple[Probe, Probe, Probe]:
    """Readiness in both of its forms, and then a request: what is called ready has to answer it."""
    return probe(url, "/health"), probe(url, "/v1/models"), probe(url, "/v1/completions", body(2))


def test_it_is_ready_when_an_engine_is_and_not_before(cluster: Cluster, tmp_path: Path) -> None:
    """Case D08, with two engines that load one after the other."""
    data = config(
        args__tickets=str(tmp_path),
        EngineReplica__ray_actor_options={"num_cpus": 0.5},
        EngineReplica__graceful_shutdown_timeout_s=5,
        Ingress__graceful_shutdown_timeout_s=5,
    )
    app = data["applications"][0]
    app["import_path"] = "tests.serve.late:build"
    engine = next(one for one in app["deployments"] if one["name"] == "EngineReplica")
    del engine["autoscaling_config"]
    engine["num_replicas"] = 2
    cluster.deploy(data, wait=False)
    eventually(lambda: probe(cluster.url, "/version").status == 200, 60, "an ingress")
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for found in probe_all(cluster.url):
            assert (found.status, found.enveloped) == (503, True), found
            assert found.seconds < QUICK_S
    for replicas in (1, 2):
        (tmp_path / "ticket").touch()
        while True:
            count = cluster.replicas()  # before it is asked: what comes up meanwhile may answer, and need not
            health, models, answer = probe_all(cluster.url)
            assert max(health.seconds, models.seconds, answer.seconds) < QUICK_S
            if 200 in (health.status, models.status):
                assert answer.status == 200, "called ready, and was not"
            else:
                assert count == 0
            if count == replicas:
                break
        assert (health.status, models.status) == (200, 200)


@dataclass
class Reading:
    """A stream that is read to its end by a thread of its own."""

    url: str
    tokens: int
    got: int = 0
    done: bool = False
    error: bool = False
    ended: float = 0.0

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            asked = body(self.tokens, stream=True)
            with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.got += line.startswith("data: {")
                    self.done |= line == "data: [DONE]"
                    self.error |= line.startswith('data: {"error"')
        except httpx.HTTPError:
            pass
        self.ended = time.monotonic()

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "it hangs"


def test_what_is_open_ends_before_sockets_close(cluster: Cluster) -> None:
    """Case D22: readiness goes first, then new requests are told to come back, and what is open has its time."""
    eventually(cluster.healthy, 30, "the service of the test before")
    short, long = Reading(cluster.url, 400), Reading(cluster.url, 1200)  # of 2 and 6 s at least
    eventually(lambda: short.got > 10 and long.got > 10, 10, "streams")
    left: list[int] = []
    draining = threading.Thread(target=lambda: left.append(drain("llm", 4, threading.Event())))
    begun = time.monotonic()
    draining.start()
    eventually(lambda: probe(cluster.url, "/health").status == 503, 2, "red health")
    while not short.ended:
        for found in probe_all(cluster.url):
            assert (found.status, found.enveloped) == (503, True), found
            assert found.seconds < 1
    assert short.done
    draining.join(30)
    assert left == [1], "the long one, after all the time there was"
    assert 4 <= time.monotonic() - begun < 4 + 3
    long.wait()
    assert (long.error, long.done) == (True, False)
    assert drain("llm", 4, threading.Event()) == 0


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "twice"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_stops_the_service_in_order(tmp_path: Path, number: signal.Signals, twice: bool) -> None:
    """Case D22, of the process that `make serve` runs. Two signals do not wait."""
    assert len(LOOPS) == 2, "a handle works on an event loop alone with them"
    grace, port = 8, free_port()
    data = config(Ingress__graceful_shutdown_timeout_s=grace, EngineReplica__ray_actor_options={"num_cpus": 0.5})
    data["http_options"]["port"] = port
    file, url = tmp_path / "config.yaml", f"http://127.0.0.1:{port}"
    file.write_text(yaml.safe_dump(data))
    service = subprocess.Popen(
        [sys.executable, "-m", "deployments.run", str(file)],
        env=os.environ | LOOPS | {"RAY_ADDRESS": "local"},
        stdout=(tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    send = partial(os.killpg if number == signal.SIGINT else os.kill, service.pid)  # as a terminal's Ctrl-C: to all
    children: list[psutil.Process] = []
    try:
        eventually(lambda: probe(url, "/v1/completions", body(2)).status == 200, 90, "the service")
        children = psutil.Process(service.pid).children(recursive=True)
        short, long = Reading(url, 800), Reading(url, 2000)  # of 4 and 10 s at least, of which one is over the grace
        eventually(lambda: short.got > 10 and long.got > 10, 10, "streams")
        begun = time.monotonic()
        send(number)
        eventually(lambda: probe(url, "/health").status == 503, 2, "red health")
        if twice:
            send(number)
        while not short.ended:
            answer = probe(url, "/v1/completions", body(2))
            assert twice or (answer.status, answer.enveloped) == (503, True), answer
        assert short.done is not twice
        long.wait()
        assert (long.error, long.done) == (True, False)
        assert twice or long.ended - begun >= grace
        assert service.wait(60) == 0
        took = time.monotonic() - begun
        print(f"{number.name}{' twice' if twice else ''}: ended after {took:.1f} s")
        assert took < (0 if twice else grace) + END_S
        eventually(lambda: not any(child.is_running() for child in children), 5, "no process left")
        assert probe(url, "/health").status == 0
    finally:
        print((tmp_path / "log").read_text()[-3000:])
        service.kill()
        for child in children:
            if child.is_running():
                child.kill()
