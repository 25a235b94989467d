"""EngineReplica: the Serve actor around one engine. It moves messages and reports load; it computes nothing.

The engine runs in its own process, so this actor's event loop is never blocked and answers health checks, load reports
and aborts however busy the engine is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import msgspec
import ray.util
from ray import serve

from deployments.channel import ChannelServer
from deployments.messages import Chunk, GenerateCall, Refusal, encode
from deployments.metrics import EngineMetrics
from deployments.pacing import Pacer
from nanoengine.async_engine import AsyncEngine
from nanoengine.config import EngineConfig
from nanoengine.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from nanoengine.outputs import Load

logger = logging.getLogger("ray.serve")

WATCH_PERIOD_S = 1.0


class EngineReplica:
    """One engine behind a Serve handle. ``generate`` is the only method that requests use."""

    async def __init__(self, config: EngineConfig, model_name: str, stall_s: float) -> None:  # type: ignore[misc]  # Serve awaits it
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._channels = ChannelServer()
        self._address = await self._channels.start(ray.util.get_node_ip_address())
        self._engine = AsyncEngine(config)
        self._info = await self._engine.start()
        logger.info("engine ready: %s", self._info)
        self._open: Counter[str] = Counter()  # sequences of each ingress that are here now
        self._newest: dict[str, int] = {}  # highest call number seen of each
        self._metrics = EngineMetrics(model_name)
        self._stall_s = stall_s
        self._pacer = Pacer()
        self._background = [asyncio.create_task(self._pacer.run()), asyncio.create_task(self._watch_engine())]

    async def generate(self, call: GenerateCall) -> AsyncIterator[bytes]:
        """Stream one sequence as encoded ``Chunk``s; a ``Refusal`` may be the first item, or the last.

        Where the calling ingress has a channel to this replica the chunks go there and none are yielded. Else the
        first chunk leaves at once, and later ones as often as this process can bear, each with all that came since.
        """
        lane = self._channels.lane(call.ingress)
        self._open[call.ingress] += 1
        self._newest[call.ingress] = max(call.number, self._newest.get(call.ingress, 0))
        deltas = self._engine.generate(
            call.prompt, self._params(call), call.key, priority=call.priority, cache_salt=call.cache_salt
        )
        try:
            async for delta in deltas:
                if lane is None:
                    yield encode(Chunk.of(delta, call.token_ids))
                    if delta.finish_reason is None and self._pacer.pause:
                        await asyncio.sleep(self._pacer.pause)
                elif lane.closed:
                    yield encode(Refusal("dead", "the connection to the ingress was lost", self._replica))
                    return
                else:
                    lane.push(call.number, Chunk.of(delta, call.token_ids))
        except InvalidRequestError as error:
            yield encode(Refusal("invalid", error.message, self._replica, param=error.param, code=error.code))
        except EngineOverloadedError as error:
            yield encode(Refusal("overloaded", str(error), self._replica, retry_after=error.retry_after))
        except EngineDeadError as error:
            yield encode(Refusal("dead", str(error), self._replica))
        finally:
            self._open[call.ingress] -= 1
            await deltas.aclose()  # type: ignore[attr-defined]  # aborts in the engine where the stream is not at its end

    def _params(self, call: GenerateCall) -> Any:
        room = self._info.max_model_len - len(call.prompt)
        limit = call.params.max_tokens
        if call.clip and limit is not None and limit > room >= 1:
            return replace(call.params, max_tokens=room, min_tokens=min(call.params.min_tokens, room))
        return call.params

    def record_replica_metadata(self) -> dict[str, Any]:
        """Told to every router once, when the replica is up."""
        return {"channel": msgspec.to_builtins(self._address), "max_model_len": self._info.max_model_len}

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` once the engine process has ended: Serve then replaces this replica."""
        if self._engine.dead is not None:
            raise self._engine.dead

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers need to know of this replica. Serve sends it to every router, so it is small.

        ``ingresses`` tells each router which of its own calls the figures include: [open sequences, newest number].
        """
        load = self._engine.load()
        # An ingress without a sequence here needs no entry, and one that is gone would keep its own for ever.
        for ingress in [name for name, open_ in self._open.items() if open_ == 0]:
            del self._open[ingress], self._newest[ingress]
        return {
            "active": load.waiting + load.running,
            "backlog_tokens": load.waiting_tokens + load.prefill_tokens,
            "kv_usage": round(load.kv_usage, 3),
            "dead": self._engine.dead is not None,
            "ingresses": {name: [self._open[name], newest] for name, newest in self._newest.items()},
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads: requests and tokens, from the engine itself."""
        load = self._engine.load()
        return {
            "waiting": float(load.waiting),
            "running": float(load.running),
            "backlog_tokens": float(load.waiting_tokens + load.prefill_tokens),
        }

    def load(self) -> Load:
        """The engine's last report, whole."""
        return self._engine.load()

    async def memory(self) -> dict[str, Any]:
        """Where this replica's engine's memory went, in bytes. For people: the engine waits for its device to know."""
        return {"replica": self._replica, **asdict(await self._engine.memory_summary())}

    async def _watch_engine(self) -> None:
        """Report metrics, and end an engine that stands still: its process lives, and nothing else would notice."""
        steps, since = 0, time.monotonic()
        while self._engine.dead is None:
            await asyncio.sleep(WATCH_PERIOD_S)
            load = self._engine.load()
            self._metrics.update(load)
            if load.steps != steps or not self._open.total():
                steps, since = load.steps, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                logger.error("the engine has requests and made no step for %.0f s: ending it", self._stall_s)
                await self._engine.stop()  # fails its streams at once, and makes this replica's health red

    async def __del__(self) -> None:
        for task in getattr(self, "_background", ()):  # __init__ may have failed half-way
            task.cancel()
        if (channels := getattr(self, "_channels", None)) is not None:
            await channels.stop()
        if (engine := getattr(self, "_engine", None)) is not None:
            await engine.stop()
