"""Metrics under vLLM's names, so that dashboards made for vLLM behind Ray work as they are.

Ray puts ``ray_`` before a name and allows no colon in it, so vLLM's ``vllm:num_requests_running`` is scraped as
``ray_vllm_num_requests_running``, here and under Ray Serve LLM alike. Nothing here runs per token: engine figures are
set from its load report twice a second, latencies are observed once a chunk or once a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ray.serve.metrics import Counter, Gauge, Histogram

from nanoengine.outputs import Load

_TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
_ITL = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80]
_E2E = [0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
_TAGS = ("model_name",)
ITL_SAMPLE = 16
"""Ray's histogram takes 7 us to observe a value, a fifth of what a streamed chunk costs: of so many chunks, one is."""
M = TypeVar("M", Counter, Gauge, Histogram)


class EngineMetrics:
    """One engine's gauges and counters, from its load reports."""

    def __init__(self, model_name: str) -> None:
        tags = {"model_name": model_name}

        def gauge(name: str, description: str) -> Gauge:
            return _tagged(Gauge(f"vllm_{name}", description=description, tag_keys=_TAGS), tags)

        def counter(name: str, description: str) -> Counter:
            return _tagged(Counter(f"vllm_{name}", description=description, tag_keys=_TAGS), tags)

        self._running = gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Sequences waiting for a slot.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.")
        self._counters = {
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of admitted sequences."),
            "generated_tokens": counter("generation_tokens", "Tokens generated."),
            "prefix_query_tokens": counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            "prefix_hit_tokens": counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "preemptions": counter("num_preemptions", "Sequences preempted."),
        }
        self._expected = counter("router_expected_cached_tokens", "Prompt tokens that routers expected to be cached.")
        self._found = counter("router_found_cached_tokens", "Prompt tokens of the same calls that were.")
        self._resyncs = counter("router_resyncs", "Times that a router's index of this engine was sent anew.")
        self._last = Load()

    def routed(self, expected: int, found: int) -> None:
        """One call: prompt tokens that its router expected to find in the cache, and those that it found."""
        if expected > 0:
            self._expected.inc(expected)
        if found > 0:
            self._found.inc(found)

    def resynced(self) -> None:
        self._resyncs.inc()

    def update(self, load: Load) -> None:
        """Set the gauges, and raise the counters by what was added since the last report."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_usage.set(load.kv_usage)
        for name, counter in self._counters.items():
            added = getattr(load, name) - getattr(self._last, name)
            if added > 0:
                counter.inc(added)
        self._last = load


class RequestMetrics:
    """One ingress replica's requests: each HTTP request counts once, whatever its n, and exactly once."""

    def __init__(self, model_name: str) -> None:
        tags = {"model_name": model_name}

        def histogram(name: str, description: str, boundaries: list[float]) -> Histogram:
            return _tagged(Histogram(f"vllm_{name}", description, boundaries, tag_keys=_TAGS), tags)

        self._ttft = histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens: means of one chunk in 16.", _ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _E2E)
        self._spans = {
            "tokenise": histogram("request_tokenise_time_seconds", "From a request's arrival to its tokens.", _TTFT),
            "route": histogram("request_route_time_seconds", "On the way to the engine, and back with a token.", _TTFT),
            "queue": histogram("request_queue_time_seconds", "In the engine's queue.", _TTFT),
            "prefill": histogram("request_prefill_time_seconds", "From the queue to the first token.", _TTFT),
            "decode": histogram("request_decode_time_seconds", "From the first token to the last.", _E2E),
        }
        self._chunks = 0
        reason, finished = (*_TAGS, "reason"), (*_TAGS, "finished_reason")
        self._success = Counter("vllm_request_success", description="Requests by how they ended.", tag_keys=finished)
        self._success.set_default_tags(dict(tags))
        self._rejected = Counter(
            "vllm_admission_rejections", description="Requests refused, by reason.", tag_keys=reason
        )
        self._rejected.set_default_tags(dict(tags))
        self._continuations = Counter(
            "vllm_request_continuations",
            description="Sequences that left a replica to go on at another, by why.",
            tag_keys=reason,
        )
        self._continuations.set_default_tags(dict(tags))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self._chunks += 1
        if tokens > 0 and self._chunks % ITL_SAMPLE == 0:
            self._itl.observe(seconds / tokens)

    def spent(self, spans: Mapping[str, float]) -> None:
        """Seconds by span, of a request that got all its tokens."""
        for name, seconds in spans.items():
            self._spans[name].observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """``reason``: stop, length, abort or error."""
        self._success.inc(tags={"finished_reason": reason})
        self._e2e.observe(seconds)

    def rejected(self, reason: str) -> None:
        self._rejected.inc(tags={"reason": reason})

    def continued(self, reason: str) -> None:
        """``reason``: lost or stopping."""
        self._continuations.inc(tags={"reason": reason})


def _tagged(metric: M, tags: dict[str, str]) -> M:
    metric.set_default_tags(dict(tags))  # Serve writes its own tags into what it is given
    return metric
