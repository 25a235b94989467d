"""EngineClient: one sequence through Serve's handle, as chunks or as an ``ApiError``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.channel import Address, ChannelClient
from deployments.config import IngressConfig
from deployments.ingress.errors import ApiError, internal, overloaded, unavailable
from deployments.messages import Chunk, GenerateCall, Refusal, decode, merged
from deployments.pacing import Pacer
from deployments.routing import registry
from deployments.routing.load import LoadReport
from nanoengine.cache.events import PrefixEvents
from nanoengine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")

POLL_S = 0.05
LAST_CHUNK_S = 2.0


class EngineClient:
    """Calls engine replicas. Knows nothing of HTTP but how to say what went wrong."""

    def __init__(self, handle: DeploymentHandle, config: IngressConfig) -> None:
        self._handle = handle.options(method_name="generate", stream=True)  # which also starts the handle's router
        self._memory = handle.options(method_name="memory")
        self._key = (handle.app_name, handle.deployment_name)
        self._config = config
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}  # by call number
        self._pacer = Pacer()
        self._tasks: set[asyncio.Task[None]] = set()

    def available(self) -> bool:
        """Whether a replica is known to be up. Asks no engine and does not wait."""
        router = registry.ROUTERS.get(self._key)
        if router is None:  # not made yet, or serve_config.yaml names another router than ours
            return bool(self._handle.running_replicas_populated())
        return router.live_replicas > 0

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens, as the engines say it; None while none has."""
        router = registry.ROUTERS.get(self._key)
        told = router.replica_metadata.values() if router is not None else ()
        return min((data["max_model_len"] for data in told if data), default=None)

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        session: str = "",
        token_ids: bool = False,
    ) -> AsyncGenerator[Chunk]:
        """The chunks of one sequence; the last one has a finish reason. Leaving the loop aborts it.

        A replica whose engine dies before the first chunk is replaced by another one, once: nothing was sent, so the
        client need not know. Raises ``ApiError``.
        """
        avoid: tuple[str, ...] = ()
        for may_retry in (True, False):
            await self._wait_for_replica()
            call = GenerateCall(
                ingress=self._name,
                number=next(self._numbers),
                prompt=prompt,
                params=params,
                clip=clip,
                priority=priority,
                cache_salt=cache_salt,
                avoid=avoid,
                token_ids=token_ids,
            )
            inbox = self._inboxes[call.number] = _Inbox()
            handle = self._handle.options(session_id=session) if session else self._handle  # a copy takes 10 us
            stream = handle.remote(call)
            watcher = self._spawn(_watch(stream, inbox))
            sent = ended = False
            try:
                while True:
                    reply = await inbox.take()
                    if isinstance(reply, Chunk):
                        if reply.finish_reason == "abort":  # by the engine's side: nobody here has left
                            raise self._gone()
                        sent, ended = True, reply.finish_reason is not None
                        yield reply
                        if ended:
                            return
                        if self._pacer.pause:
                            await asyncio.sleep(self._pacer.pause)
                    elif may_retry and not sent and _may_go_elsewhere(reply):
                        avoid = (reply.replica,) if isinstance(reply, Refusal) else ()
                        break
                    else:
                        raise self._error(reply) from (reply if isinstance(reply, BaseException) else None)
            finally:
                del self._inboxes[call.number]
                if not ended:  # else the watcher sees the call to its end
                    watcher.cancel()
                    with suppress(Exception):  # of a call that failed before it had a replica, cancel raises that
                        stream.cancel()

    async def memory(self) -> dict[str, Any]:
        """Where one replica's memory went, whichever answers. Raises ``ApiError``."""
        await self._wait_for_replica()
        try:
            summary: dict[str, Any] = await self._memory.remote()
        except Exception as error:
            raise self._error(error) from error
        return summary

    async def _wait_for_replica(self) -> None:
        deadline = time.monotonic() + self._config.replica_wait_s
        while not self.available():
            if time.monotonic() >= deadline:
                raise unavailable("no engine replica is up yet; try again", self._config.retry_after_s)
            await asyncio.sleep(POLL_S)

    def _gone(self) -> ApiError:
        return unavailable("the engine that served this request has ended; try again", self._config.retry_after_s)

    def _error(self, reply: Refusal | BaseException | None) -> ApiError:
        """What to tell the client of a call that ended without a finish reason.

        Raises ``CancelledError``: Serve ends the calls of a request whose client has left, and may do so before it
        cancels the request itself.
        """
        match reply:
            case asyncio.CancelledError():
                raise reply
            case Refusal(kind="invalid"):
                return ApiError(400, reply.message, param=reply.param, code=reply.code)
            case Refusal(kind="overloaded"):
                return overloaded(reply.message, reply.retry_after)
            case BackPressureError():
                wait_s = reply.retry_after_s or self._config.retry_after_s
                return overloaded("too many requests are waiting; try again later", wait_s)
            case DeploymentUnavailableError():
                return unavailable("no engine could be started; see `serve status`", self._config.retry_after_s)
            case Refusal(kind="dead") | RayActorError() | ReplicaUnavailableError() | TaskCancelledError() | None:
                return self._gone()
        logger.error("an engine replica failed: %r", reply)
        return internal()

    def _deliver(self, number: int, chunk: Chunk) -> None:
        if (inbox := self._inboxes.get(number)) is not None:  # else the client has left
            inbox.put(chunk)

    def _observe(self, replica: str, load: LoadReport | None, prefixes: list[PrefixEvents]) -> None:
        if (router := registry.ROUTERS.get(self._key)) is not None:
            router.observe(replica, load, prefixes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self) -> None:
        """Keep a channel open to each replica, and the pace. For ever; start it once, on the requests' event loop."""
        self._spawn(self._pacer.run())
        channels = ChannelClient(self._name, self._deliver, self._observe)
        while True:
            if (router := registry.ROUTERS.get(self._key)) is not None:
                told = router.replica_metadata.items()
                channels.connect({id: msgspec.convert(data["channel"], Address) for id, data in told if data})
                for replica in router.wants():
                    channels.resync(replica)
            await asyncio.sleep(POLL_S)


class _Inbox:
    """What came for one call, from its channel or Serve's stream, and was not taken yet. Chunks that wait are merged:
    a reader that is late gets one large chunk."""

    __slots__ = ("_chunk", "_end", "_ended", "_event")

    def __init__(self) -> None:
        self._chunk: Chunk | None = None
        self._end: Refusal | BaseException | None = None
        self._ended = False
        self._event = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunk = chunk if self._chunk is None else merged(self._chunk, chunk)
        self._event.set()

    def end(self, why: Refusal | BaseException | None) -> None:
        """Serve says that the call is over."""
        if not self._ended:
            self._ended, self._end = True, why
            self._event.set()

    async def take(self) -> Chunk | Refusal | BaseException | None:
        """The next chunk, or why there is none. None: the call ended, and its last chunk never came."""
        while self._chunk is None:
            if self._ended:
                if self._end is None:  # a normal end, by another way than the chunks: the last may be still under way
                    with suppress(TimeoutError):
                        self._event.clear()
                        await asyncio.wait_for(self._event.wait(), LAST_CHUNK_S)
                if self._chunk is None:
                    return self._end
            else:
                await self._event.wait()
                self._event.clear()
        chunk, self._chunk = self._chunk, None
        return chunk


async def _watch(stream: AsyncIterator[bytes], inbox: _Inbox) -> None:
    """Read Serve's stream of one call to its end."""
    try:
        async for data in stream:
            reply = decode(data)
            if isinstance(reply, Refusal):
                inbox.end(reply)
            else:
                inbox.put(reply)
        inbox.end(None)
    except (Exception, asyncio.CancelledError) as error:
        inbox.end(error)
        if isinstance(error, asyncio.CancelledError):
            raise


def _may_go_elsewhere(reply: Refusal | BaseException | None) -> bool:
    """Whether the replica was lost, rather than the request at fault."""
    return (isinstance(reply, Refusal) and reply.kind == "dead") or isinstance(
        reply, (RayActorError, ReplicaUnavailableError)
    )
