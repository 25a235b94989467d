"""AsyncEngine: the engine in its own process, and one async stream per request.

The caller's event loop never computes a step: it sends requests, takes one message per step, and turns tokens into text
as each consumer asks for them. A consumer that is slow gets fewer and larger deltas, and costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from nanoengine.answer import Answer, Made
from nanoengine.cache.events import PrefixEvents
from nanoengine.config import EngineConfig
from nanoengine.errors import EngineDeadError, ModelLoadError, NanoEngineError
from nanoengine.outputs import Delta, EngineInfo, Load, MemorySummary
from nanoengine.protocol import (
    HEADER,
    Abort,
    Add,
    Failed,
    FromEngine,
    Inspect,
    Memory,
    Ready,
    Refused,
    Start,
    ToEngine,
    Update,
    decoder,
    frame,
)
from nanoengine.request import check_request, token_array
from nanoengine.sampling.params import SamplingParams
from nanoengine.text.tokenizer import Tokenizer, load_tokenizer
from nanoengine.weights.sources import resolve_model

log = logging.getLogger("nanoengine")


class Stream:
    """One open request. For who moves many of them and would not wake a task for each token; else ``generate``."""

    def __init__(
        self,
        request_id: str | None,
        answer: Answer,
        on_news: Callable[[], None],
        on_close: Callable[[Stream], None],
    ) -> None:
        self.request_id = request_id
        self._answer = answer
        self._made = Made()
        self._error: NanoEngineError | None = None
        self._told = False  # that there is news
        self._opened: float | None = time.monotonic()  # None: the first delta has been taken
        self._admitted: float | None = None
        self._on_news = on_news
        self._on_close = on_close

    def take(self) -> Delta:
        """All that has come since it was called before: nothing may have. The last delta has a finish reason.

        Raises ``InvalidRequestError``, ``EngineOverloadedError`` or ``EngineDeadError`` where that was the end.
        """
        self._told = False
        if self._error is not None:
            raise self._error
        made, self._made = self._made, Made(finish_reason=self._made.finish_reason)
        if self._opened is not None:
            now = time.monotonic()
            admitted = now if self._admitted is None else self._admitted
            made.times, self._opened = (admitted - self._opened, now - admitted), None
        return self._answer.take(made)

    def close(self) -> None:
        """Give up what is still to come. There is no more news."""
        self._on_close(self)

    @property
    def _over(self) -> bool:
        """Whether the engine makes nothing more for it."""
        return self._made.finish_reason is not None

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._on_news()

    def _fail(self, error: NanoEngineError) -> None:
        self._error = error
        self._tell()


class AsyncEngine:
    """Use it on one event loop: ``start``, then any number of concurrent ``generate`` streams, then ``stop``."""

    def __init__(self, config: EngineConfig, on_prefixes: Callable[[PrefixEvents], None] | None = None) -> None:
        """``on_prefixes`` is called with the prefix cache's changes, in order, after each step that made some."""
        self._config = config
        self._on_prefixes = on_prefixes
        self._streams: dict[int, Stream] = {}
        self._keys = itertools.count()
        self._memory: dict[int, asyncio.Future[MemorySummary]] = {}  # asked for, by number
        self._load = Load()
        self._heard_at = time.monotonic()
        self._info: EngineInfo | None = None
        self._dead: EngineDeadError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._tokenizer: Tokenizer | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the process and wait until the model is loaded.

        Raises ``ModelLoadError`` if model or configuration are at fault, ``EngineDeadError`` if the process dies.
        """
        # The files come first and only once: the process finds them on disk, and the tokenizer is needed here.
        files = await asyncio.to_thread(resolve_model, self._config.model, self._config.revision)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.to_thread(self._spawn, theirs.fileno())
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        decode = decoder(FromEngine).decode
        try:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, files)
            tokenizer = self._tokenizer
            config, listens = self._config.model_dump_json(), self._on_prefixes is not None
            self._send(Start(config, tokenizer.eos_token_ids, tokenizer.vocab_size, listens))
            first = decode(await _read(reader))
        except asyncio.IncompleteReadError:
            await self.stop()
            raise EngineDeadError(f"the engine process died at start-up ({self._exit_status()})") from None
        except BaseException:
            await self.stop()
            raise
        if isinstance(first, Failed):
            await self.stop()
            raise ModelLoadError(first.message) if first.load_error else EngineDeadError(first.message)
        assert isinstance(first, Ready)
        self._info, self._heard_at = first.info, time.monotonic()
        self._receiver = asyncio.create_task(self._receive(reader))
        return first.info

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        # A supervisor such as Ray sets OMP_NUM_THREADS to 1 for actors with less than a CPU; that is not the engine's.
        threads = self._config.num_threads or len(os.sched_getaffinity(0))
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        # Idle OpenMP threads sleep rather than spin: what they wait for has to get a core, and here an ingress and a
        # proxy want the same ones. 8 requests on 2 cores make 57 tok/s so while another process is busy, and 20 if they
        # spin; on idle cores it is 67 against 88, which is what an LLM in a process of its own has.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        return subprocess.Popen([sys.executable, "-m", "nanoengine.process", str(fd)], pass_fds=(fd,), env=env)

    async def stop(self) -> None:
        """End the process; open streams get ``EngineDeadError``. Safe to call twice."""
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
            self._receiver = None
        self._die(EngineDeadError("the engine was stopped"))
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            process = self._process
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 5)  # it ends by itself when the socket closes, after its step
            if process.returncode is None:
                process.kill()
                await asyncio.to_thread(process.wait)

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine no longer works, or None while it does."""
        return self._dead

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was heard of. It says something at least once a second, if it can."""
        return time.monotonic() - self._heard_at

    @property
    def info(self) -> EngineInfo:
        """What the engine turned out to be; available once started."""
        if self._info is None:
            raise RuntimeError("the engine is not started: await start() first")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; available once started."""
        if self._tokenizer is None:
            raise RuntimeError("the engine is not started: await start() first")
        return self._tokenizer

    @property
    def pid(self) -> int | None:
        """The engine process, None before the start."""
        return None if self._process is None else self._process.pid

    def load(self) -> Load:
        """The engine's load as of its last step."""
        return self._load

    async def memory_summary(self) -> MemorySummary:
        """Where the engine's memory went; the engine waits for its device to know.

        Raises ``EngineDeadError`` if the engine is dead, or dies before it has answered.
        """
        if self._dead is not None:
            raise self._dead
        number = next(self._keys)
        answer = self._memory[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Inspect(number))
            return await answer
        finally:
            del self._memory[number]

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        generated: int = 0,
    ) -> AsyncGenerator[Delta]:
        """Stream one request. Each delta has all that came since the one before; the last has a finish reason.

        The last ``generated`` of ``prompt_ids`` are the beginning of an answer that another engine was cut off from:
        the deltas are those that would have come next there, if ``params`` have a seed or are greedy.

        Leaving the loop aborts the request. ``request_id`` is only a name for ``abort`` and need not be unique.
        Raises ``InvalidRequestError`` (or its ``ContextLengthError``) or ``EngineOverloadedError`` before the first
        delta, and ``EngineDeadError`` at any time.
        """
        wake = asyncio.Event()
        stream = self.open(
            prompt_ids, params, wake.set, request_id, priority=priority, cache_salt=cache_salt, generated=generated
        )
        try:
            while True:
                await wake.wait()
                wake.clear()
                delta = stream.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            stream.close()

    def open(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        on_news: Callable[[], None],
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        generated: int = 0,
    ) -> Stream:
        """Begin one request, as ``generate`` does; close it, whatever happens. ``on_news`` is called when there is
        something to take, once until it is taken; not all of it is there before it has returned.

        Raises ``InvalidRequestError`` (or its ``ContextLengthError``) or ``EngineDeadError``.
        """
        if self._dead is not None:
            raise self._dead
        info = self.info
        tokens = token_array(prompt_ids)
        check_request(tokens, params, info.max_model_len, info.vocab_size, info.num_tokens, generated)
        key = next(self._keys)

        def close(stream: Stream) -> None:
            if self._streams.pop(key, None) is not None and not stream._over and self._dead is None:
                self._send(Abort(key))

        answer = Answer(self.tokenizer, params, tokens, generated)
        self._send(Add(key, tokens.tobytes(), params, priority, cache_salt, generated))
        stream = self._streams[key] = Stream(request_id, answer, on_news, close)
        return stream

    async def abort(self, request_id: str) -> None:
        """End every request with this id; its stream gets a last delta with finish reason "abort"."""
        for key, stream in self._streams.items():
            if stream.request_id == request_id and not stream._over:
                stream._made.finish_reason = "abort"
                stream._tell()
                self._send(Abort(key))

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        decode = decoder(FromEngine).decode
        reason = "the engine process died"
        try:
            while True:
                message = decode(await _read(reader))
                if isinstance(message, Update):
                    self._apply(message)
                elif isinstance(message, Refused):
                    self._fail(message.key, message.error())
                elif isinstance(message, Memory):
                    if (answer := self._memory.get(message.number)) is not None and not answer.done():
                        answer.set_result(message.summary)
                elif isinstance(message, Failed):
                    reason = f"the engine failed: {message.message}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception as error:  # nobody reads any more, so nobody may go on waiting
            log.exception("a message of the engine's could not be handled")
            reason = f"a message of the engine's could not be handled: {error!r}"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 1)
        self._die(EngineDeadError(f"{reason} ({self._exit_status()})"))

    def _apply(self, update: Update) -> None:
        self._load, self._heard_at = update.load, time.monotonic()
        if update.prefixes is not None and self._on_prefixes is not None:
            self._on_prefixes(update.prefixes)
        streams = self._streams
        for key, cached in update.started:
            if (stream := streams.get(key)) is not None:
                stream._answer.cached_tokens, stream._admitted = cached, update.began
        for key, scores in update.scores:
            if (stream := streams.get(key)) is not None:
                stream._made.scores.append(scores)  # they go with the first token, which is not there before them
        keys = np.frombuffer(update.keys, np.int64).tolist()
        for key, token in zip(keys, np.frombuffer(update.tokens, np.int32).tolist(), strict=True):
            # A stream that was left is not here any more; its abort is on the way to the engine.
            if (stream := streams.get(key)) is not None and (made := stream._made).finish_reason is None:
                made.tokens.append(token)
                if not stream._told:
                    stream._tell()
        for index, logprob in update.logprobs.items():
            if (stream := streams.get(keys[index])) is not None and not stream._over:
                stream._made.logprobs.append(logprob)
        for end in update.finished:
            if (stream := streams.get(end.key)) is not None and not stream._over:
                stream._made.finish_reason, stream._made.stop_token = end.reason, end.stop_token
                stream._tell()

    def _fail(self, key: int, error: NanoEngineError) -> None:
        if (stream := self._streams.get(key)) is not None:
            stream._fail(error)

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        for stream in self._streams.values():
            stream._fail(error)
        for answer in self._memory.values():
            if not answer.done():
                answer.set_exception(error)

    def _exit_status(self) -> str:
        code = None if self._process is None else self._process.returncode
        return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(HEADER), "little"))
