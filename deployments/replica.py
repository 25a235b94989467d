"""EngineReplica: the Serve actor around one engine. It moves messages and reports load; it computes nothing.

The engine runs in its own process, so this actor's event loop is never blocked and answers health checks, load reports
and aborts however busy the engine is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import ray.util
from ray import serve

from deployments.channel import ChannelServer, Lane
from deployments.claims import Claims
from deployments.messages import Chunk, ClaimCheck, GenerateCall, Refusal, encode
from deployments.metrics import EngineMetrics
from deployments.pacing import MAX_PAUSE_QUEUED_S, Pacer
from deployments.routing.accuracy import Accuracy
from deployments.routing.load import LoadReport, ReplicaInfo
from nanoengine.async_engine import AsyncEngine, Stream
from nanoengine.cache.events import HeldPrefixes
from nanoengine.config import EngineConfig
from nanoengine.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from nanoengine.outputs import Delta, Load
from nanoengine.pulse import Pulse

logger = logging.getLogger("ray.serve")

WATCH_PERIOD_S = 0.5
REPORT_PERIOD_S = 0.1  # between two reports to routers, if no call arrives
REPORT_GAP_S = 0.002  # at least, also if calls do: ingresses that choose within that time don't know of each other
KV_SCARCE = 0.9  # fraction of KV blocks in use, from which on one waits for blocks rather than for a turn


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """A call that has no token yet."""

    tokens: int  # of its prompt, that are expected to need computing
    steps: int  # that the engine had made when it came


class _Sent:
    """A sequence whose chunks a lane takes."""

    def __init__(self, stream: Stream, chunk: Callable[[Delta], Chunk]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._chunk = chunk

    def take(self) -> Chunk | None:
        try:
            delta = self._stream.take()
            chunk = self._chunk(delta)
        except Exception as error:  # whatever it is, it is this sequence's alone
            self._end(error)
            return None
        if delta.finish_reason is not None:
            self._end(None)
        return chunk

    def lost(self) -> None:
        self._end(ConnectionError("the connection to the ingress was lost"))

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():  # its call was cancelled
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class EngineReplica:
    """One engine behind a Serve handle. ``generate`` is the only method that requests use."""

    async def __init__(self, config: EngineConfig, model_name: str, stall_s: float) -> None:  # type: ignore[misc]  # Serve awaits it
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._held = HeldPrefixes()
        self._claims = Claims()
        self._channels = ChannelServer(self._held.snapshot, self._begin)
        self._address = await self._channels.start(ray.util.get_node_ip_address())
        self._engine = AsyncEngine(config, self._held.apply)
        self._config = config
        self._info = await self._engine.start()
        logger.info("engine ready: %s", self._info)
        self._open: Counter[str] = Counter()  # sequences of each ingress that are here now
        self._newest: dict[str, int] = {}  # highest call number seen of each
        self._unanswered: dict[str, _Unanswered] = {}  # calls without a first token, by key
        self._output_tokens = 0.0  # of a sequence, as a running mean
        self._arrived = asyncio.Event()
        self._accuracy = Accuracy()
        self._metrics = EngineMetrics(model_name)
        self._stall_s = stall_s
        self._pacer = Pacer(MAX_PAUSE_QUEUED_S)  # of Serve's stream, which takes what it is given
        self._background = [
            asyncio.create_task(work) for work in (self._pacer.run(), self._watch_engine(), self._tell_routers())
        ]

    async def generate(self, call: GenerateCall | ClaimCheck) -> AsyncIterator[bytes]:
        """Stream one sequence as encoded ``Chunk``s; a ``Refusal`` may be the first item, or the last.

        Where the request comes by a channel its chunks go there and none are yielded. Else the first chunk leaves at
        once, and later ones as often as this process can bear, each with all that came since.
        """
        try:
            if isinstance(call, ClaimCheck):
                await self._claims.claim(call.key)
            else:
                async with aclosing(self._stream(call)) as stream:
                    async for data in stream:
                        yield data
        except InvalidRequestError as error:
            yield encode(Refusal("invalid", error.message, self._replica, param=error.param, code=error.code))
        except EngineOverloadedError as error:
            yield encode(Refusal("overloaded", str(error), self._replica, retry_after=error.retry_after))
        except EngineDeadError as error:
            yield encode(Refusal("dead", str(error), self._replica))
        except ConnectionError as error:
            yield encode(Refusal("cut", str(error), self._replica))

    def _begin(self, call: GenerateCall, lane: Lane) -> None:
        async def work() -> None:
            try:
                await self._send(call, lane)
            except Exception:
                lane.failed(call.number)  # what it was, Serve's call will tell, which need not wait any more
                raise

        self._claims.begin(call.key, work())

    @contextmanager
    def _counted(self, call: GenerateCall) -> Iterator[None]:
        """Count a sequence as long as it is here. Raises ``EngineDeadError`` if it is not for this engine."""
        if call.model != self._config.identity:  # in the middle of an update: these tokens are another model's
            raise EngineDeadError("the replica serves another model by now")
        self._open[call.ingress] += 1
        self._newest[call.ingress] = max(call.number, self._newest.get(call.ingress, 0))
        expected = call.expected_cached or 0
        self._unanswered[call.key] = _Unanswered(len(call.prompt) - expected, self._engine.load().steps)
        self._arrived.set()
        try:
            yield
        finally:
            self._open[call.ingress] -= 1
            self._unanswered.pop(call.key, None)

    async def _send(self, call: GenerateCall, lane: Lane) -> None:
        """See a sequence to its end, whose chunks go through a channel. Raises what that end was."""
        with self._counted(call):
            stream = self._engine.open(
                call.prompt,
                self._params(call),
                lambda: lane.ready(call.number),
                call.key,
                priority=call.priority,
                cache_salt=call.cache_salt,
                generated=call.generated,
            )
            sent = _Sent(stream, self._chunks_of(call))
            lane.add(call.number, sent)
            try:
                await sent.ended
            finally:
                lane.remove(call.number)
                stream.close()

    async def _stream(self, call: GenerateCall) -> AsyncGenerator[bytes]:
        with self._counted(call):
            chunk = self._chunks_of(call)
            deltas = self._engine.generate(
                call.prompt,
                self._params(call),
                call.key,
                priority=call.priority,
                cache_salt=call.cache_salt,
                generated=call.generated,
            )
            async with aclosing(deltas):  # aborts in the engine where the stream is not at its end
                async for delta in deltas:
                    yield encode(chunk(delta))
                    if delta.finish_reason is None and self._pacer.pause:
                        await asyncio.sleep(self._pacer.pause)

    def _chunks_of(self, call: GenerateCall) -> Callable[[Delta], Chunk]:
        """What makes a call's deltas, one after the other, its chunks."""
        key = call.key

        def chunk(delta: Delta) -> Chunk:
            if self._unanswered.pop(key, None) is not None:
                self._compare(call, delta)
            if delta.finish_reason is not None:
                self._output_tokens += 0.05 * (delta.completion_tokens - self._output_tokens)
            return Chunk.of(delta)

        return chunk

    def _params(self, call: GenerateCall) -> Any:
        room = self._info.max_model_len - (len(call.prompt) - call.generated)
        limit = call.params.max_tokens
        if call.clip and limit is not None and limit > room >= 1:
            return replace(call.params, max_tokens=room, min_tokens=min(call.params.min_tokens, room))
        return call.params

    def record_replica_metadata(self) -> dict[str, Any]:
        """Told to every router once, when the replica is up."""
        info = ReplicaInfo(self._config.model, self._config.block_size, self._config.enable_prefix_caching)
        return {
            "channel": msgspec.to_builtins(self._address),
            "max_model_len": self._info.max_model_len,
            "drain_s": serve.get_replica_context()._deployment_config.graceful_shutdown_timeout_s,
            "routing": msgspec.to_builtins(info),
        }

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` once the engine process has ended: Serve then replaces this replica."""
        if self._engine.dead is not None:
            raise self._engine.dead

    def record_routing_stats(self) -> dict[str, Any]:
        """A ``LoadReport``, for routers to which there is no channel: Serve sends it to all of them, and late."""
        report: dict[str, Any] = msgspec.to_builtins(self._report(0))
        return report

    def _report(self, number: int) -> LoadReport:
        load = self._engine.load()
        # An ingress without a sequence here needs no entry, and one that is gone would keep its own for ever.
        for ingress in [name for name, open_ in self._open.items() if open_ == 0]:
            del self._open[ingress], self._newest[ingress]
        # Two upper bounds: one counts no progress, the other no cached prefixes, and what the engine has not seen yet
        # it can't count at all.
        unanswered = self._unanswered.values()
        unseen = sum(call.tokens for call in unanswered if call.steps + 1 >= load.steps)
        backlog = min(sum(call.tokens for call in unanswered), load.waiting_tokens + load.prefill_tokens + unseen)
        budget = self._info.max_num_batched_tokens
        full_step = load.step_base + load.step_prefill * budget  # one that only prefills
        measured = load.step_prefill > 0
        return LoadReport(
            number=number,
            active=self._open.total(),
            backlog_tokens=backlog,
            kv_usage=round(load.kv_usage, 3),
            dead=self._engine.dead is not None,
            ingresses={name: (self._open[name], newest) for name, newest in self._newest.items()},
            prefill_rate=budget / full_step if measured else 0.0,
            slowdown=load.step_decode / full_step if measured else 0.0,
            harm_s=load.step_decode * self._output_tokens,
            fullness=load.blocks_filled / load.blocks_total if load.blocks_total else 0.0,
            place_s=self._place_s(load),
            prefixes=self._held.seq,
        )

    def _place_s(self, load: Load) -> float:
        """Seconds till a sequence that comes now has a place in the batch: those before it get theirs one by one, as
        running ones end (Little's law)."""
        # Where blocks are what sequences wait for, there are no more places than run.
        places = load.running if load.waiting and load.kv_usage > KV_SCARCE else self._info.max_num_seqs
        stay = self._output_tokens * (load.step_base + load.step_decode * places)
        return max(0, self._open.total() + 1 - places) * stay / max(1, places)

    async def _tell_routers(self) -> None:
        """Report to every ingress, often and as soon as a call arrives: that is how one router hears of another's."""
        for number in itertools.count(1):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), REPORT_PERIOD_S)
            self._arrived.clear()
            prefixes = self._held.changes()
            self._channels.tell(self._report(number), prefixes)
            await asyncio.sleep(REPORT_GAP_S)

    def _compare(self, call: GenerateCall, delta: Delta) -> None:
        """What the router expected to be cached, against what was."""
        if call.expected_cached is None:
            return
        self._metrics.routed(call.expected_cached, delta.cached_tokens)
        if self._accuracy.add(call.ingress, call.expected_cached, delta.cached_tokens, len(call.prompt)):
            logger.warning("an ingress is wrong about this replica's cache: sending it all prefixes again")
            self._metrics.resynced()
            if (lane := self._channels.lane(call.ingress)) is not None:
                lane.resync()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads: requests, tokens and seconds, from the engine itself."""
        load, report = self._engine.load(), self._report(0)
        done = load.prompt_tokens - load.prefix_hit_tokens - load.prefill_tokens
        return {
            "waiting": float(load.waiting),
            "running": float(load.running),
            "kv_usage": load.kv_usage,
            "prefill_rate": report.prefill_rate / (1 + report.slowdown * load.running),  # tokens per second, as it is
            "arrived_tokens": done + report.backlog_tokens,  # of prompts, since start, but for the cached ones
            "cached_tokens": float(load.prefix_hit_tokens),
        }

    def load(self) -> Load:
        """The engine's last report, whole."""
        return self._engine.load()

    async def memory(self) -> dict[str, Any]:
        """Where this replica's engine's memory went, in bytes. For people: the engine waits for its device to know."""
        return {"replica": self._replica, **asdict(await self._engine.memory_summary())}

    async def _watch_engine(self) -> None:
        """Report metrics, and end an engine that stands still: its process lives, and nothing else would notice."""
        pulse = Pulse(self._engine.pid or 0)
        while self._engine.dead is None:
            await asyncio.sleep(WATCH_PERIOD_S)
            self._metrics.update(self._engine.load())
            silent_s = self._engine.silent_s
            if silent_s > self._stall_s or pulse.stuck(silent_s):
                logger.error("nothing was heard of the engine for %.1f s: ending it", silent_s)
                await self._engine.stop()  # fails its streams at once, and makes this replica's health red

    async def __del__(self) -> None:
        for task in getattr(self, "_background", ()):  # __init__ may have failed half-way
            task.cancel()
        if (channels := getattr(self, "_channels", None)) is not None:
            await channels.stop()
        if (engine := getattr(self, "_engine", None)) is not None:
            await engine.stop()
