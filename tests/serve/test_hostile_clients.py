"""Clients that mean harm: bodies, grammars and connections that would cost others something. Each is refused or served,
and then the engine is idle, whole, and answers."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from deployments.ingress import messages, protocol
from deployments.ingress.errors import ApiError
from deployments.ingress.responses import ResponsesRequest
from deployments.ingress.tokens import TokenizeRequest
from nanoengine.structured import trial
from tests.engine.structured_cases import write_tiny_llm
from tests.serve.cluster import eventually
from tests.serve.live import Server
from tests.serve.test_api import CHAT, COMPLETION, MESSAGES, envelope
from tests.serve.tiny_engine import TinyEngines


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(TinyEngines(write_tiny_llm(tmp_path_factory.mktemp("tiny"))), default_max_tokens=8)
    try:
        yield server
    finally:
        server.stop()


def idle(server: Server) -> bool:
    load = server.engines.engine.load()
    return load.running == load.waiting == load.blocks_used == 0


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    assert_nothing_left(shared)


def assert_nothing_left(server: Server) -> None:
    """The engine comes to rest, answers, and has every block and slot back."""
    eventually(lambda: idle(server), 10, "an idle engine")
    server.alive()
    server.engines.engine.check()


# -- bodies -----------------------------------------------------------------------------------------------------------

BODIES = {
    "nothing": b"",
    "NUL": b"\x00",
    "cut": b'{"model":',
    "deep list": b"[" * 2_000_000,
    "deep object": b'{"a":' * 200_000,
    "NaN": b'{"model":"m","prompt":"A","temperature":NaN}',
    "infinity": b'{"model":"m","prompt":"A","temperature":1e999}',
    "long integer": b'{"model":"m","prompt":"A","seed":' + b"9" * 100_000 + b"}",
    "long token id": b'{"model":"m","prompt":[' + b"9" * 5_000 + b"]}",
    "max_tokens beyond 64 bits": b'{"model":"m","prompt":"A","max_tokens":' + b"9" * 30 + b"}",
    "bias beyond 64 bits": b'{"model":"m","prompt":"A","logit_bias":{"1":' + b"9" * 300 + b"}}",
    "half a surrogate pair": b'{"model":"m","prompt":"\\ud800"}',
    "half a pair as a name": b'{"model":"m","prompt":"a","\\ud800":2}',
    "not UTF-8": b'{"model":"m","prompt":"\xff\xfe"}',
    "overlong UTF-8": b'{"model":"m","prompt":"\xc0\x80"}',
    "UTF-16": '{"model":"m","prompt":"a"}'.encode("utf-16"),
    "long name": b'{"model":"m","prompt":"a","' + b"k" * 3_000_000 + b'":1}',
    "many names": b'{"model":"m","prompt":"a",' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be_read_are_400s(server: Server, name: str) -> None:
    error = envelope(httpx.post(server.url + COMPLETION, content=BODIES[name], timeout=10), 400)
    assert len(json.dumps(error)) < 2500


WRONG = b",".join([b"0"] * 1_000_000)
FULL = b",".join(b'"k%d":0' % i for i in range(200_000))
WIDE: list[tuple[type[BaseModel], bytes, str]] = [
    (protocol.ChatRequest, b'"messages":[%b]' % WRONG, "messages"),
    (protocol.ChatRequest, b'"messages":[{"role":"user"}],"tools":[%b]' % WRONG, "tools"),
    (protocol.ChatRequest, b'"messages":[{"role":"user"}],"stream_options":{%b}' % FULL, "stream_options"),
    (protocol.ChatRequest, b'"messages":[{"role":"user"}],"response_format":{%b}' % FULL, "response_format"),
    (protocol.CompletionRequest, b'"prompt":[%b,-1]' % WRONG, "prompt"),
    (protocol.CompletionRequest, b'"prompt":"a","stop":[%b]' % WRONG, "stop"),
    (protocol.CompletionRequest, b'"prompt":"a","bad_words":[%b]' % WRONG, "bad_words"),
    (protocol.CompletionRequest, b'"prompt":"a","allowed_token_ids":["a",%b]' % WRONG, "allowed_token_ids"),
    (protocol.CompletionRequest, b'"prompt":"a","guided_choice":[%b]' % WRONG, "guided_choice"),
    (protocol.CompletionRequest, b'"prompt":"a","structured_outputs":{%b}' % FULL, "structured_outputs"),
    (protocol.CompletionRequest, b'"prompt":"a","logit_bias":{%b}' % FULL, "logit_bias"),
    (ResponsesRequest, b'"input":[%b]' % WRONG, "input"),
    (ResponsesRequest, b'"input":"a","metadata":{%b}' % FULL, "metadata"),
    (ResponsesRequest, b'"input":"a","text":{"format":{%b}}' % FULL, "text"),
    (messages.MessagesRequest, b'"max_tokens":1,"messages":[%b]' % WRONG, "messages"),
    (messages.MessagesRequest, b'"max_tokens":1,"messages":[{"role":"user","content":[%b]}]' % WRONG, "messages"),
    (messages.MessagesRequest, b'"max_tokens":1,"messages":[{"role":"user","content":""}],"system":[%b]' % WRONG,
     "system"),
    (TokenizeRequest, b'"messages":[%b]' % WRONG, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "body", "param"),
    WIDE,
    ids=lambda value: "" if isinstance(value, bytes) else getattr(value, "__name__", value),
)
def test_a_million_mistakes_cost_no_more_than_one(model: type[BaseModel], body: bytes, param: str) -> None:
    """They are looked for on the event loop."""
    start = time.process_time()
    with pytest.raises(ApiError) as refused:
        protocol.parse(model, b'{"model":"m",%b}' % body)
    assert time.process_time() - start < 1
    assert (refused.value.status, refused.value.param) == (400, param)


def test_too_many_tools_are_a_400_everywhere(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    for path in (CHAT, "/tokenize"):
        body = {"model": "m", "messages": MESSAGES, "tools": tools}
        assert envelope(httpx.post(server.url + path, json=body), 400)["param"] == "tools"


# -- grammars ---------------------------------------------------------------------------------------------------------


def bombs() -> Iterator[dict[str, Any]]:
    """What would take for ever, or all memory, or was made to; or merely a lot."""
    yield {"guided_regex": "a?" * 30_000}
    yield {"guided_grammar": f"start: /{'a?' * 30_000}/"}
    yield {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 99999989}'}
    yield {"guided_grammar": 'start: s\ns: s s s | s s | "a" |'}
    yield {"guided_regex": "(((a{1,1000}){1,1000}){1,1000})"}
    yield {"guided_regex": "(a+)+b"}
    yield {"guided_grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}
    yield {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(3_000)}}}
    yield {"guided_json": {"type": "array", "minItems": 10_000, "items": {"$ref": "#"}}}
    yield {"guided_json": {"$ref": "file:///etc/passwd"}}
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    yield {"guided_json": {"$ref": "#/$defs/d0", "$defs": links | {"d30": {"type": "string"}}}}


def test_bombs_harm_nobody_else(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    asked = {"model": "m", "prompt": "A", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    alone = httpx.post(server.url + COMPLETION, json=asked, timeout=60).json()["choices"]
    found: list[Any] = []

    def others() -> None:
        while not done.is_set():
            found.append(httpx.post(server.url + COMPLETION, json=asked, timeout=60).json()["choices"])

    done = threading.Event()
    victim = threading.Thread(target=others)
    victim.start()
    try:
        for bomb in bombs():
            body = {"model": "m", "prompt": "A", "max_tokens": 20, **bomb}
            response = httpx.post(server.url + COMPLETION, json=body, timeout=60)
            if response.status_code != 200:
                assert envelope(response, 400)["code"] == "invalid_grammar", bomb
    finally:
        done.set()
        victim.join()
    assert found
    assert all(choices == alone for choices in found)


# -- connections ------------------------------------------------------------------------------------------------------


def opened(server: Server, data: bytes) -> socket.socket:
    port = int(server.url.rsplit(":", 1)[1])
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(data)
    return sock


def request(**fields: Any) -> bytes:
    body = json.dumps({"model": "m", "prompt": "A", **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True}
LEFT: dict[str, dict[str, Any]] = {
    "whole": LONG,
    "stream": LONG | {"stream": True},
    "choices": LONG | {"stream": True, "n": 8, "logprobs": 5},
    "prompts": LONG | {"prompt": ["a", "b", "c"], "n": 4},
    "long prompt": {"prompt": "x y " * 400, "max_tokens": 100},
    "grammar": LONG | {"guided_regex": "[ab]{3000}"},
}


@pytest.mark.parametrize("kind", LEFT)
def test_who_leaves_at_any_moment_leaves_nothing(server: Server, kind: str) -> None:
    data, rng = request(**LEFT[kind]), random.Random(0)
    for number in range(12):
        cut = rng.randrange(len(data)) if number % 3 == 0 else len(data)
        sock = opened(server, data[:cut])
        if number % 2:  # a reset instead of an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(rng.choice([0, 0.001, 0.01, 0.05]))
        sock.close()
    assert_nothing_left(server)


def test_many_who_leave_together_leave_nothing(server: Server) -> None:
    data = [request(**fields) for fields in LEFT.values()]
    socks = [opened(server, data[number % len(data)]) for number in range(30)]
    time.sleep(0.2)
    for sock in socks:
        sock.close()
    assert_nothing_left(server)


def test_half_a_connection_is_nobody_to_answer(server: Server) -> None:
    for fields in LEFT.values():
        with opened(server, request(**fields)) as sock:
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(30)
            while sock.recv(65536):
                pass
    assert_nothing_left(server)


def test_who_does_not_read_keeps_nobody_waiting(server: Server) -> None:
    socks = [opened(server, request(**LONG, stream=True, logprobs=20)) for _ in range(4)]
    eventually(lambda: server.engines.engine.load().running == 4, 10, "their streams")
    for _ in range(3):
        body = {"model": "m", "prompt": "A", "max_tokens": 20, "ignore_eos": True}
        answer = httpx.post(server.url + COMPLETION, json=body, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 20
    for sock in socks:
        sock.close()
