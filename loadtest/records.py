"""What was measured: one record for each request, exact percentiles over them, and the table printed at the end.

Locust rounds the times that it keeps (above 100 ms to 10 ms, above 1 s to 100 ms), so nothing here comes from its own
statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from loadtest.sse import Event

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Instants are seconds on the client's monotonic clock, lengths are tokens as the server counted them.

    ``scheduled`` is when the request was meant to go out and ``sent`` when it did: with an arrival rate they differ
    when the client itself is late, and every latency counts from ``scheduled``, so that a slow server cannot hide by
    slowing its clients down (coordinated omission).
    """

    scheduled: float
    sent: float
    ended: float
    outcome: Literal["ok", "failed", "unfinished"]
    """``unfinished``: the test ended first; neither a success nor a failure, and in no latency."""
    error: str = ""
    status: int = 0
    token_times: list[float] = []
    """Arrival of each event that carried text. A server may put several tokens into one."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    request_id: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token, seconds from ``scheduled``."""
        return self.token_times[0] - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next: inter-token latency as the reader sees it."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first, by the server's own count of tokens."""
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def tokens(self) -> int:
        """Output tokens that arrived: the server's count, or where the answer was cut the pieces of text, at least."""
        return self.output_tokens or len(self.token_times)

    @property
    def e2e(self) -> float:
        """Seconds from ``scheduled`` to the end of the answer."""
        return self.ended - self.scheduled


def read_chat(record: Record, stream: Iterable[Event], pieces: list[str]) -> str:
    """Fill a record from a streamed chat completion, and ``pieces`` with its text. Returns what went wrong, or nothing.

    Raises ``ValueError`` where an event is no JSON.
    """
    for event in stream:
        if event.data == "[DONE]":
            return "" if record.token_times or record.finish_reason else "the answer holds no text"
        body = json.loads(event.data)
        if "error" in body:
            return f"error event: {body['error'].get('message', body['error'])}"
        for choice in body["choices"]:
            if text := choice["delta"].get("content"):
                record.token_times.append(event.at)
                pieces.append(text)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if usage := body.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return "the stream ended before [DONE]"


class Distribution(msgspec.Struct, kw_only=True):
    """Seconds: mean, exact quantiles, greatest, and of how many values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Summary(msgspec.Struct, kw_only=True):
    """What a run came to."""

    seconds: float
    ok: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    lag: Distribution | None
    """How late the client sent what it had to send."""


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile ``q`` of values in ascending order, linear between its two neighbours."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p95, p99 = (quantile(ordered, q) for q in QUANTILES)
    mean = sum(ordered) / len(ordered)
    return Distribution(count=len(ordered), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


def summarise(records: Sequence[Record]) -> Summary:
    """Over all records: latencies of those that ended well, and all the output tokens that arrived."""
    ok = [record for record in records if record.outcome == "ok"]
    errors: dict[str, int] = {}
    for record in records:
        if record.outcome == "failed":
            errors[record.error] = errors.get(record.error, 0) + 1
    seconds = max((r.ended for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    tokens = sum(record.tokens for record in records)
    return Summary(
        seconds=seconds,
        ok=len(ok),
        failed=sum(errors.values()),
        unfinished=sum(record.outcome == "unfinished" for record in records),
        errors=errors,
        requests_per_second=len(ok) / seconds if seconds else 0.0,
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        prompt_tokens=sum(record.prompt_tokens for record in ok),
        cached_tokens=sum(record.cached_tokens for record in ok),
        output_tokens=tokens,
        ttft=distribution([record.ttft for record in ok if record.token_times]),
        itl=distribution([gap for record in ok for gap in record.gaps]),
        tpot=distribution([r.tpot for r in ok if r.token_times and r.output_tokens > 1]),
        e2e=distribution([record.e2e for record in ok]),
        lag=distribution([record.sent - record.scheduled for record in records]),
    )


def table(summary: Summary) -> str:
    """The summary as text, times in milliseconds."""
    lines = [
        f"{summary.ok} requests ok, {summary.failed} failed, {summary.unfinished} cut by the end, in "
        f"{summary.seconds:.1f} s: {summary.requests_per_second:.2f} requests/s, "
        f"{summary.output_tokens_per_second:.1f} output tokens/s",
        f"{summary.output_tokens} output tokens; prompts {summary.prompt_tokens} tokens, "
        f"{summary.cached_tokens} of them cached",
        "",
        f"{'milliseconds':<28}{'mean':>9}{'p50':>9}{'p90':>9}{'p95':>9}{'p99':>9}{'max':>9}",
    ]
    rows = {
        "time to first token": summary.ttft,
        "inter-token latency": summary.itl,
        "time per output token": summary.tpot,
        "whole request": summary.e2e,
        "client's own lateness": summary.lag,
    }
    for name, row in rows.items():
        if row is not None:
            cells = (row.mean, row.p50, row.p90, row.p95, row.p99, row.max)
            lines.append(f"{name:<28}" + "".join(f"{1000 * cell:>9.1f}" for cell in cells))
    lines += [f"failed {count} times: {error}" for error, count in sorted(summary.errors.items())]
    return "\n".join(lines)


def write(records: Sequence[Record], summary: Summary, path: Path) -> None:
    """Records to ``path``, one JSON object a line, and the summary beside it, as ``.summary.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    path.with_suffix(".summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read(path: Path) -> list[Record]:
    """The records of an earlier run."""
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]
