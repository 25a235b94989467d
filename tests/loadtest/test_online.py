"""The closed-loop client: what it reads out of an answer, however that is cut, and how it shares out a load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import pytest

from loadtest.online import Load, Result, ask_service
from loadtest.processes import cpu_seconds
from loadtest.stream_client import Answer

EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"index":0,"text":""}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"\\u00e9\\n"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def answer(*pieces: bytes, status: int = 200, complete: bool = True) -> Answer:
    return Answer(1.0, status, [(2.0 + at, piece) for at, piece in enumerate(pieces)], 9.0, complete)


def test_an_answer_is_read_however_it_is_cut() -> None:
    whole = EVENTS + DONE
    for cut in range(len(whole)):
        reading = answer(whole[:cut], whole[cut:]).read()
        assert (reading.text, reading.tokens, reading.error) == ("aé\n", 3, "")
        assert sum(told for _, told in reading.marks) == 2
        first = 2.0 if cut >= EVENTS.index(b"\n\n") + 2 else 3.0
        assert reading.marks[0][0] == first, "an event has come when its last byte has"


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (answer(EVENTS), "before"),
        (answer(EVENTS, DONE, complete=False), "before"),
        (answer(b"busy", status=429), "429: b'busy'"),
        (answer(EVENTS, b'data: {"error":{"message":"gone"}}\n\n'), "gone"),
    ],
)
def test_what_is_not_whole_is_an_error(found: Answer, error: str) -> None:
    assert error in found.read().error


def test_shares_are_the_whole_load() -> None:
    load = Load(concurrency=10, requests=33, input=8, output=4, shared=3)
    shares = [load.share(index, 4) for index in range(4)]
    assert [share.concurrency for share in shares] == [3, 3, 2, 2]
    assert [share.requests for share in shares] == [9, 8, 8, 8]
    prompts = [prompt for share in shares for prompt in share.prompts()]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 33


async def test_a_connection_carries_one_request_after_the_other() -> None:
    lengths: list[int] = []
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths.append(int(head.partition("content-length:")[2].splitlines()[0]))
                await reader.readexactly(lengths[-1])
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for piece in (EVENTS, DONE):
                    await asyncio.sleep(0.05)
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    readings = await ask_service(url, "m", Load(concurrency=2, requests=6, input=4, output=3))
    server.close()
    assert [reading.error for reading in readings] == [""] * 6
    assert (connections, len(lengths)) == (2, 6)
    result = Result(0.5, readings)
    assert result.tokens_per_second == 36
    assert all(ms >= 50 for ms in result.ttft)
    unreachable = await ask_service(url, "m", Load(concurrency=1, requests=1, input=4, output=3))
    assert unreachable[0].error


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_cpu_time_is_found_by_command_line() -> None:
    busy = "import sys, time; t = time.process_time()\nwhile time.process_time() < t + 0.3: pass\nsys.stdin.read()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", busy, "nanoengine.process", stdin=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(20):
            while cpu_seconds(os.getpid()).get("engine", 0.0) < 0.3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "ingress" not in cpu_seconds(os.getpid())
    finally:
        process.kill()
        await process.wait()
