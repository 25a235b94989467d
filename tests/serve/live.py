"""The API over real HTTP, with a real engine and a tiny random model, on a thread of its own. No Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import AppArgs
from deployments.ingress.text import TextFrontend
from tests.serve.fakes import FakeMetrics, api_of
from tests.serve.tiny_engine import TinyEngines


class Server:
    """The API with one model, "m", at ``url``."""

    def __init__(self, engines: TinyEngines, **limits: Any) -> None:
        """``limits``: of IngressConfig."""
        self.engines = engines
        args = AppArgs.model_validate({"served_model_names": ["m"], "ingress": limits})
        app = api_of(args, engines, TextFrontend(engines.tokenizer, threads=1), FakeMetrics()).app()
        self._server = uvicorn.Server(uvicorn.Config(_cancelling(app), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        (listener,) = self._server.servers
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    def alive(self) -> None:
        """A fresh completion is served, and nothing of an older request is left."""
        body = {"model": "m", "prompt": "A", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=10)
        assert answer.json()["usage"]["completion_tokens"] == 4
        load = self.engines.engine.load()
        assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def _cancelling(app: ASGIApp) -> ASGIApp:
    """Cancel a request whose client has left, as Serve's HTTP server does and uvicorn does not."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        task = asyncio.ensure_future(app(scope, arrived.get, send))

        async def watch() -> None:
            while True:
                message = await receive()
                arrived.put_nowait(message)
                if message["type"] == "http.disconnect":
                    task.cancel()
                    return

        watcher = asyncio.create_task(watch())
        await asyncio.wait([task])
        watcher.cancel()

    return served
