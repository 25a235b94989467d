"""What the cases need of an HTTP client: whole answers and streams, read as strictly as the strictest client would."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
PATHS = [CHAT, COMPLETION]


@dataclass(slots=True)
class Stream:
    """One stream's events."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False  # whether [DONE] came, and came last
    seconds: float = 0.0

    def texts(self, index: int = 0) -> list[str]:
        """Of each event of a choice."""
        found = []
        for event in self.events:
            for choice in event.get("choices", ()):
                if choice["index"] == index:
                    found.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
        return found

    @property
    def text(self) -> str:
        return "".join(self.texts())

    @property
    def finish_reason(self) -> str | None:
        return next((c["finish_reason"] for e in self.events for c in e["choices"] if c["finish_reason"]), None)

    @property
    def usage(self) -> dict[str, Any]:
        return dict(self.events[-1]["usage"])


class Http:
    """Requests to one server's model "m"."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "m", **body})

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return dict(strict(response.text))

    def text(self, path: str, **body: Any) -> str:
        return text_of(self.answer(path, **body))

    def both(self, path: str, **body: Any) -> dict[str, Any]:
        """The first choice of the whole answer, with the request's usage; the streamed one has to be equal."""
        whole = self.answer(path, **body)
        stream = self.stream(path, stream_options={"include_usage": True}, **body)
        assert stream.done
        usage = {name: count for name, count in whole["usage"].items() if name != "prompt_tokens_details"}
        assert usage.items() <= stream.usage.items()  # the second finds the prompt in the cache
        for choice in whole["choices"]:
            mine = [c for event in stream.events for c in event["choices"] if c["index"] == choice["index"]]
            choice["text"] = choice["message"]["content"] if "message" in choice else choice["text"]
            assert "".join(stream.texts(choice["index"])) == choice["text"]
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
            assert mine[-1]["stop_reason"] == choice["stop_reason"]
            for key, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    streamed = [v for c in mine for v in (c["logprobs"] or {}).get(key) or ()]
                    assert rounded(streamed) == rounded(values)
        return {**whole["choices"][0], "usage": whole["usage"]}

    def stream(self, path: str, most: int | None = None, **body: Any) -> Stream:
        """All events, or the first ``most``, after which the connection is closed."""
        found, start = Stream(), time.monotonic()
        with self.client.stream("POST", path, json={"model": "m", "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line:
                    continue
                assert not found.done, "an event after [DONE]"
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    found.done = True
                else:
                    found.events.append(strict(data))
                if len(found.events) == most:
                    break
        found.seconds = time.monotonic() - start
        return found


def rounded(value: Any) -> Any:
    """Log-probabilities to three places: a prompt that is in the cache is computed in other pieces."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def strict(text: str) -> Any:
    """JSON without NaN or Infinity."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def asking(path: str, prompt: str) -> dict[str, Any]:
    """``prompt`` as the one message of a chat, or as it is."""
    return {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
