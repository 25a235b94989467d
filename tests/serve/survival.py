"""A continuous load of streams whose every character is known, and a count of how they end."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.sampling.params import SamplingParams
from tests.serve.cluster import NAME, config


def service(replicas: int, **changes: Any) -> dict[str, Any]:
    """Two ingresses; streams last longer than a replica has to stop."""
    data = config(
        **{
            "Ingress__num_replicas": 2,
            "EngineReplica__graceful_shutdown_timeout_s": 4,
            "args__engine__synthetic": {"step_seconds": 0.02, "max_model_len": 2048},
        }
        | changes
    )
    engine = next(d for d in data["applications"][0]["deployments"] if d["name"] == "EngineReplica")
    del engine["autoscaling_config"]
    engine["num_replicas"] = replicas
    engine["ray_actor_options"] = {"num_cpus": 0.3}
    return data


@dataclass(slots=True)
class Stream:
    """One request and what came of it."""

    prompt: str
    begun: float = 0.0
    ended: float = 0.0
    text: str = ""
    status: int = 0  # 0: the connection broke before there was one
    error: bool = False  # an error event came
    done: bool = False  # [DONE] came
    note: str = ""


def answers(prompts: list[str], tokens: int) -> list[str]:
    """What the synthetic model says: by an engine of its own, on which nothing happens."""
    engine = Engine(EngineConfig.model_validate({"model": "synthetic", "synthetic": {"step_seconds": 0}}))
    texts = [bytearray() for _ in prompts]
    for key, prompt in enumerate(prompts):
        ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
        engine.add(key, ids, SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_work:
        output = engine.step()
        if output is not None:
            for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
                texts[key].append(token)
    return [text.decode() for text in texts]


class StreamLoad:
    """``streams`` at once, each followed by another one with a prompt that nobody has sent before, until ``stop``."""

    def __init__(self, url: str, streams: int, tokens: int) -> None:
        self.ended: list[Stream] = []
        self._url, self._streams, self._tokens = url, streams, tokens
        self._numbers = itertools.count()
        self._running = True
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._ask_again(client, worker) for worker in range(self._streams)))

    async def _ask_again(self, client: httpx.AsyncClient, worker: int) -> None:
        await asyncio.sleep(worker * 0.1)
        while self._running:
            stream = Stream(f"stream {next(self._numbers)} of {worker}: ", time.monotonic())
            try:
                await self._ask(client, stream)
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                stream.note = repr(error)
            stream.ended = time.monotonic()
            self.ended.append(stream)
            if not stream.done:
                await asyncio.sleep(0.5)

    async def _ask(self, client: httpx.AsyncClient, stream: Stream) -> None:
        body = {"model": NAME, "prompt": stream.prompt, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.note = (await response.aread()).decode()[:200]
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        stream.error, stream.note = True, line[:200]
                    else:
                        stream.text += event["choices"][0]["text"]

    def stop(self) -> None:
        """Let the streams that are open end."""
        self._running = False
        self._thread.join(180)
        assert not self._thread.is_alive(), "a stream hangs"

    def take(self) -> Counter[str]:
        """How those ended that have ended since the call before; "wrong" is what must not be."""
        streams, self.ended = self.ended, []
        expected = answers([stream.prompt for stream in streams], self._tokens)
        counts: Counter[str] = Counter()
        for stream, text in zip(streams, expected, strict=True):
            counts[kind := _kind(stream, text)] += 1
            if kind not in ("whole", "status 429"):
                print(f"  {kind}: {stream.prompt!r} status {stream.status}, {len(stream.text)} tokens, {stream.note}")
        return counts


def _kind(stream: Stream, text: str) -> str:
    if not text.startswith(stream.text) or (stream.done and (stream.error or stream.text != text)):
        return "wrong"
    if stream.done:
        return "whole"
    if stream.error:
        return "error event"
    return f"status {stream.status}" if stream.status not in (0, 200) else "cut"


def processes(title: str) -> list[psutil.Process]:
    """Processes of this test's cluster with this in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
