"""EngineClient: one sequence through Serve's handle, as chunks or as an ``ApiError``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.config import IngressConfig
from deployments.ingress.errors import ApiError, internal, overloaded, unavailable
from deployments.messages import Chunk, GenerateCall, Refusal, decode
from deployments.routing.registry import ROUTERS
from nanoengine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")

POLL_S = 0.05


class EngineClient:
    """Calls engine replicas. Knows nothing of HTTP but how to say what went wrong."""

    def __init__(self, handle: DeploymentHandle, config: IngressConfig) -> None:
        self._handle = handle.options(method_name="generate", stream=True)  # which also starts the handle's router
        self._key = (handle.app_name, handle.deployment_name)
        self._config = config
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    def available(self) -> bool:
        """Whether a replica is known to be up. Asks no engine and does not wait."""
        router = ROUTERS.get(self._key)
        if router is None:  # not made yet, or serve_config.yaml names another router than ours
            return bool(self._handle.running_replicas_populated())
        return router.live_replicas > 0

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        clip: bool = False,
        priority: int = 0,
        cache_salt: str = "",
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
            )
            stream = self._handle.remote(call)
            sent = ended = False
            try:
                async for data in stream:
                    reply = decode(data)
                    if isinstance(reply, Refusal):
                        if reply.kind == "dead" and may_retry and not sent:
                            avoid = (reply.replica,)
                            break
                        ended = True
                        raise self._error(reply)
                    if reply.finish_reason == "abort":  # by the engine's side: nobody here has left
                        ended = True
                        raise self._gone()
                    sent, ended = True, reply.finish_reason is not None
                    yield reply
                    if ended:
                        return
                else:
                    raise self._gone()
            except (RayActorError, ReplicaUnavailableError) as error:
                logger.warning("an engine replica was lost: %s", error)
                if sent or not may_retry:
                    raise self._gone() from None
            except (BackPressureError, DeploymentUnavailableError, RayTaskError) as error:
                raise self._failure(error) from error
            finally:
                if not ended:
                    with suppress(Exception):  # of a call that failed before it had a replica, cancel raises that
                        stream.cancel()

    async def _wait_for_replica(self) -> None:
        deadline = time.monotonic() + self._config.replica_wait_s
        while not self.available():
            if time.monotonic() >= deadline:
                raise unavailable("no engine replica is up yet; try again", self._config.retry_after_s)
            await asyncio.sleep(POLL_S)

    def _gone(self) -> ApiError:
        return unavailable("the engine that served this request has ended; try again", self._config.retry_after_s)

    def _error(self, refusal: Refusal) -> ApiError:
        if refusal.kind == "invalid":
            return ApiError(400, refusal.message, param=refusal.param, code=refusal.code)
        if refusal.kind == "overloaded":
            return overloaded(refusal.message, refusal.retry_after)
        return self._gone()

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, BackPressureError):
            return overloaded("too many requests are queued; try again later", self._config.retry_after_s)
        if isinstance(error, DeploymentUnavailableError):
            return unavailable("no engine could be started; see `serve status`", self._config.retry_after_s)
        logger.error("an engine replica failed: %s", error)
        return internal()
