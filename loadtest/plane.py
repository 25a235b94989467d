"""What a token costs on its way out: CPU time of ingress, replica and proxy, per token and per event.

    python -m loadtest.plane                                   # 512 streams of an engine that makes 64,000 tokens/s
    python -m loadtest.plane --rate 10000 --proxy python
    python -m loadtest.plane --rate 10000 --proxy python --tokens serve
    python -m loadtest.plane --rate 3200 --streams 32 --output 128     # beside the bare engine, as loadtest.online does

It runs the service as serve_config.yaml says, with a stand-in for the model that makes a token for every stream at a
fixed pace, if it gets the CPU for it. The figures are of a stretch in which all streams run, none begins and none ends:
CPU seconds of each part by the tokens and events that arrived meanwhile. They hold on a machine too small for the
rate too, which then just carries less; how many tokens an event has depends on how far behind the service is.

With ``--output`` it is a closed loop of answers of that length instead, so that requests cost what they cost, and the
same engine is asked bare, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import ray
import yaml
from ray.serve import Application

from deployments import app
from deployments.config import AppArgs
from deployments.replica import EngineReplica
from loadtest.online import Load, compare
from loadtest.processes import cpu_seconds
from loadtest.stream_client import Connection, Reading

_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
_ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
PROXIES: dict[str, dict[str, str]] = {
    "python": {},
    "haproxy": _HAPROXY,
    "haproxy-loop": _HAPROXY | _ONE_LOOP,
}
"""Ways from a client to the ingress, and from there to a replica, by what is set in the environment."""

TOKENS = ("channel", "serve")
WAY_OUT = ("replica", "ingress", "proxy")
CONTEXT = 8192


class WithoutChannel(EngineReplica):
    """Takes requests by Serve's calls, and sends all tokens through Serve's stream."""

    def record_replica_metadata(self) -> dict[str, Any]:
        told = super().record_replica_metadata()
        return told | {"channel": told["channel"] | {"port": 1}}  # where nobody listens


def build(args: dict[str, Any]) -> Application:
    """The application without channels."""
    app.EngineReplica = WithoutChannel  # type: ignore[attr-defined]
    return app.build(AppArgs.model_validate(args))


def configuration(port: int, streams: int, rate: float, tokens: str, ingresses: int) -> dict[str, Any]:
    """serve_config.yaml, with the stand-in."""
    data: dict[str, Any] = yaml.safe_load(Path("serve_config.yaml").read_text())
    data["http_options"]["port"] = port
    service = data["applications"][0]
    if tokens == "serve":
        service["import_path"] = "loadtest.plane:build"
    service["args"]["engine"] = {
        "model": "synthetic",
        "num_blocks": streams * CONTEXT // 16,
        "max_num_seqs": streams,
        "max_num_batched_tokens": max(8192, streams),
        "enable_prefix_caching": False,
        "synthetic": {
            "step_seconds": streams / rate,
            "prefill_tokens_per_second": 1e9,
            "context": 16,  # what a token depends on must not cost the stand-in the time that its pace leaves
            "max_model_len": CONTEXT,
        },
    }
    service["args"]["ingress"]["max_inflight_requests"] = streams
    for deployment in service["deployments"]:
        if deployment["name"] == "Ingress":
            deployment["num_replicas"] = ingresses
        else:
            deployment["max_ongoing_requests"] = 2 * streams
            deployment["num_replicas"] = 1
            del deployment["autoscaling_config"]
    return data


@contextlib.contextmanager
def served(data: dict[str, Any], environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """(its URL, its process) of a service that runs meanwhile."""
    name = data["applications"][0]["args"]["engine"]["model"]
    url = f"http://127.0.0.1:{data['http_options']['port']}"
    env = {"RAY_ADDRESS": "local", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_raylet_start_wait_time_s"] = "120"  # a machine under load takes more than the 30 s that are usual
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "serve_config.yaml"), Path(folder, "log")
        file.write_text(yaml.safe_dump(data))
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=os.environ | env | environment, stdout=out, stderr=out)
        try:
            if not asyncio.run(_answers(url, name, process)):
                raise RuntimeError(f"the service did not come up:\n{log.read_text()[-4000:]}")
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def _answers(url: str, name: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until it does; False: it has ended, or four minutes have."""
    body = msgspec.json.encode({"model": name, "prompt": "x", "max_tokens": 1})
    for _ in range(1200):
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            connection = Connection(url)
            answer = await connection.post("/v1/completions", body)
            connection.close()
            if answer.status == 200:
                return True
        await asyncio.sleep(0.2)
    return False


async def measure(url: str, root: int, streams: int, seconds: float) -> tuple[dict[str, float], list[Reading], float]:
    """CPU seconds of each part in a stretch of so many seconds, what came in it, and its true length."""
    body = msgspec.json.encode(
        {"model": "synthetic", "prompt": [65] * 16, "max_tokens": CONTEXT - 16, "ignore_eos": True, "stream": True}
    )
    connections = [Connection(url) for _ in range(streams)]
    posts = [asyncio.create_task(connection.post("/v1/completions", body)) for connection in connections]
    while not all(connection.answer.pieces for connection in connections):
        await asyncio.sleep(0.1)
        if any(post.done() for post in posts):
            break
    await asyncio.sleep(2)
    for connection in connections:
        connection.answer.pieces.clear()
    begin, before = time.perf_counter(), cpu_seconds(root) | {"client": time.process_time()}
    await asyncio.sleep(seconds)
    after, end = cpu_seconds(root) | {"client": time.process_time()}, time.perf_counter()
    if any(post.done() for post in posts):
        raise RuntimeError(
            "a stream ended before its time: " + next(p for p in posts if p.done()).result().read().error
        )
    readings = [connection.answer.read() for connection in connections]
    for connection in connections:
        connection.close()
    await asyncio.gather(*posts)
    return {part: after[part] - before.get(part, 0.0) for part in after}, readings, end - begin


def main() -> None:
    """Measure one way, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.plane", description=main.__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--rate", type=float, default=64_000, help="tokens per second of all streams together")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--proxy", choices=PROXIES, default="haproxy-loop")
    parser.add_argument("--tokens", choices=TOKENS, default="channel", help="how they come from replica to ingress")
    parser.add_argument("--input", type=int, default=512, help="with --output: tokens of a prompt")
    parser.add_argument("--output", type=int, help="closed loop: tokens of an answer")
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    data = configuration(port, args.streams, args.rate, args.tokens, args.ingresses)
    print(
        f"{args.streams} streams, {args.rate:.0f} tokens/s wanted, {args.ingresses} ingress, {args.proxy}, tokens by "
        f"{args.tokens}; {os.cpu_count()} cores, Python {platform.python_version()}, Ray {ray.__version__}, "
        f"{date.today()}"
    )
    with served(data, PROXIES[args.proxy]) as (url, root):
        if args.output is not None:
            config = AppArgs.model_validate(data["applications"][0]["args"]).engine
            load = Load(args.streams, 16 * args.streams, args.input, args.output, vocabulary=256)
            before = cpu_seconds(root)
            asyncio.run(compare(url, "synthetic", [load], 1, config))
            after = cpu_seconds(root)
            spent = {part: 1e3 * (after[part] - before[part]) / load.requests for part in (*WAY_OUT, "engine")}
            print("CPU ms a request: " + ", ".join(f"{part} {ms:.2f}" for part, ms in spent.items()))
            return
        cpu, readings, seconds = asyncio.run(measure(url, root, args.streams, args.seconds))
    tokens = sum(len(reading.text) for reading in readings)  # the stand-in's are a character each
    events = sum(told for reading in readings for _, told in reading.marks)
    print(f"{tokens / seconds:.0f} tokens/s in {events / seconds:.0f} events/s: {tokens / events:.2f} tokens an event")
    print(f"{'CPU':10}{'of a core':>12}{'us/token':>12}{'us/event':>12}")
    ways = {part: cpu.get(part, 0.0) for part in WAY_OUT}
    for part, used in {**ways, "way out": sum(ways.values()), "engine": cpu["engine"], "client": cpu["client"]}.items():
        print(f"{part:10}{used / seconds:12.2f}{1e6 * used / tokens:12.1f}{1e6 * used / events:12.1f}")


if __name__ == "__main__":
    main()
