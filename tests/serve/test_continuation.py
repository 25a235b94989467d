"""A sequence that loses its replica, or has to leave it, over a stand-in for Serve's handle and router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata, UsageError
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import BackPressureError

from deployments.config import IngressConfig
from deployments.ingress import engines
from deployments.ingress.engines import EngineClient, _Leave
from deployments.ingress.errors import ApiError
from deployments.ingress.standing import FORGET_S, MARGIN_S, Standing
from deployments.messages import Chunk, ClaimCheck, GenerateCall, Misplaced, Refusal, encode
from deployments.routing import registry
from nanoengine.sampling.params import SamplingParams

PROMPT = np.array([5, 6, 7], np.int32)
LENGTH = 12
End = Exception | Refusal | str | None


@dataclass
class Script:
    """What a replica does with a call: so many chunks, and how it ends. None: as it should; "hang": not at all."""

    chunks: int = LENGTH
    end: End = None
    step: int = 1  # tokens in a chunk


@dataclass
class Router:
    """Stand-in for ours."""

    replica_metadata: dict[str, dict[str, Any]]
    live_replicas: int = 3
    placed: dict[int, str] = field(default_factory=dict)

    def observe(self, *news: Any) -> None: ...

    def wants(self) -> list[str]:
        return []

    def place(self, *asked: Any) -> None: ...


class Handle:
    """The n-th call gets the n-th script, at replica "r<n>"."""

    app_name, deployment_name = "app", "Engines"

    def __init__(self, router: Router, *scripts: Script) -> None:
        self.calls: list[GenerateCall] = []
        self.cancelled: list[int] = []
        self.continued: list[str] = []  # why, of each sequence that left a replica to go on
        self._router, self._scripts = router, scripts

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, call: GenerateCall) -> _Call:
        index = len(self.calls)
        self.calls.append(call)
        self._router.placed[call.number] = f"r{index}"
        return _Call(self, call, self._scripts[index], f"r{index}")


class _Call:
    def __init__(self, handle: Handle, call: GenerateCall, script: Script, replica: str) -> None:
        self._handle, self._call, self._script, self._replica = handle, call, script, replica

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Token i is i, and is written as a letter."""
        call, script = self._call, self._script
        so_far = call.prompt[len(call.prompt) - call.generated :].tolist() if call.generated else []
        assert so_far == list(range(call.generated))
        at = call.generated
        for _ in range(script.chunks):
            if at == LENGTH:
                return
            await asyncio.sleep(0)
            ids = tuple(range(at, min(LENGTH, at + script.step)))
            at += len(ids)
            reason = "length" if at == LENGTH and script.end is None else None
            yield encode(Chunk(text(ids), reason, None, 3, 2 + call.generated, at, token_ids=ids))  # type: ignore[arg-type]
        match script.end:
            case "hang":
                await asyncio.Event().wait()
            case Refusal():
                yield encode(script.end)
            case Exception():
                raise script.end

    def cancel(self) -> None:
        self._handle.cancelled.append(self._call.number)


def text(ids: Any) -> str:
    return "".join(chr(97 + i) for i in ids)


WHOLE = text(range(LENGTH))


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router({f"r{i}": {"drain_s": 30.0} for i in range(6)})
    registry.ROUTERS["app", "Engines"] = router
    yield router
    del registry.ROUTERS["app", "Engines"]


def client_of(router: Router, *scripts: Script, **limits: Any) -> tuple[EngineClient, Handle]:
    handle = Handle(router, *scripts)
    limits = {"resume_wait_s": 0.3, **limits}
    client = EngineClient(handle, IngressConfig(**limits), "m", handle.continued.append)  # type: ignore[arg-type]
    client._standing.update(router.replica_metadata)
    return client, handle


async def collect(client: EngineClient, params: SamplingParams | None = None, **asked: Any) -> list[Chunk]:
    return [c async for c in client.generate(PROMPT, params or SamplingParams(max_tokens=LENGTH), **asked)]


def lost(kind: Any = "dead", replica: str = "r0") -> Refusal:
    return Refusal(kind, "gone", replica)


UNREACHED = ActorUnavailableError("Actor is unavailable.", b"x" * 16)  # what Serve makes of gRPC's UNAVAILABLE
RESET = AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata(), "RST_STREAM")
CLOSED = UsageError("Channel is closed.")


@pytest.mark.parametrize("end", [lost(), lost("cut"), RayActorError(), UNREACHED, RESET, CLOSED, None])
@pytest.mark.parametrize("cut", range(LENGTH))
async def test_a_lost_sequence_goes_on_with_the_same_tokens(
    router: Router, end: End, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LAST_CHUNK_S", 0.01)
    client, handle = client_of(router, Script(cut, end), Script())
    chunks = await collect(client)
    assert "".join(chunk.text for chunk in chunks) == WHOLE
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(LENGTH))
    assert (chunks[-1].finish_reason, chunks[-1].completion_tokens) == ("length", LENGTH)
    assert {chunk.cached_tokens for chunk in chunks} == {2}, "what the first replica found"
    first, second = handle.calls
    assert second.generated == cut
    assert second.prompt.tolist() == [5, 6, 7, *range(cut)]
    assert second.avoid == ("r0",)
    assert first.params == second.params
    assert first.params.seed is not None, "or it would go on with others"
    assert handle.continued == ["lost"]
    assert not router.placed


async def test_greedy_requests_need_no_seed(router: Router) -> None:
    client, handle = client_of(router, Script(), Script())
    for params in (SamplingParams(temperature=0), SamplingParams(seed=4)):
        await collect(client, params)
    assert [call.params.seed for call in handle.calls] == [None, 4]


async def test_a_request_that_kills_engines_does_not_get_around_to_all_of_them(router: Router) -> None:
    client, handle = client_of(router, Script(0, lost()), Script(0, lost(replica="r1")), Script())
    with pytest.raises(ApiError) as raised:
        await collect(client)
    assert (raised.value.status, len(handle.calls)) == (503, 2), "one other replica, without a token in between"
    client, handle = client_of(router, *(Script(1, lost(replica=f"r{i}")) for i in range(6)))
    with pytest.raises(ApiError):
        await collect(client)
    assert len(handle.calls) == 1 + engines.MAX_LOSSES


@pytest.mark.parametrize(
    ("end", "status"), [(Refusal("invalid", "no", "r0"), 400), (BackPressureError(1, 1), 429), (ValueError(), 500)]
)
async def test_what_is_no_loss_is_not_tried_again(router: Router, end: End, status: int) -> None:
    client, handle = client_of(router, Script(0, end), Script())
    with pytest.raises(ApiError) as raised:
        await collect(client)
    assert (raised.value.status, len(handle.calls)) == (status, 1)
    assert not handle.continued


async def test_who_has_begun_waits_where_all_others_are_full(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FULL_WAIT_S", 0.01)
    full = Script(0, BackPressureError(1, 1))
    client, handle = client_of(router, Script(3, lost()), full, full, Script())
    assert "".join(chunk.text for chunk in await collect(client)) == WHOLE
    assert len(handle.calls) == 4
    assert handle.continued == ["lost"], "once, however often it asks"


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_request_that_its_replica_would_not_have_is_sent_again_and_nobody_suspected(
    router: Router, chunks: int
) -> None:
    """It went there ahead of Serve's call, and may have got tokens before that was rejected."""
    rejected = [Script(chunks if i < 3 else 0, Misplaced()) for i in range(5)]  # more often than replicas may be lost
    client, handle = client_of(router, *rejected, Script())
    chunk = (await collect(client))[-1]
    assert (chunk.completion_tokens, chunk.finish_reason) == (LENGTH, "length")
    assert [call.generated for call in handle.calls] == [min(i, 3) * chunks for i in range(6)]
    assert {call.avoid for call in handle.calls} == {()}
    assert handle.continued == [], "it is no loss"
    assert not router.placed


async def test_who_was_sent_away_with_tokens_waits_where_all_are_full(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "FULL_WAIT_S", 0.01)
    full = Script(0, BackPressureError(1, 1))
    client, handle = client_of(router, Script(3, Misplaced()), full, full, Script())
    assert "".join(chunk.text for chunk in await collect(client)) == WHOLE
    client, handle = client_of(router, Script(0, Misplaced()), full, Script())
    with pytest.raises(ApiError) as raised:
        await collect(client)
    assert (raised.value.status, len(handle.calls)) == (429, 2), "without it is told to come back"


async def test_who_has_lost_the_last_replica_waits_for_a_new_one(router: Router) -> None:
    router.replica_metadata = {"r0": {}}
    client, _ = client_of(router, Script(3, lost()), Script(), resume_wait_s=5)

    async def replaced() -> None:
        await asyncio.sleep(0.1)
        client._standing.update({"r1": {}})

    replacing = asyncio.create_task(replaced())
    assert "".join(chunk.text for chunk in await collect(client)) == WHOLE
    await replacing
    router.replica_metadata = {"r0": {}}
    client, _ = client_of(router, Script(3, lost()), Script())
    with pytest.raises(ApiError) as raised:
        await collect(client)
    assert raised.value.status == 503


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("chunks", [0, 5])
async def test_a_lost_channel_moves_its_calls_at_once(router: Router, chunks: int) -> None:
    client, handle = client_of(router, Script(chunks, "hang"), Script())
    reading = asyncio.create_task(collect(client))
    await until(lambda: handle.calls and client._inboxes)
    await asyncio.sleep(0.02)
    client._lost("r1")  # nobody's
    client._lost("r0")
    assert "".join(chunk.text for chunk in await reading) == WHOLE
    assert handle.cancelled == [0]


async def test_calls_leave_a_replica_before_it_is_killed_if_there_is_another(router: Router) -> None:
    client, handle = client_of(router, Script(5, "hang"), Script())
    reading = asyncio.create_task(collect(client))
    await until(lambda: handle.calls and client._inboxes)
    await asyncio.sleep(0.02)
    client._standing.update({})
    client._leave({"r0"}, _Leave.STOPPING)
    await asyncio.sleep(0.02)
    assert len(handle.calls) == 1, "as long as there is no other it is better off where it is"
    client._standing.update(router.replica_metadata)
    client._leave({"r0"}, _Leave.STOPPING)
    assert "".join(chunk.text for chunk in await reading) == WHOLE
    assert handle.calls[1].avoid == ("r0",)
    assert handle.continued == ["stopping"]


async def test_tokens_that_do_not_add_up_are_not_gone_on_from(router: Router) -> None:
    """Whatever the reason, an error is better than a wrong answer."""
    client, _ = client_of(router, Script(3, lost()), Script())
    chunks = client.generate(PROMPT, SamplingParams())
    async for chunk in chunks:
        if chunk.completion_tokens == 2:
            break
    inbox = client._inboxes[0]
    inbox._chunk = Chunk("c", None, None, 3, 0, 4, token_ids=(2,))
    with pytest.raises(ApiError):
        async for _ in chunks:
            pass


def test_standing_of_replicas() -> None:
    now = 0.0
    standing = Standing(lambda: now)
    standing.update({"a": {"drain_s": 60.0}, "b": {"drain_s": 4.0}, "c": {}, "d": None})
    assert standing.usable((), ())
    assert standing.usable(("a", "b", "c"), ())
    assert not standing.usable(("a", "b", "c", "d"), ())
    assert standing.usable(("a", "b", "c", "d"), ("b",)), "it is back"
    standing.refuse("b")
    assert not standing.usable(("a", "c", "d"), ("b",)), "but not if its engine has ended"
    standing.update({"d": None})
    now = 2.9
    assert standing.overdue() == set()
    now = 3.1
    assert standing.overdue() == {"b"}
    now = 60.0 - MARGIN_S
    assert standing.overdue() == {"a", "b"}, "c does not say how long it has"
    standing.update({"a": {"drain_s": 60.0}, "d": None})
    assert standing.overdue() == {"b"}, "a is back: the controller had lost it"
    now = 60.0 + FORGET_S
    standing.update({"a": {"drain_s": 60.0}, "d": None})
    assert standing.overdue() == set()


async def test_a_request_that_is_ahead_outlives_a_full_queue_of_serve_s(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call is one of many that go at once, and is made again; it has its place, and its tokens come meanwhile."""
    monkeypatch.setattr(engines, "FULL_WAIT_S", 0.01)
    ended: list[str] = []
    monkeypatch.setattr(router, "place", lambda call, session: "r0", raising=False)
    monkeypatch.setattr(router, "ended", lambda call, replica: ended.append(replica), raising=False)
    client, handle = client_of(router)
    full = [BackPressureError(1, 1), BackPressureError(1, 1)]

    class Held:
        def __init__(self, check: ClaimCheck) -> None:
            checks.append(check.key)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            if full:
                raise full.pop()
            return
            yield

        def cancel(self) -> None: ...

    checks: list[str] = []
    monkeypatch.setattr(handle, "remote", Held)
    reading = asyncio.create_task(collect(client))
    await until(lambda: client._inboxes)
    client._deliver("r0", 0, Chunk("a", None, None, 3, 0, 1, token_ids=(0,)))
    await until(lambda: ended)
    client._deliver("r0", 0, Chunk("b", "length", None, 3, 0, 2, token_ids=(1,)))
    assert [chunk.text for chunk in await reading] == ["a", "b"]
    assert len(checks) == 3
    assert len(set(checks)) == 1


async def test_what_is_done_by_its_turn_needs_no_call(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(router, "place", lambda call, session: "r0", raising=False)
    monkeypatch.setattr(router, "ended", lambda call, replica: ended.append(replica), raising=False)
    client, handle = client_of(router)
    reading = asyncio.create_task(collect(client))
    await until(lambda: client._turns._waiting)
    client._deliver("r0", 0, Chunk("a", "length", None, 3, 0, 1, token_ids=(0,)))
    assert [chunk.text for chunk in await reading] == ["a"]
    await until(lambda: ended)
    assert handle.calls == []


async def test_who_was_sent_away_with_tokens_by_the_last_replica_waits_for_a_new_one(router: Router) -> None:
    """As who has lost it does: the call of a request that was ahead came when Serve had taken the replica off."""
    router.replica_metadata = {"r0": {}}
    client, _ = client_of(router, Script(3, Misplaced()), Script(), resume_wait_s=5, replica_wait_s=0)
    client._standing.update({})
    replacing = asyncio.get_running_loop().call_later(0.1, client._standing.update, {"r1": {}})
    assert "".join(chunk.text for chunk in await collect(client)) == WHOLE
    replacing.cancel()
