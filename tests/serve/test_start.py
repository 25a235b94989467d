"""FirstReplica: one call on behalf of all that wait."""

from __future__ import annotations

import asyncio

import pytest

from deployments.ingress.start import FirstReplica


class Call:
    """As a handle's response, which is cancelled explicitly."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def __await__(self):  # type: ignore[no-untyped-def]
        return self.done.__await__()

    def cancel(self) -> None:
        self.cancelled = True


async def test_one_call_waits_for_all_and_ends_with_the_last_of_them() -> None:
    calls: list[Call] = []
    first = FirstReplica(lambda: calls.append(Call()) or calls[-1], 30)
    assert first.left_s() == 0
    with first.awaited():
        with first.awaited():
            await asyncio.sleep(0)
            assert len(calls) == 1
            assert 29 < first.left_s() <= 30
        await asyncio.sleep(0)
        assert not calls[0].cancelled
    await asyncio.sleep(0)
    assert calls[0].cancelled, "else Serve would go on to count it"
    assert first.left_s() == 0


async def test_how_long_a_start_takes_is_learnt_from_one_that_was_seen() -> None:
    calls: list[Call] = []
    first = FirstReplica(lambda: calls.append(Call()) or calls[-1], 30)
    with pytest.raises(TimeoutError), first.awaited():
        raise TimeoutError
    with first.awaited():
        assert first.left_s() > 29, "one that never came taught nothing"
        await asyncio.sleep(0.05)
    with first.awaited():
        assert 0 < first.left_s() < 1


async def test_a_call_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.start.KNOCK_S", 0.01)
    calls: list[Call] = []
    first = FirstReplica(lambda: calls.append(Call()) or calls[-1], 30)
    with first.awaited():
        await asyncio.sleep(0)
        calls[0].done.set_exception(RuntimeError("not deployed"))
        await asyncio.sleep(0.05)
        assert len(calls) == 2
