"""Where a request's time went: on a made-up clock, and as a client sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from deployments.ingress.timings import Stopwatch
from deployments.messages import Chunk, merged
from tests.serve.fakes import FakeMetrics
from tests.serve.test_api import CHAT, MESSAGES, Service, service

__all__ = ["service"]

SPANS = ["tokenise", "route", "queue", "prefill", "decode"]


def chunk(tokens: int, times: tuple[float, float] | None = None) -> Chunk:
    return Chunk("a", None, None, 5, 0, tokens, times=times)


def clock(instants: Iterable[float]) -> Stopwatch:
    return Stopwatch(FakeMetrics(), 10.0, 2, iter(instants).__next__)


def test_spans_add_up_to_the_whole_time() -> None:
    watch = clock([10.25, 11.0, 12.0, 13.0])  # tokenised; chunks
    watch.observe(0, chunk(1, (0.125, 0.5)))
    watch.observe(1, chunk(1, (9.0, 9.0)))
    watch.observe(0, chunk(5))
    watch.stop()
    assert list(watch.spans) == SPANS
    assert watch.spans == {"tokenise": 0.25, "route": 0.125, "queue": 0.125, "prefill": 0.5, "decode": 2.0}
    assert watch.server_timing() == (
        b"tokenise;dur=250.000, route;dur=125.000, queue;dur=125.000, prefill;dur=500.000, decode;dur=2000.000"
    )


def test_without_the_replicas_times_all_of_the_wait_is_prefill() -> None:
    watch = clock([10.0, 11.0])
    watch.observe(0, chunk(1))
    assert watch.spans == {"tokenise": 0.0, "route": 0.0, "queue": 0.0, "prefill": 1.0}


def test_merged_chunks_keep_the_first_ones_times() -> None:
    assert merged(chunk(1, (1.0, 2.0)), chunk(2)).times == (1.0, 2.0)


def names(timing: str) -> list[str]:
    assert re.fullmatch(r"(\w+;dur=\d+\.\d{3}(, )?)+", timing)
    return re.findall(r"(\w+);dur", timing)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_is_told(service: Service, stream: bool) -> None:
    body = {"model": "m", "messages": MESSAGES, "stream": stream}
    asked = await service.http.post(CHAT, json=body, headers={"X-Nanoserve-Timings": "1"})
    plain = await service.http.post(CHAT, json=body)
    assert "server-timing" not in plain.headers
    assert ": server-timing" not in plain.text
    if not stream:
        assert names(asked.headers["server-timing"]) == SPANS
    else:
        assert names(asked.headers["server-timing"]) == SPANS[:-1], "as far as is known before the first token leaves"
        comment, done, end = asked.text.split("\n\n")[-3:]
        assert (done, end) == ("data: [DONE]", "")
        assert names(comment.removeprefix(": server-timing ")) == SPANS
    assert {f"spent:{span}": 2 for span in SPANS}.items() <= service.metrics.seen.items()
