"""Streaming throughput and latency of a served model, closed loop; and of its bare engine beside it, in the same run.

    python -m loadtest.online http://127.0.0.1:8000 qwen3-0.6b --concurrency 1,32,256 --input 512 --output 128
    python -m loadtest.online http://127.0.0.1:8000 qwen3-0.6b --engine serve_config.yaml

So many requests are kept in flight until all are done, from several client processes. Prompts are random token ids, of
which ``--shared`` are common to all, and every answer has exactly ``--output`` tokens. Any OpenAI-compatible server
that takes ``ignore_eos`` can be asked. Time to first token is from sending to the first event with text, inter-token
latency is between two such events, each of which may have several tokens; tokens are those that the server counts.

``--engine`` names the file that the service runs with: an ``AsyncEngine`` with the same settings is asked the same in
this process, when the service has answered, with nothing between it and its readers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import yaml

from deployments.config import AppArgs
from loadtest.stream_client import Connection, Reading
from nanoengine import AsyncEngine, EngineConfig, SamplingParams

TEMPERATURE = 0.6


@dataclass(frozen=True)
class Load:
    """Lengths are tokens."""

    concurrency: int
    requests: int
    input: int
    output: int
    shared: int = 0
    vocabulary: int = 10_000  # ids are below it
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        common = np.random.default_rng(7).integers(10, self.vocabulary, self.shared).tolist()
        rng = np.random.default_rng(self.seed)
        own = rng.integers(10, self.vocabulary, (self.requests, self.input - self.shared)).tolist()
        return [common + prompt for prompt in own]

    def share(self, index: int, of: int) -> Load:
        """What one of so many processes does."""

        def part(whole: int) -> int:
            return whole // of + (index < whole % of)

        return replace(
            self,
            concurrency=part(self.concurrency),
            requests=part(self.requests),
            seed=self.seed * 1000 + index,
        )


@dataclass(frozen=True)
class Result:
    """What a load gave; times in milliseconds."""

    seconds: float
    readings: Sequence[Reading]

    @property
    def errors(self) -> list[str]:
        return [reading.error for reading in self.readings if reading.error]

    @property
    def tokens_per_second(self) -> float:
        return sum(reading.tokens for reading in self.readings) / self.seconds

    @property
    def ttft(self) -> list[float]:
        return [1e3 * (reading.marks[0][0] - reading.sent) for reading in self.readings if reading.marks]

    def row(self, name: str) -> str:
        """A line of the table that ``HEADER`` begins."""
        marks = [reading.marks for reading in self.readings]
        gaps = [1e3 * (later[0] - earlier[0]) for some in marks for earlier, later in pairwise(some)]
        events = sum(told for some in marks for _, told in some)
        ttft = [quantile(self.ttft, q) for q in (0.5, 0.9, 0.99)]
        itl = [quantile(gaps, q) for q in (0.5, 0.99)]
        tokens = sum(reading.tokens for reading in self.readings)
        return (
            f"{name:20}{len(self.readings):9}{len(self.errors):7}{self.tokens_per_second:10.1f}"
            f"{ttft[0]:10.1f}{ttft[1]:9.1f}{ttft[2]:9.1f}{itl[0]:10.2f}{itl[1]:9.2f}{tokens / max(events, 1):13.2f}"
        )


HEADER = (
    f"{'':20}{'requests':>9}{'errors':>7}{'tok/s':>10}{'TTFT p50':>10}{'p90':>9}{'p99':>9}{'ITL p50':>10}{'p99':>9}"
    f"{'tokens/event':>13}"
)


def quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else float("nan")


async def closed_loop(load: Load, ask: Callable[[int, list[int]], Awaitable[Reading]]) -> list[Reading]:
    """Keep ``load.concurrency`` prompts in flight; ``ask`` gets a worker's number and a prompt."""
    waiting = load.prompts()[::-1]
    readings: list[Reading] = []

    async def worker(number: int) -> None:
        while waiting:
            readings.append(await ask(number, waiting.pop()))

    await asyncio.gather(*(worker(number) for number in range(load.concurrency)))
    return readings


async def ask_service(url: str, model: str, load: Load) -> list[Reading]:
    """One process's share of a load."""
    connections = [Connection(url) for _ in range(load.concurrency)]
    body = {
        "model": model,
        "max_tokens": load.output,
        "temperature": TEMPERATURE,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def ask(number: int, prompt: list[int]) -> Reading:
        asked = msgspec.json.encode(body | {"prompt": prompt})
        sent = time.perf_counter()
        try:
            return (await connections[number].post("/v1/completions", asked)).read()
        except OSError as error:
            return Reading(sent, time.perf_counter(), [], 0, "", str(error))

    try:
        return await closed_loop(load, ask)
    finally:
        for connection in connections:
            connection.close()


async def ask_engine(engine: AsyncEngine, load: Load) -> list[Reading]:
    """All of a load."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=load.output, ignore_eos=True)

    async def ask(number: int, prompt: list[int]) -> Reading:
        sent, marks, text, tokens = time.perf_counter(), [], [], 0
        async for delta in engine.generate(prompt, params):
            if delta.text:
                marks.append((time.perf_counter(), 1))
                text.append(delta.text)
            tokens = delta.completion_tokens
        return Reading(sent, time.perf_counter(), marks, tokens, "".join(text), "")

    return await closed_loop(load, ask)


def _process(url: str, model: str, load: Load) -> list[Reading]:
    return asyncio.run(ask_service(url, model, load))


class Clients:
    """Processes that ask, ready to."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
        self._count = count
        list(self._pool.map(time.sleep, [1.0] * count))  # one each: their start is in no measurement

    def ask(self, url: str, model: str, load: Load) -> Result:
        """Ask a service for all of a load."""
        count = min(self._count, load.concurrency)
        shares = [load.share(index, count) for index in range(count)]
        readings = [r for some in self._pool.map(partial(_process, url, model), shares) for r in some]
        return Result(max(r.ended for r in readings) - min(r.sent for r in readings), readings)


async def from_engine(engine: AsyncEngine, load: Load) -> Result:
    """Ask an engine for all of a load."""
    begin = time.perf_counter()
    readings = await ask_engine(engine, load)
    return Result(time.perf_counter() - begin, readings)


async def compare(url: str, model: str, loads: Sequence[Load], processes: int, config: EngineConfig | None) -> bool:
    """Print a table; with a ``config``, of the bare engine too. Whether all was answered."""
    clients = await asyncio.to_thread(Clients, processes)
    print(HEADER)
    engine = None
    if config is not None:
        engine = AsyncEngine(config)
        await engine.start()
        await ask_engine(engine, replace(loads[0], requests=loads[0].concurrency, seed=99))  # warm
    errors: list[str] = []
    try:
        for load in loads:
            served = await asyncio.to_thread(clients.ask, url, model, load)
            errors += served.errors
            print(served.row(f"{load.concurrency} at once, served"), flush=True)
            if engine is not None:
                bare = await from_engine(engine, load)
                print(bare.row(f"{load.concurrency} at once, bare"))
                share = served.tokens_per_second / bare.tokens_per_second
                later = quantile(served.ttft, 0.5) - quantile(bare.ttft, 0.5)
                print(
                    f"{'':20}{100 * share:.1f} % of the bare engine's throughput, TTFT p50 {later:+.1f} ms", flush=True
                )
    finally:
        if engine is not None:
            await engine.stop()
    for error in errors[:3]:
        print("error:", error)
    return not errors


def main() -> int:
    """Measure a service, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.online", description=main.__doc__)
    parser.add_argument("url", help="where it is, without /v1")
    parser.add_argument("model", help="a name that it serves")
    parser.add_argument("--concurrency", default="1,32,256", help="requests in flight, one after the other")
    parser.add_argument("--requests", type=int, default=512, help="at most; and at most 16 times those in flight")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with, of those")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="prompts' token ids are from 10 to below this")
    parser.add_argument("--processes", type=int, default=4, help="that ask")
    parser.add_argument("--engine", type=Path, help="serve_config.yaml of the service: measure its engine bare too")
    args = parser.parse_args()
    config = None
    if args.engine is not None:
        (application, *_) = yaml.safe_load(args.engine.read_text())["applications"]
        config = AppArgs.model_validate(application["args"]).served[0].engine
    loads = [
        Load(n, max(n, min(args.requests, 16 * n)), args.input, args.output, args.shared, args.vocabulary, seed)
        for seed, n in enumerate(map(int, args.concurrency.split(",")))
    ]
    return 0 if asyncio.run(compare(args.url, args.model, loads, args.processes, config)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
