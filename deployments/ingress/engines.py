"""EngineClient: one sequence through Serve's handle, as chunks or as an ``ApiError``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, MutableMapping
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from typing import Any

import grpc
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.channel import LOOK_S, Address, ChannelClient
from deployments.config import IngressConfig
from deployments.ingress.errors import ApiError, internal, overloaded, unavailable
from deployments.ingress.standing import Standing
from deployments.ingress.start import FirstReplica
from deployments.ingress.turns import Turns
from deployments.messages import Chunk, ClaimCheck, GenerateCall, Misplaced, Refusal, Reply, decode, merged
from deployments.pacing import HAPROXY, MAX_PAUSE_QUEUED_S, MAX_PAUSE_S, Pacer
from deployments.routing import registry
from deployments.routing.load import LoadReport
from nanoengine.cache.events import PrefixEvents
from nanoengine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")

LAST_CHUNK_S = 2.0
MAX_LOSSES = 3  # replicas that a request may lose before it is given up
# What a call to it raises; the last where Serve has closed its channel meanwhile, as it has taken the replica off.
LOST = (RayActorError, ReplicaUnavailableError, TaskCancelledError, grpc.RpcError, grpc.aio.UsageError)
FULL_WAIT_S, MAX_FULL_WAIT_S = 0.25, 2.0  # between two tries, where all replicas are full or Serve's queue is


class EngineClient:
    """Calls engine replicas. Knows nothing of HTTP but how to say what went wrong."""

    def __init__(
        self, handle: DeploymentHandle, config: IngressConfig, model: str, continued: Callable[[str], None]
    ) -> None:
        """``model`` is the ``identity`` of the engines that the prompts are made for; ``continued`` is told of
        each sequence that has to go on at another replica, and why."""
        self._handle = handle.options(method_name="generate", stream=True)  # which also starts the handle's router
        self._memory = handle.options(method_name="memory")
        self._first = FirstReplica(handle.options(method_name="load").remote, config.start_wait_s or 0.0)
        self._key = (handle.app_name, handle.deployment_name)
        self._config = config
        self._model = model
        self._continued = continued
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}  # by call number
        self._pacer = Pacer(MAX_PAUSE_S if HAPROXY else MAX_PAUSE_QUEUED_S)
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._standing = Standing()
        self._stopped = False
        self._channels = ChannelClient(self._name, self._deliver, self._observe, self._lost, self._failed)
        registry.CARRIERS[self._key] = self._channels

    def available(self) -> bool:
        """Whether a replica is known to be up. Asks no engine and does not wait."""
        router = registry.ROUTERS.get(self._key)
        if router is None:  # not made yet, or serve_config.yaml names another router than ours
            return bool(self._handle.running_replicas_populated())
        return router.live_replicas > 0

    def stop(self) -> None:
        """End all sequences, with an error, and begin none any more."""
        self._stopped = True
        for inbox in self._inboxes.values():
            inbox.end(_stopping(self._config.retry_after_s))

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens, as the engines say it; None while none has."""
        router = registry.ROUTERS.get(self._key)
        told = router.replica_metadata.values() if router is not None else ()
        return min((data["max_model_len"] for data in told if data), default=None)

    def retry_after_s(self) -> float:
        """When a client that is sent away should come back."""
        return max(self._config.retry_after_s, self._first.left_s())

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        session: str = "",
    ) -> AsyncGenerator[Chunk]:
        """The chunks of one sequence; the last one has a finish reason. Leaving the loop aborts it.

        Where its replica is lost, or is being stopped and does not get done in time, the sequence goes on at another
        one, with the same tokens: whoever reads it need not know. Raises ``ApiError``.
        """
        if params.seed is None and not params.greedy:
            # Drawn here, so that another replica draws the same tokens.
            params = params.seeded(random.getrandbits(63))
        so_far = _SoFar(prompt)
        handle = self._handle.options(session_id=session) if session else self._handle
        while True:
            await self._wait_for_replica(so_far)
            if self._stopped:
                raise _stopping(self._config.retry_after_s)
            call = GenerateCall(
                ingress=self._name,
                number=next(self._numbers),
                prompt=so_far.tokens,
                generated=so_far.count,
                params=params,
                model=self._model,
                clip=clip,
                priority=priority,
                cache_salt=cache_salt,
                avoid=tuple(so_far.suspects),
            )
            inbox = self._inboxes[call.number] = _Inbox()
            watcher = self._spawn(self._call(handle, call, session, inbox))
            ended = False
            try:
                while isinstance(reply := await inbox.take(), Chunk):
                    self._turns.begun(call.number)
                    if reply.finish_reason == "abort":  # by the engine's side: nobody here has left
                        break
                    if ended := reply.finish_reason is not None:
                        self._turns.hurry(call.number)
                    yield so_far.add(reply)
                    if ended:
                        return
                    if self._pacer.pause:
                        await asyncio.sleep(self._pacer.pause)
            finally:
                del self._inboxes[call.number]
                replica = self._placed.pop(call.number, "")
                if not ended:  # else the watcher sees the call to its end
                    watcher.cancel()
                    self._channels.leave(replica, call.number)
            if isinstance(reply, Refusal) and reply.kind == "dead":
                self._standing.refuse(reply.replica)
            if isinstance(reply, BackPressureError) and so_far.may_wait(self._config.resume_wait_s):
                await asyncio.sleep(FULL_WAIT_S)
            elif not so_far.may_go_on(reply, replica):
                raise self._error(reply) from (reply if isinstance(reply, BaseException) else None)
            elif not isinstance(reply, Misplaced):  # which is no loss
                logger.info("a sequence of %d tokens leaves replica %s: %r", so_far.count, replica, reply)
                self._continued((reply if isinstance(reply, _Leave) else _Leave.LOST).value)

    async def _call(self, handle: DeploymentHandle, call: GenerateCall, session: str, inbox: _Inbox) -> None:
        """See one call to its end. The request goes ahead where it can, and Serve's call has its turn later."""
        router, replica, pause = registry.ROUTERS.get(self._key), None, FULL_WAIT_S
        try:
            replica = router.place(call, session) if router is not None else None
            if replica is not None:
                await self._turns.wait(call.number)
            while replica is None or not inbox.complete:  # else nothing is left to be counted, drained or cancelled
                stream = handle.remote(call if replica is None else ClaimCheck(call.key))
                try:
                    return await _watch(stream, inbox)
                except asyncio.CancelledError:
                    with suppress(Exception):  # of a call that failed before it had a replica, cancel raises that
                        stream.cancel()
                    raise
                except BackPressureError:
                    if replica is None:
                        raise
                # So many calls at once were too many for Serve's queue of them; the request itself has its place.
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_FULL_WAIT_S)
        except Exception as error:
            inbox.end(error)
        finally:
            if router is not None and replica is not None:
                router.ended(call, replica)

    async def memory(self) -> dict[str, Any]:
        """Where one replica's memory went, whichever answers. Raises ``ApiError``."""
        await self._wait_for_replica(_SoFar(np.empty(0, np.int32)))
        try:
            summary: dict[str, Any] = await self._memory.remote()
        except Exception as error:
            raise self._error(error) from error
        return summary

    async def _wait_for_replica(self, so_far: _SoFar) -> None:
        """Until there is one to ask. Raises ``ApiError``."""
        if so_far.suspects or so_far.count:
            wait_s, usable = self._config.resume_wait_s, partial(self._usable, so_far.suspects)
        else:
            wait_s, usable = self._config.start_wait_s or self._config.replica_wait_s, partial(self.available)
        if usable():
            return
        deadline = so_far.since + wait_s
        with self._first.awaited() if self._config.start_wait_s else nullcontext():
            while not usable():
                if time.monotonic() >= deadline:
                    raise unavailable("no engine replica is up; try again", self.retry_after_s())
                await asyncio.sleep(LOOK_S)

    def _usable(self, suspects: Collection[str]) -> bool:
        ours = self._key in registry.ROUTERS
        return self.available() and (not ours or self._standing.usable(suspects, self._channels.connected))

    def _gone(self) -> ApiError:
        return unavailable("the engine that served this request has ended; try again", self._config.retry_after_s)

    def _error(self, reply: Reply | _Leave | BaseException | None) -> ApiError:
        """What to tell the client of a call that ended without a finish reason.

        Raises ``CancelledError``: Serve ends the calls of a request whose client has left, and may do so before it
        cancels the request itself.
        """
        match reply:
            case asyncio.CancelledError():
                raise reply
            case ApiError():
                return reply
            case Refusal(kind="invalid"):
                return ApiError(400, reply.message, param=reply.param, code=reply.code)
            case Refusal(kind="overloaded"):
                return overloaded(reply.message, reply.retry_after)
            case BackPressureError():
                wait_s = reply.retry_after_s or self._config.retry_after_s
                return overloaded("too many requests are waiting; try again later", wait_s)
            case DeploymentUnavailableError():
                return unavailable("no engine could be started; see `serve status`", self._config.retry_after_s)
            case None | Chunk() | _Leave() | Refusal(kind="dead" | "cut"):
                return self._gone()
            case BaseException() if isinstance(reply, LOST):
                return self._gone()
        logger.error("an engine replica failed: %r", reply)
        return internal()

    def _deliver(self, replica: str, number: int, chunk: Chunk) -> None:
        if (inbox := self._inboxes.get(number)) is not None:
            inbox.put(chunk)
        else:  # the client has left, and the replica has not heard of it yet, or never will
            self._channels.leave(replica, number)

    def _failed(self, number: int) -> None:
        self._turns.hurry(number)

    @property
    def _placed(self) -> MutableMapping[int, str]:
        """Replicas by the numbers of the calls that are there; nothing where serve_config.yaml names another router."""
        router = registry.ROUTERS.get(self._key)
        return router.placed if router is not None else {}

    def _leave(self, replicas: Collection[str], why: _Leave) -> None:
        """End the calls that are there, as far as they have a place to go to."""
        placed = self._placed
        for number, inbox in self._inboxes.items():
            if (replica := placed.get(number, "")) in replicas and (why is _Leave.LOST or self._usable((replica,))):
                inbox.end(why)

    def _lost(self, replica: str) -> None:
        self._leave((replica,), _Leave.LOST)

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
        while True:
            if (router := registry.ROUTERS.get(self._key)) is not None:
                told = router.replica_metadata
                addresses = {id: data["channel"] for id, data in told.items() if data}
                self._channels.connect(msgspec.convert(addresses, dict[str, Address]))
                for replica in router.wants():
                    self._channels.resync(replica)
                self._standing.update(told)
                if overdue := self._standing.overdue():
                    self._leave(overdue, _Leave.STOPPING)
                for number in router.placed.keys() - self._inboxes.keys():  # calls that were left while being placed
                    del router.placed[number]
            await asyncio.sleep(LOOK_S)


def _stopping(retry_after_s: float) -> ApiError:
    return unavailable("the service is being stopped; try again", retry_after_s)


class _Leave(Enum):
    """Why a call ends that its replica has not ended."""

    LOST = "lost"  # the replica is, or the channel to it, on which its chunks would have come
    STOPPING = "stopping"  # it will be killed soon


class _SoFar:
    """What one sequence has got, from whichever replicas, and what it has gone through."""

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        self.since = time.monotonic()  # when it began to wait for a replica
        self.suspects: list[str] = []  # those that it has lost or left
        self.count = 0  # tokens of the answer
        self._prompt = prompt
        self._answer = array("i")
        self._told = 0  # ... that its replica says there are
        self._cached = 0  # tokens of the prompt, as the first replica said
        self._losses = 0
        self._vain = False  # whether there has been a loss since the last token

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Of the prompt and the answer."""
        return np.concatenate((self._prompt, np.array(self._answer, np.int32))) if self._answer else self._prompt

    def add(self, chunk: Chunk) -> Chunk:
        """What the reader gets of a chunk."""
        if not self._answer:
            self._cached = chunk.cached_tokens
        self._answer.extend(chunk.token_ids)
        self.count, self._told, self._vain = len(self._answer), chunk.completion_tokens, False
        return structs.replace(chunk, cached_tokens=self._cached) if self.suspects else chunk

    def may_wait(self, seconds: float) -> bool:
        """Whether it may wait where all replicas are full: those who have not begun are told to come back."""
        return bool(self.suspects or self.count) and time.monotonic() - self.since < seconds

    def may_go_on(self, reply: Reply | _Leave | BaseException | None, replica: str) -> bool:
        """Whether a call that ended like this is to be made again elsewhere; ``replica`` is where it was.

        One loss may follow another only if there was a token in between, and a few in all: a request that kills
        engines must not get around to all of them.
        """
        if not _is_loss(reply) or self.count != self._told:
            return False
        self.since = time.monotonic()
        if isinstance(reply, Misplaced):  # no fault of anybody's
            return True
        if reply is not _Leave.STOPPING:
            if self._vain or self._losses == MAX_LOSSES:
                return False
            self._losses, self._vain = self._losses + 1, True
        self.suspects.append(replica)
        return True


class _Inbox:
    """What came for one call, from its channel or Serve's stream, and was not taken yet. Chunks that wait are merged:
    a reader that is late gets one large chunk."""

    __slots__ = ("_chunk", "_end", "_ended", "_event", "complete")

    def __init__(self) -> None:
        self.complete = False  # the last chunk is there, or was
        self._chunk: Chunk | None = None
        self._end: Refusal | _Leave | BaseException | None = None
        self._ended = False
        self._event = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunk = chunk if self._chunk is None else merged(self._chunk, chunk)
        self.complete = chunk.finish_reason not in (None, "abort")
        self._event.set()

    def end(self, why: Refusal | _Leave | BaseException | None) -> None:
        """The call is over."""
        if not self._ended:
            self._ended, self._end = True, why
            self._event.set()

    async def take(self) -> Chunk | Refusal | _Leave | BaseException | None:
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
    """Read Serve's stream of one call to its end. Raises ``BackPressureError``: the call was not made."""
    try:
        async for data in stream:
            reply = decode(data)
            if isinstance(reply, Refusal):
                inbox.end(reply)
            else:
                inbox.put(reply)
        inbox.end(None)
    except BackPressureError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        inbox.end(error)
        if isinstance(error, asyncio.CancelledError):
            raise


def _is_loss(reply: Reply | _Leave | BaseException | None) -> bool:
    """Whether the replica was lost, rather than the request at fault."""
    match reply:
        case Refusal():
            return reply.kind in ("dead", "cut")
        case BaseException():
            return isinstance(reply, (*LOST, Misplaced))
    return True  # the channel was lost, or the end of the answer with it, or the engine gave up
