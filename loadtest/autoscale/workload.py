"""Traffic for the simulator: public traces of arrivals and lengths, and shapes that are made here."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

TAIL_S = 600.0  # after the last request: a fleet that doesn't come down again is paid for


@dataclass(slots=True)
class Request:
    """One prompt, and what became of it. Times in seconds."""

    arrival: float
    tokens: int
    output: int
    first_token: float = 0.0
    token_s: float = 0.0  # between two of its tokens


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and how long the fleet is watched."""

    name: str
    requests: list[Request]
    seconds: float

    def fresh(self) -> Workload:
        """The same traffic with nothing yet become of it."""
        return Workload(self.name, [Request(r.arrival, r.tokens, r.output) for r in self.requests], self.seconds)


def trace(path: Path, load: int = 1, seed: int = 0) -> Workload:
    """Azure's traces (TIMESTAMP, ContextTokens, GeneratedTokens) and AIBrix's (timestamp_ms, prompt_length,
    output_length), as CSV. ``load``: so many users in place of each, all within a second of when it came."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int]] = []
    with path.open() as file:
        for row in csv.DictReader(file):
            if "TIMESTAMP" in row:
                time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                rows.append((time, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            else:
                time = int(row["timestamp_ms"]) / 1000
                rows.append((time, int(row["prompt_length"]), int(row["output_length"])))
    begin = min(time for time, _, _ in rows)
    requests = [
        Request(time - begin + (float(rng.uniform(0, 1)) if copy else 0.0), max(1, tokens), max(1, output))
        for time, tokens, output in rows
        for copy in range(load)
    ]
    return _workload(path.stem + (f" x{load}" if load > 1 else ""), requests)


def shaped(name: str, rate: Callable[[float], float], seconds: float, seed: int = 0) -> Workload:
    """Poisson arrivals at ``rate(t)`` requests a second; prompts of 1,000 tokens on average and answers of 150, both
    exponentially distributed."""
    rng = np.random.default_rng(seed)
    most = max(rate(float(t)) for t in np.arange(0, seconds, 1.0))
    requests, time = [], 0.0
    while most > 0 and (time := time + float(rng.exponential(1 / most))) < seconds:
        if rng.random() * most < rate(time):
            tokens, output = rng.exponential(1000), rng.exponential(150)
            requests.append(Request(time, 1 + int(tokens), 1 + int(output)))
    return _workload(name, requests, seconds)


def shapes(seed: int = 0) -> list[Workload]:
    """Rates are of an engine that does some 3 of these requests a second."""
    return [
        shaped("steps", lambda t: (1.0, 12.0, 3.0, 20.0, 1.0)[int(t // 600) % 5], 3000, seed),
        shaped("spikes", lambda t: 15.0 if t % 600 < 30 else 2.0, 3600, seed),
        shaped("diurnal", lambda t: 12 - 11 * math.cos(2 * math.pi * t / 7200), 7200, seed),
        shaped("ramp", lambda t: 1 + 19 * (1 - abs(t / 1200 - 1)), 2400, seed),
        shaped("sawtooth", lambda t: 2 + 10 * (t % 600) / 600, 3600, seed),
        shaped("constant", lambda t: 8.0, 1200, seed),
        shaped("nothing", lambda t: 0.0, 1200, seed),
    ]


def _workload(name: str, requests: list[Request], seconds: float = 0.0) -> Workload:
    requests.sort(key=lambda request: request.arrival)
    return Workload(name, requests, max(seconds, requests[-1].arrival if requests else 0.0) + TAIL_S)
