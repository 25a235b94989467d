"""How the end of a call to an engine replica is told, over a stand-in for Serve's handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from ray.exceptions import TaskCancelledError

from deployments.config import IngressConfig
from deployments.ingress.engines import EngineClient
from deployments.ingress.errors import ApiError
from nanoengine.sampling.params import SamplingParams


class Call:
    """A call that ends with ``error``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        raise self._error

    def cancel(self) -> None:
        pass


class Handle:
    app_name = deployment_name = "test"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def options(self, **options: Any) -> Handle:
        self.asked = options
        return self

    def running_replicas_populated(self) -> bool:
        return True

    def remote(self, call: Any) -> Call:
        return Call(self._error)


async def generate(error: BaseException, handle: Handle | None = None, **call: Any) -> EngineClient:
    client = EngineClient(handle or Handle(error), IngressConfig(resume_wait_s=0.5), "m", [].append)
    try:
        async for _ in client.generate(np.array([1], np.int32), SamplingParams(), **call):
            pass
    finally:
        assert not client._inboxes
    return client


async def test_call_that_serve_cancels_is_a_cancelled_request_and_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Serve does it when the client has left, and may cancel the call before the request."""
    with pytest.raises(asyncio.CancelledError):
        await generate(asyncio.CancelledError())
    assert not caplog.records


async def test_call_that_its_replica_cancels_may_be_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError) as raised:
        await generate(TaskCancelledError())
    assert raised.value.status == 503
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


async def test_session_is_told_as_serve_s_own_routers_expect_it() -> None:
    handle = Handle(TaskCancelledError())
    with pytest.raises(ApiError):
        await generate(TaskCancelledError(), handle, session="s")
    assert handle.asked == {"session_id": "s"}
