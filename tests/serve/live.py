"""The API behind a real HTTP server, in a thread with an event loop of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.config import AppArgs
from deployments.ingress.api import Api, Engines
from deployments.ingress.text import TextFrontend
from nanoengine.text.tokenizer import Tokenizer
from tests.serve.fakes import FakeMetrics

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


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
    app = Api(args, engines, TextFrontend(tokenizer, threads=1), FakeMetrics()).app()
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
