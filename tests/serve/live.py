"""The API over real HTTP, with a real engine and a tiny random model, on a thread of its own. No Ray."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import AppArgs
from deployments.ingress.served import Engines
from deployments.ingress.text import TextFrontend
from nanoengine.text.tokenizer import Tokenizer
from tests.serve.fakes import FakeMetrics, api_of
from tests.serve.tiny_engine import TinyEngines

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


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


class Live:
    """A client of the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": "m", **body})

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The whole answer, which must be JSON without NaN or Infinity."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return dict(strict(response.text))

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [strict(event) for event in events[:-2]]

    def both(self, path: str, **body: Any) -> dict[str, Any]:
        """The first choice of the whole answer, with the request's usage; the streamed one has to be equal."""
        whole = self.answer(path, **body)
        events = self.stream(path, stream_options={"include_usage": True}, **body)
        usage = {name: count for name, count in whole["usage"].items() if name != "prompt_tokens_details"}
        assert usage.items() <= events[-1]["usage"].items()  # the second finds the prompt in the cache
        found = []
        for choice in whole["choices"]:
            mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in mine) == text
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
            assert mine[-1]["stop_reason"] == choice["stop_reason"]
            if choice["logprobs"] is not None:
                for key, values in choice["logprobs"].items():
                    if values is not None:
                        streamed = [v for c in mine for v in (c["logprobs"] or {}).get(key) or ()]
                        assert rounded(streamed) == rounded(values)
            found.append({**choice, "text": text, "usage": whole["usage"]})
        return dict(found[0])


def rounded(value: Any) -> Any:
    """Log-probabilities to three places: a prompt that is in the cache is computed in other pieces."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


@contextmanager
def serving(engines: Engines, tokenizer: Tokenizer, **ingress: Any) -> Iterator[Live]:
    """Serve ``engines`` as model ``m`` on a free port."""
    args = AppArgs.model_validate({"served_model_names": ["m"], "ingress": {"default_max_tokens": 400, **ingress}})
    app = api_of(args, engines, TextFrontend(tokenizer, threads=1), FakeMetrics()).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    live = Live(f"http://127.0.0.1:{port}")
    try:
        with live.http:
            yield live
    finally:
        server.should_exit = True
        thread.join(10)
