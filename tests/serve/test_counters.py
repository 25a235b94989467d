"""What Ray exports of requests that end in every way: each is counted once."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray

from tests.serve.cluster import NAME, Cluster, config, eventually
from tests.serve.survival import processes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

SERIES = re.compile(r"^ray_vllm_(\w+)\{(.*)\} (\S+)$", re.M)
REASON = re.compile(r'(?:finished_)?reason="(\w+)"')
LIMIT = 4  # requests in flight


def scrape() -> tuple[Counter[str], int]:
    """The sums of our counters, by name and reason; and how many series Ray has of us."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text
    found: Counter[str] = Counter()
    series = SERIES.findall(text)
    for name, labels, value in series:
        reason = REASON.search(labels)
        found[f"{name} {reason[1]}" if reason else name] += float(value)
    return found, len(series)


def body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "count", "max_tokens": 8, "ignore_eos": True, "temperature": 0, **more}


def test_every_request_is_counted_once_by_how_it_ended(cluster: Cluster) -> None:
    """Case D20."""
    data = config(
        args__engine__num_blocks=128,  # 2,048 tokens: of two that want 1,100 each, one is preempted
        args__ingress__max_inflight_requests=LIMIT,
        args__ingress__resume_wait_s=0.1,
        args__ingress__replica_wait_s=0.1,
    )
    cluster.deploy(data)
    scrapes: list[Counter[str]] = []

    def counted(name: str, count: float) -> None:
        """Wait until the counter says so; it must not say more in the end, nor go back."""

        def said() -> bool:
            now = scrape()[0]
            for key, value in scrapes[-1].items() if scrapes else ():
                if key.startswith(("request_success", "admission_rejections", "request_continuations")):
                    assert now[key] >= value, f"{key} went back"
            scrapes.append(now)
            return now[name] >= count

        eventually(said, 30, f"{name} = {count}: {scrapes[-1:]}")
        assert scrapes[-1][name] == count

    with httpx.Client(base_url=cluster.url, timeout=30) as http:

        def post(**more: Any) -> httpx.Response:
            return http.post("/v1/completions", json=body(**more))

        def streams(count: int, stop: threading.Event) -> list[threading.Thread]:
            """So many streams that are held open, until told to stop or until they break."""

            def hold() -> None:
                asked = body(max_tokens=1500, stream=True)
                with httpx.stream("POST", f"{cluster.url}/v1/completions", json=asked, timeout=30) as answer:
                    for _ in answer.iter_lines():
                        if stop.is_set():
                            return

            threads = [threading.Thread(target=hold) for _ in range(count)]
            for thread in threads:
                thread.start()
            time.sleep(1)
            return threads

        text = post().json()["choices"][0]["text"]
        assert post(n=3, temperature=1).status_code == 200
        for _ in range(10):
            assert post(stop=text[4:6]).json()["choices"][0]["finish_reason"] == "stop"
        for _ in range(5):
            assert post().json()["choices"][0]["finish_reason"] == "length"
        for wrong in ({"top_p": 7}, {"prompt": ""}, {"max_tokens": 9999}):
            assert post(**wrong).status_code == 400
        for i in range(100):
            assert post(model=f"model {i}").status_code == 404

        stop = threading.Event()
        held = streams(LIMIT, stop)
        assert [post().status_code for _ in range(2)] == [429, 429]
        stop.set()
        for thread in held:
            thread.join(30)

        found = scrape()[0]["prefix_cache_hits_total"]
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(post, prompt=f"count {i}", max_tokens=1100) for i in range(2)]
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in both] == [1100, 1100]

        counted("request_success_total stop", 10)
        counted("request_success_total length", 1 + 1 + 5 + 2)
        counted("request_success_total abort", LIMIT)
        counted("admission_rejections_total server_overloaded", 2)
        counted("admission_rejections_total model_not_found", 100)
        counted("e2e_request_latency_seconds_count", 10 + 9 + LIMIT)
        counted("time_to_first_token_seconds_count", 10 + 9 + LIMIT)
        eventually(lambda: scrape()[0]["num_preemptions_total"] >= 1, 30, "a preemption")
        assert scrape()[0]["prefix_cache_hits_total"] == found, "what is computed again was found by nobody"
        rejected = {name: value for name, value in scrapes[-1].items() if name.startswith("admission_rejections_total")}
        assert sum(rejected.values()) == 3 + 2 + 100
        assert scrape()[1] < 600, "100 names that clients made up are no labels"

        broken = streams(2, threading.Event())
        (engine,) = processes("nanoengine.process")
        engine.send_signal(signal.SIGKILL)
        for thread in broken:
            thread.join(30)
        counted("request_success_total error", 2)
        counted("request_continuations_total lost", 2)
    total = sum(value for name, value in scrapes[-1].items() if name.startswith("request_success_total"))
    assert total == 10 + 9 + LIMIT + 2
