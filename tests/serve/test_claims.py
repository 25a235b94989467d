"""Where a request that came by a channel and Serve's call for it meet, in either order, or do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.claims import Claims
from nanoengine.errors import EngineDeadError


class Work:
    def __init__(self, error: Exception | None = None) -> None:
        self.end = asyncio.Event()
        self.state = "new"
        self._error = error

    async def __call__(self) -> None:
        self.state = "begun"
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        self.state = "done"
        if self._error is not None:
            raise self._error


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("first", ["request", "call"])
async def test_they_meet_whichever_is_first_and_end_together(first: str) -> None:
    claims, work = Claims(), Work()
    if first == "request":
        claims.begin("a", work())
        await settle()
        assert work.state == "begun", "it waits for no call"
    call = asyncio.create_task(claims.claim("a"))
    await settle()
    if first == "call":
        claims.begin("a", work())
        await settle()
    assert work.state == "begun"
    assert not call.done()
    work.end.set()
    await call
    assert work.state == "done"
    assert len(claims) == 0


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_that_is_cancelled_ends_the_work(begun: bool) -> None:
    claims, work = Claims(), Work()
    if begun:
        claims.begin("a", work())
    call = asyncio.create_task(claims.claim("a"))
    await settle()
    call.cancel()
    await settle()
    assert call.cancelled()
    assert work.state == ("cancelled" if begun else "new")
    assert len(claims) == 0


async def test_a_call_hears_how_work_ended_before_it_came() -> None:
    claims, work = Claims(), Work(EngineDeadError("gone"))
    claims.begin("a", work())
    work.end.set()
    await settle()
    with pytest.raises(EngineDeadError):
        await claims.claim("a")
    assert len(claims) == 0


async def test_a_call_waits_for_its_request_for_a_while() -> None:
    claims = Claims(0.02)
    with pytest.raises(ConnectionError):
        await claims.claim("a")
    assert len(claims) == 0


async def test_work_that_nobody_claims_is_forgotten_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    claims, fine, failing = Claims(0.02), Work(), Work(ConnectionError("lost"))
    claims.begin("a", fine())
    claims.begin("b", failing())
    await asyncio.sleep(0.05)
    assert len(claims) == 2, "they still run"
    fine.end.set()
    failing.end.set()
    await asyncio.sleep(0.05)
    assert len(claims) == 0
    del failing
    assert unhandled == []
