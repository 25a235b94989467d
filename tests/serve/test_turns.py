"""When Serve's calls go whose requests are ahead of them."""

from __future__ import annotations

import asyncio

from deployments.ingress.turns import Turns


class Calls:
    """``went`` has the numbers of those that had their turn, in order."""

    def __init__(self, turns: Turns, numbers: range) -> None:
        self.went: list[int] = []
        self.turns = turns
        self.tasks = {number: asyncio.create_task(self._call(number)) for number in numbers}

    async def _call(self, number: int) -> None:
        await self.turns.wait(number)
        self.went.append(number)

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        turns = self.turns
        assert (turns._waiting, turns._expected) == ({}, set())


async def test_calls_wait_while_any_request_waits_for_its_first_token() -> None:
    calls = Calls(Turns(after_s=60, gap_s=0), range(3))
    await asyncio.sleep(0)
    for number in (2, 0):
        calls.turns.begun(number)
        await asyncio.sleep(0.01)
        assert calls.went == []
    calls.turns.begun(1)
    await asyncio.sleep(0.01)
    assert calls.went == [0, 1, 2]
    await calls.end()


async def test_they_go_one_after_the_other_and_not_while_a_new_request_waits() -> None:
    calls = Calls(Turns(after_s=60, gap_s=0.05), range(3))
    await asyncio.sleep(0)
    for number in range(3):
        calls.turns.begun(number)
    await asyncio.sleep(0.01)
    assert calls.went == [0]
    new = Calls(calls.turns, range(3, 4))
    await asyncio.sleep(0.1)
    assert calls.went == [0]
    calls.turns.begun(3)
    await asyncio.sleep(0.3)
    assert (calls.went, new.went) == ([0, 1, 2], [3])
    await calls.end()


async def test_none_waits_for_long() -> None:
    calls = Calls(Turns(after_s=0.05), range(3))
    await asyncio.sleep(0.01)
    assert calls.went == []
    await asyncio.sleep(0.2)
    assert calls.went == [0, 1, 2]
    await calls.end()


async def test_who_is_to_tell_an_error_goes_at_once() -> None:
    calls = Calls(Turns(after_s=60), range(2))
    await asyncio.sleep(0)
    calls.turns.hurry(1)
    await asyncio.sleep(0)
    assert calls.went == [1]
    await calls.end()


async def test_a_request_that_is_left_holds_up_nobody() -> None:
    calls = Calls(Turns(after_s=60), range(2))
    await asyncio.sleep(0)
    calls.turns.begun(0)
    calls.tasks[1].cancel()
    await asyncio.sleep(0.01)
    assert calls.went == [0]
    await calls.end()
