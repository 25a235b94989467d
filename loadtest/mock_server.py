"""A chat server with a known clock, to measure the measuring: ``python -m loadtest.mock_server --ttft 0.1 --itl 0.02``.

Token k of an answer goes out ``ttft + k * itl`` seconds after the request was read, whatever came before, so that the
times that a client should see are known exactly. The model named in a request chooses a fault: ``error`` sends an error
event after three tokens, ``cut`` closes the connection there, ``busy`` answers 429; any other name behaves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MockServer:
    """Answers every POST with ``max_tokens`` words over server-sent events. Times in seconds."""

    ttft: float
    itl: float

    async def serve(self, port: int) -> None:
        """Listen on loopback for ever; port 0 takes a free one. Prints its address."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=1024)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False ends the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        loop = asyncio.get_running_loop()
        start = loop.time()
        if body["model"] == "busy":
            text = b'{"error": {"message": "queue is full", "type": "overloaded"}}'
            header = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: {len(text)}\r\n\r\n"
            writer.write(header.encode() + text)
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"x-request-id: mock\r\n\r\n"
        )
        _send(writer, ": keep-alive\n\n")
        tokens = body["max_tokens"]
        for index in range(tokens):
            await asyncio.sleep(start + self.ttft + index * self.itl - loop.time())
            if index == 3 and body["model"] == "error":
                _send(writer, 'data: {"error": {"message": "the engine died", "type": "server_error"}}\n\n')
                tokens = 0
                break
            if index == 3 and body["model"] == "cut":
                return False
            reason = "length" if index == tokens - 1 else None
            delta = {"delta": {"content": "word "}, "finish_reason": reason, "index": 0}
            _send(writer, f"data: {json.dumps({'choices': [delta]})}\n\n")
            await writer.drain()  # raises once the client has gone
        if tokens:
            usage = {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 5}}
            _send(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
            _send(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _send(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.mock_server", description=main.__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ttft", type=float, default=0.1, help="seconds to the first token")
    parser.add_argument("--itl", type=float, default=0.02, help="seconds between tokens")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(MockServer(arguments.ttft, arguments.itl).serve(arguments.port))


if __name__ == "__main__":
    main()
