"""Token channels: one TCP connection from each ingress to each engine replica, on which requests go there, all tokens
come back, and what the ingress's router has to know of the replica.

A chunk that goes back through Serve's own stream costs 0.4 to 0.8 ms of CPU in replica and ingress: a Ray object, two
event loops, a pickle. So Serve keeps what it is for, one call per request, for routing, accounting, draining and
cancelling; and the tokens of all sequences that one ingress has at one replica go in one message per engine step. What
a step costs no longer depends on how many sequences it served. Serve's call itself takes some milliseconds to get
there. So the request goes by the channel as soon as its replica is chosen, and the call beside it has only its number.

A channel is a short cut, never a need: where there is none (not open yet, or the network forbids it) a call has its
request with it, its chunks go through Serve's stream, and the answer is the same. Frames are msgpack of known types,
and a connection has to show the secret that the replica gave to routers through Ray.

A lane's prefix events are complete, or begin again with a snapshot: when it opens, when the ingress asks, and when the
ingress is too slow for them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.messages import Chunk, GenerateCall
from deployments.routing.load import LoadReport
from nanoengine.cache.events import PrefixEvents

logger = logging.getLogger("ray.serve")

HEADER = 4  # bytes of a frame's length, little-endian
RETRY_S = 1.0
MAX_HELLO = 1024  # bytes: who has not shown the secret yet must not make a replica hold what he sends
MAX_EVENTS = 1 << 20  # bytes of prefix events that wait for one ingress
LEFT = 256  # calls that were left last: one may get here after the word that it was left
LOOK_S = 0.05
SILENCE_S = 5.0  # a replica tells its load ten times a second: after so long without a word its host is taken for gone
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # seconds, seconds, probes


class Address(msgspec.Struct, frozen=True):
    """Where a replica listens, and what to show there."""

    host: str
    port: int
    secret: str


class _Hello(msgspec.Struct, frozen=True):
    """The first frame of a connection, from the ingress."""

    ingress: str
    secret: str


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every later frame from the ingress."""

    resync: bool = False  # send a snapshot of the prefixes
    left: int | None = None  # nobody waits for this call any more
    call: GenerateCall | None = None  # begin with it: Serve's call comes behind


class _News(msgspec.Struct, frozen=True, array_like=True):
    """A frame from the replica."""

    chunks: dict[int, Chunk]  # by call number
    load: LoadReport | None = None
    prefixes: list[PrefixEvents] = []
    failed: list[int] = []  # calls that ended in an error, which is told by Serve's call


Observe = Callable[[str, LoadReport | None, list[PrefixEvents]], None]
"""Takes what a replica, by unique id, tells of itself."""


def _bytes(tokens: npt.NDArray[np.int32]) -> memoryview:
    return tokens.data.cast("B")


def _tokens(kind: Any, data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, np.int32)


_encode = msgspec.msgpack.Encoder(enc_hook=_bytes).encode
_decode_hello = msgspec.msgpack.Decoder(_Hello).decode
_decode_word = msgspec.msgpack.Decoder(_Word, dec_hook=_tokens).decode
_decode_news = msgspec.msgpack.Decoder(_News).decode


def _frame(message: Any) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(HEADER, "little") + body


async def _read(reader: asyncio.StreamReader, limit: int = 2**32) -> bytes:
    length = int.from_bytes(await reader.readexactly(HEADER), "little")
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes, where {limit} is the most")
    return await reader.readexactly(length)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Probe a connection that is idle: routers between hosts forget one that is silent for long, and a host that is
    gone says no goodbye. Without it the first to notice would be a request."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Source(Protocol):
    """One sequence, at its replica."""

    def take(self) -> Chunk | None:
        """All that has come since it was called before, or None. Raises nothing."""

    def lost(self) -> None:
        """The connection is, or who it was for: nothing will be taken any more."""


class Lane:
    """A replica's end of one channel.

    A sequence only says that it has something. What it has is taken when a message leaves, so that a connection or a
    process that is behind costs fewer and larger chunks, and text is worked out once for all of their tokens.
    """

    def __init__(self, writer: asyncio.StreamWriter, snapshot: Callable[[], PrefixEvents]) -> None:
        self.closed = False
        self._writer = writer
        self._snapshot = snapshot
        self._sources: dict[int, Source] = {}  # by call number
        self._ready: dict[int, Source] = {}  # ... of those that have something
        self._load: LoadReport | None = None
        self._prefixes: list[PrefixEvents] | None = None  # None: a snapshot is due instead
        self._failed: list[int] = []
        self._wake = asyncio.Event()
        self._left: deque[int] = deque(maxlen=LEFT)

    def add(self, number: int, source: Source) -> None:
        """A call whose chunks are to go this way."""
        self._sources[number] = source
        if number in self._left:
            source.lost()

    def ready(self, number: int) -> None:
        """It has something to send: that goes, with what all others have in this turn of the event loop, as soon as
        the connection takes it."""
        if (source := self._sources.get(number)) is not None:
            self._ready[number] = source
            self._wake.set()

    def leave(self, number: int) -> None:
        """The ingress does not want it any more; it may not have come here yet."""
        self._left.append(number)
        if (source := self._sources.get(number)) is not None:
            source.lost()

    def failed(self, number: int) -> None:
        """It has come to an error, and its ingress is to hear of it from Serve's call."""
        self._failed.append(number)
        self._wake.set()

    def remove(self, number: int) -> None:
        """Nothing more is taken of it."""
        self._sources.pop(number, None)
        self._ready.pop(number, None)

    def close(self) -> None:
        """The connection has ended."""
        self.closed = True
        for source in list(self._sources.values()):
            source.lost()

    def tell(self, load: LoadReport, prefixes: PrefixEvents | None = None) -> None:
        """Send a report, which replaces one that has not left yet, and events, which never are lost alone."""
        self._load = load
        if prefixes is not None and self._prefixes is not None:
            self._prefixes.append(prefixes)
            if sum(len(events.stored) + len(events.removed) for events in self._prefixes) > MAX_EVENTS:
                self._prefixes = None
        self._wake.set()

    def resync(self) -> None:
        """Send all prefixes that are held, whatever was told before."""
        self._prefixes = None
        self._wake.set()

    async def run(self) -> None:
        """Send what is pushed, until the connection ends."""
        with suppress(OSError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                prefixes = [self._snapshot()] if self._prefixes is None else self._prefixes
                ready, self._ready = self._ready, {}
                taken = ((number, source.take()) for number, source in ready.items())
                chunks = {number: chunk for number, chunk in taken if chunk is not None}
                news = _News(chunks, self._load, prefixes, self._failed)
                self._load, self._prefixes, self._failed = None, [], []
                self._writer.write(_frame(news))
                await self._writer.drain()


class ChannelServer:
    """The channels of one replica."""

    def __init__(self, snapshot: Callable[[], PrefixEvents], begin: Callable[[GenerateCall, Lane], None]) -> None:
        """``snapshot`` is asked for all prefixes that the replica holds at that moment; ``begin`` gets each request
        that comes, and where its chunks are to go."""
        self._snapshot = snapshot
        self._begin = begin
        self._lanes: dict[str, Lane] = {}
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> Address:
        """Listen on a free port of ``host``."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        return Address(host, self._server.sockets[0].getsockname()[1], self._secret)

    def lane(self, ingress: str) -> Lane | None:
        """The open channel of this ingress."""
        return self._lanes.get(ingress)

    def tell(self, load: LoadReport, prefixes: PrefixEvents | None = None) -> None:
        """Tell every ingress."""
        for lane in self._lanes.values():
            lane.tell(load, prefixes)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lane = Lane(writer, self._snapshot)
        ingress = ""
        try:
            _keep_alive(writer)
            hello = _decode_hello(await asyncio.wait_for(_read(reader, MAX_HELLO), 5))
            if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
                return
            ingress = hello.ingress
            self._lanes[ingress] = lane
            lane.resync()
            sender = asyncio.create_task(lane.run())
            try:
                while True:  # until the ingress is gone
                    word = _decode_word(await _read(reader))
                    if word.call is not None:
                        self._begin(word.call, lane)
                    if word.resync:
                        lane.resync()
                    if word.left is not None:
                        lane.leave(word.left)
            finally:
                sender.cancel()
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            pass
        finally:
            lane.close()
            if self._lanes.get(ingress) is lane:
                del self._lanes[ingress]
            writer.close()

    async def stop(self) -> None:
        """Close all channels."""
        if self._server is not None:
            self._server.close()
            for lane in self._lanes.values():
                lane._writer.close()


class ChannelClient:
    """The channels of one ingress: keeps one open to every replica that there is."""

    def __init__(
        self,
        ingress: str,
        deliver: Callable[[str, int, Chunk], None],
        observe: Observe,
        lost: Callable[[str], None] = lambda replica: None,
        failed: Callable[[int], None] = lambda number: None,
    ) -> None:
        """``deliver`` gets each chunk that arrives, with its replica and its call's number; ``observe`` what else a
        replica tells; ``lost`` replicas whose channel has ended: nothing more will come of the calls made before;
        ``failed`` the numbers of calls that Serve's call will tell an error of."""
        self._ingress = ingress
        self._deliver = deliver
        self._observe = observe
        self._lost = lost
        self._failed = failed
        self._silent: dict[str, int] = {}  # looks since something came through the channel to each
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # on which all is called but ``carry``

    @property
    def connected(self) -> Collection[str]:
        """Replicas to which a channel is open."""
        return self._writers.keys()

    def connect(self, addresses: Mapping[str, Address]) -> None:
        """These replicas there are now, by unique id. Call it every ``LOOK_S``.

        A replica that is not among them may still be busy with calls: its channel stays until the other end closes it.
        One that has been silent for long is closed here: a host that is gone says no goodbye.
        """
        self._loop = asyncio.get_running_loop()
        for replica in [name for name in self._tasks if name not in addresses and name not in self._writers]:
            self._tasks.pop(replica).cancel()
        for replica, writer in self._writers.items():
            self._silent[replica] += 1
            if self._silent[replica] > SILENCE_S / LOOK_S:  # looks and not seconds: none were made while we stood still
                writer.transport.abort()
        for replica, address in addresses.items():
            if replica not in self._tasks:
                self._tasks[replica] = asyncio.create_task(self._keep(replica, address))

    def resync(self, replica: str) -> None:
        """Ask a replica for all prefixes that it holds; where there is no channel, it says so when there is one."""
        self._write(replica, _frame(_Word(resync=True)))

    def leave(self, replica: str, number: int) -> None:
        """Nobody here waits for this call any more. Serve is told so too, but what it tells may be lost on the way."""
        self._write(replica, _frame(_Word(left=number)))

    def carry(self, replica: str, call: GenerateCall) -> bool:
        """Send a request to its replica; False: there is no channel. Where one ends after that, ``lost`` tells.

        From any thread with an event loop: the router may have one of its own.
        """
        if self._loop is None or replica not in self._writers:
            return False
        frame = _frame(_Word(call=call))
        if self._loop is asyncio.get_running_loop():
            self._write(replica, frame)
        else:
            self._loop.call_soon_threadsafe(self._write, replica, frame)
        return True

    def _write(self, replica: str, frame: bytes) -> None:
        if (writer := self._writers.get(replica)) is not None:
            writer.write(frame)

    async def _keep(self, replica: str, address: Address) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._receive(replica, address)
            await asyncio.sleep(RETRY_S)

    async def _receive(self, replica: str, address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            _keep_alive(writer)
            writer.write(_frame(_Hello(self._ingress, address.secret)))
            self._writers[replica], self._silent[replica] = writer, 0
            while True:
                news = _decode_news(await _read(reader))
                self._silent[replica] = 0
                for number, chunk in news.chunks.items():
                    self._deliver(replica, number, chunk)
                for number in news.failed:
                    self._failed(number)
                if news.load is not None or news.prefixes:
                    self._observe(replica, news.load, news.prefixes)
        finally:
            if self._writers.pop(replica, None) is not None:
                del self._silent[replica]
                self._lost(replica)
            writer.close()
