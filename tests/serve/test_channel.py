"""Token channels over real sockets, without Ray; and the inbox where channel and Serve's stream meet."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from deployments import channel
from deployments.channel import Address, ChannelClient, ChannelServer, Lane, _frame, _Hello
from deployments.ingress import engines
from deployments.ingress.engines import _Inbox, _watch
from deployments.messages import Chunk, GenerateCall, Refusal, TokenInfo, encode, merged
from deployments.routing.load import LoadReport
from nanoengine.cache.events import HeldPrefixes, PrefixEvents
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured.grammar import Grammar


def chunk(text: str, tokens: int, finish: str | None = None) -> Chunk:
    return Chunk(text, finish, None, 5, 0, tokens, (TokenInfo(7, -0.5),))  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Sequence:
    """What a replica has of one call: chunks that were made and not taken yet become one."""

    def __init__(self, lane: Lane, number: int) -> None:
        self._lane, self._number = lane, number
        self._made: Chunk | None = None
        self.is_lost = False
        lane.add(number, self)

    def make(self, made: Chunk) -> None:
        self._made = made if self._made is None else merged(self._made, made)
        self._lane.ready(self._number)

    def take(self) -> Chunk | None:
        taken, self._made = self._made, None
        return taken

    def lost(self) -> None:
        self.is_lost = True


class Ends:
    """A server, and a client of the name "me"."""

    def __init__(self) -> None:
        self.held = HeldPrefixes()
        self.begun: list[tuple[GenerateCall, Lane]] = []
        self.server = ChannelServer(self.held.snapshot, lambda call, lane: self.begun.append((call, lane)))
        self.loads: list[LoadReport] = []
        self.prefixes: list[PrefixEvents] = []
        self.got: dict[int, list[Chunk]] = defaultdict(list)
        self.lost: list[str] = []
        self.failed: list[int] = []
        self.client = ChannelClient("me", self.deliver, self.observe, self.lost.append, self.failed.append)

    def deliver(self, replica: str, number: int, chunk: Chunk) -> None:
        assert replica == "r"
        self.got[number].append(chunk)

    def observe(self, replica: str, load: LoadReport | None, prefixes: list[PrefixEvents]) -> None:
        assert replica == "r"
        self.loads += [load] if load is not None else []
        self.prefixes += prefixes

    def hold(self, *hashes: int) -> PrefixEvents:
        """The engine stores these now."""
        self.held.apply(PrefixEvents(0, False, np.array(hashes, np.uint64).tobytes(), b""))
        events = self.held.changes()
        assert events is not None
        return events

    async def connect(self) -> Lane:
        self.address = await self.server.start("127.0.0.1")
        self.client.connect({"r": self.address})
        await until(lambda: self.server.lane("me"))
        lane = self.server.lane("me")
        assert lane is not None
        await until(lambda: self.prefixes)  # what every lane begins with
        return lane


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    await ends.server.stop()
    await until(lambda: not ends.client.connected)
    ends.client.connect({})


async def test_a_failure_is_announced(ends: Ends) -> None:
    lane = await ends.connect()
    lane.failed(3)
    lane.failed(5)
    await until(lambda: len(ends.failed) == 2)
    assert ends.failed == [3, 5]
    Sequence(lane, 4).make(chunk("a", 1))
    await until(lambda: ends.got[4])
    assert ends.failed == [3, 5]


async def test_chunks_of_one_turn_travel_together(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = []
    frame = channel._frame
    lane = await ends.connect()
    monkeypatch.setattr(channel, "_frame", lambda message: frames.append(message) or frame(message))
    sequences = [Sequence(lane, number) for number in range(50)]
    for sequence in sequences:
        sequence.make(chunk("a", 1))
    sequences[3].make(chunk("b", 2, "stop"))
    await until(lambda: len(ends.got) == 50)
    assert len(frames) == 1, "one frame, not one per sequence"
    (both,) = ends.got[3]
    assert (both.text, both.completion_tokens, both.finish_reason) == ("ab", 2, "stop")
    assert both.logprobs is not None
    assert len(both.logprobs) == 2


async def test_slow_reader_gets_fewer_and_larger_chunks_and_loses_nothing(ends: Ends) -> None:
    sequence = Sequence(await ends.connect(), 1)
    text = "".join(chr(97 + i % 26) for i in range(20_000))
    for i, letter in enumerate(text):
        sequence.make(chunk(letter, i + 1))
        if i % 100 == 0:
            await asyncio.sleep(0)
    await until(lambda: ends.got[1] and ends.got[1][-1].completion_tokens == len(text))
    assert "".join(c.text for c in ends.got[1]) == text
    assert len(ends.got[1]) < 1000


async def test_what_was_left_is_not_taken(ends: Ends) -> None:
    lane = await ends.connect()
    left, other = Sequence(lane, 1), Sequence(lane, 2)
    left.make(chunk("a", 1))
    other.make(chunk("b", 1))
    lane.remove(1)
    left.make(chunk("c", 2))
    await until(lambda: ends.got[2])
    assert not ends.got[1]


async def test_the_end_of_a_connection_is_told_to_who_sends_by_it(ends: Ends) -> None:
    lane = await ends.connect()
    left, other = Sequence(lane, 1), Sequence(lane, 2)
    lane.remove(1)
    ends.client._writers["r"].transport.abort()
    await until(lambda: other.is_lost)
    assert not left.is_lost


async def test_a_call_that_is_left_ends_even_if_serve_forgets_to_say_so(ends: Ends) -> None:
    lane = await ends.connect()
    known, other = Sequence(lane, 1), Sequence(lane, 2)
    ends.client.leave("r", 1)
    ends.client.leave("r", 3)
    ends.client.leave("another, which is not connected", 2)
    await until(lambda: 3 in lane._left)
    assert known.is_lost
    assert not other.is_lost
    assert Sequence(lane, 3).is_lost, "it comes after the word that it was left"
    for number in range(1000, 2000):
        lane.leave(number)
    assert len(lane._left) < 1000


def request(number: int, tokens: int = 3, **more: Any) -> GenerateCall:
    prompt = np.arange(tokens, dtype=np.int32)
    params = SamplingParams(stop=("a",), logit_bias={3: 1.0}, structured=Grammar("json_object"))
    return GenerateCall(ingress="me", number=number, prompt=prompt, params=params, model="m", **more)


async def test_requests_arrive_as_they_were_sent_whatever_their_length(ends: Ends) -> None:
    lane = await ends.connect()
    sent = [request(1), request(2, 1_000_000, generated=7, avoid=("x",), expected_cached=64), request(3, priority=-1)]
    assert all(ends.client.carry("r", call) for call in sent)
    await until(lambda: len(ends.begun) == 3)
    assert {id(where) for _, where in ends.begun} == {id(lane)}
    for call, (got, _) in zip(sent, ends.begun, strict=True):
        assert np.array_equal(got.prompt, call.prompt)
        assert got.prompt.dtype == np.int32
        assert replace(got, prompt=None) == replace(call, prompt=None)


async def test_a_request_goes_before_the_word_that_it_was_left(ends: Ends) -> None:
    lane = await ends.connect()
    ends.client.carry("r", request(1))
    ends.client.leave("r", 1)
    await until(lambda: 1 in lane._left)
    assert [call.number for call, _ in ends.begun] == [1]


async def test_a_router_on_another_thread_sends_too(ends: Ends) -> None:
    await ends.connect()

    async def carry() -> bool:
        return ends.client.carry("r", request(1))

    assert await asyncio.to_thread(asyncio.run, carry())
    await until(lambda: ends.begun)


async def test_where_there_is_no_channel_the_router_is_told_so(ends: Ends) -> None:
    assert not ends.client.carry("r", request(1)), "not open yet"
    await ends.connect()
    assert not ends.client.carry("another", request(1))
    ends.client._writers["r"].transport.abort()
    await until(lambda: ends.lost)
    assert not ends.client.carry("r", request(1))
    assert ends.begun == []


async def test_wrong_secret_opens_no_lane(ends: Ends) -> None:
    await ends.connect()
    stranger = ChannelClient("stranger", lambda *chunk: None, lambda *news: None)
    stranger.connect({"r": Address(ends.address.host, ends.address.port, "guess")})
    await asyncio.sleep(0.2)
    assert ends.server.lane("stranger") is None
    stranger.connect({})


async def test_who_has_not_shown_the_secret_is_not_listened_to_for_long(ends: Ends) -> None:
    """A frame's length is the sender's word, and would be memory here."""
    await ends.connect()
    reader, writer = await asyncio.open_connection(ends.address.host, ends.address.port)
    writer.write((1 << 30).to_bytes(4, "little"))
    assert await asyncio.wait_for(reader.read(), 2) == b"", "closed at once"
    writer.close()


async def test_both_ends_probe_an_idle_connection(ends: Ends) -> None:
    lane = await ends.connect()
    sock = lane._writer.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120


NOT_ASCII = _frame(_Hello("stranger", "\u00e9"))


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 64, b"\x04\0\0\0\xc1\xc1\xc1\xc1", NOT_ASCII])
async def test_garbage_harms_nobody(ends: Ends, garbage: bytes) -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    lane = await ends.connect()
    reader, writer = await asyncio.open_connection(ends.address.host, ends.address.port)
    writer.write(garbage)
    writer.write_eof()
    await reader.read()
    writer.close()
    Sequence(lane, 1).make(chunk("a", 1))
    await until(lambda: ends.got[1])
    assert unhandled == []


async def test_lost_connection_closes_the_lane_and_is_opened_again(ends: Ends) -> None:
    lane = await ends.connect()
    lane._writer.close()
    await until(lambda: lane.closed)
    await until(lambda: ends.server.lane("me") not in (None, lane))
    again = ends.server.lane("me")
    assert again is not None
    Sequence(again, 2).make(chunk("b", 1))
    await until(lambda: ends.got[2])
    assert [piece.text for piece in ends.got[2]] == ["b"], "the new connection carries tokens"


def hashes(events: PrefixEvents) -> set[int]:
    return set(events.stored_hashes().tolist())


async def test_a_lane_begins_with_all_that_is_held(ends: Ends) -> None:
    ends.hold(1, 2, 3)
    await ends.connect()
    (first,) = ends.prefixes
    assert first.cleared
    assert (first.seq, hashes(first)) == (1, {1, 2, 3})


async def test_events_arrive_in_order_and_only_the_newest_report(ends: Ends) -> None:
    await ends.connect()
    for number in range(1, 6):
        ends.server.tell(LoadReport(number=number, active=number), ends.hold(number))
    await until(lambda: len(ends.prefixes) == 6)
    assert [events.seq for events in ends.prefixes] == [0, 1, 2, 3, 4, 5]
    assert [load.number for load in ends.loads] == [5]


async def test_an_ingress_gets_a_snapshot_when_it_asks(ends: Ends) -> None:
    await ends.connect()
    ends.server.tell(LoadReport(), ends.hold(7))
    ends.client.resync("r")
    ends.client.resync("another, which is not connected")
    await until(lambda: any(events.cleared for events in ends.prefixes[1:]))
    assert hashes(ends.prefixes[-1]) == {7}
    assert ends.prefixes[-1].seq == 1


async def test_an_ingress_too_slow_for_events_gets_a_snapshot_instead(ends: Ends) -> None:
    lane = await ends.connect()
    for number in range(1, 400):  # within one turn of the loop: none can leave
        ends.server.tell(LoadReport(), ends.hold(*range(number * 1000, number * 1000 + 500)))
    assert lane._prefixes is None
    await until(lambda: len(ends.prefixes) == 2)
    assert ends.prefixes[-1].cleared
    assert len(hashes(ends.prefixes[-1])) == 399 * 500
    ends.server.tell(LoadReport(), ends.hold(5))
    await until(lambda: len(ends.prefixes) == 3)
    assert ends.prefixes[2].seq == ends.prefixes[1].seq + 1


async def test_a_replica_that_is_being_stopped_keeps_its_channel_to_the_end(ends: Ends) -> None:
    lane = await ends.connect()
    ends.client.connect({})
    Sequence(lane, 1).make(chunk("a", 1, "stop"))
    await until(lambda: ends.got[1])
    assert ends.lost == []
    await ends.server.stop()
    await until(lambda: ends.lost == ["r"])
    ends.client.connect({})
    assert not ends.client._tasks, "and is not sought any more"


async def test_a_silent_channel_is_closed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone says no goodbye. Time in which nobody looked does not count: who stood still was this end."""
    monkeypatch.setattr(channel, "SILENCE_S", 0.3)
    lane = await ends.connect()
    addresses = {"r": ends.address}
    time.sleep(0.5)  # noqa: ASYNC251  # all of this process stands still
    for _ in range(30):
        ends.client.connect(addresses)
        lane.tell(LoadReport())
        await asyncio.sleep(0.01)
    assert ends.lost == []
    for _ in range(8):
        ends.client.connect(addresses)
    await until(lambda: ends.lost == ["r"])


def test_merged_chunks_keep_order_and_the_later_counts() -> None:
    both = merged(chunk("a", 1), chunk("b", 3, "length"))
    assert (both.text, both.completion_tokens, both.finish_reason) == ("ab", 3, "length")
    assert len(both.logprobs or ()) == 2


async def stream(*replies: Chunk | Refusal | Exception) -> AsyncIterator[bytes]:
    for reply in replies:
        await asyncio.sleep(0)
        if isinstance(reply, Exception):
            raise reply
        yield encode(reply)


async def test_inbox_gives_chunks_before_the_end() -> None:
    inbox = _Inbox()
    refusal = Refusal("dead", "gone", "r")
    await _watch(stream(chunk("a", 1), chunk("b", 2), refusal), inbox)
    taken = await inbox.take()
    assert isinstance(taken, Chunk)
    assert taken.text == "ab"
    assert await inbox.take() == refusal


async def test_inbox_waits_for_a_last_chunk_that_comes_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LAST_CHUNK_S", 0.2)
    inbox = _Inbox()
    await _watch(stream(), inbox)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0.02)
    inbox.put(chunk("a", 1, "stop"))
    assert isinstance(await taking, Chunk)
    assert await inbox.take() is None, "and gives up where none comes"


async def test_inbox_passes_on_what_the_stream_raised() -> None:
    inbox = _Inbox()
    error = RuntimeError("lost")
    await _watch(stream(chunk("a", 1), error), inbox)
    assert isinstance(await inbox.take(), Chunk)
    assert await inbox.take() is error
