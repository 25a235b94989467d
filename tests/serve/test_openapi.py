"""The server's own OpenAPI document, and requests made up from it by schemathesis: never a 5xx, and the engine lives.

A real engine with a tiny model answers over HTTP, on a thread of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.engine.structured_cases import write_tiny_llm
from tests.serve.live import Server
from tests.serve.tiny_engine import TinyEngines

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
LIMITS: dict[str, Any] = {"max_choices": 8, "default_max_tokens": 8, "max_body_bytes": 1 << 20}
BOUNDS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(TinyEngines(write_tiny_llm(tmp_path_factory.mktemp("tiny"))), **LIMITS)
    try:
        yield server
    finally:
        server.stop()


def check(server: Server, examples: int) -> None:
    """So many requests to each route, and the engine alive after each."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()

        @settings(max_examples=examples, **BOUNDS)
        @given(operation.as_strategy())
        def requests(case: schemathesis.Case) -> None:
            case.validate_response(case.call(timeout=60), checks=CHECKS)

        requests()
        server.alive()


def test_what_the_document_allows_is_served_or_refused(server: Server) -> None:
    check(server, 20)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_streams_are_what_the_document_says(server: Server, path: str, asked: dict[str, Any]) -> None:
    """Of bodies that are made up, few are valid and streamed."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    case = document[path]["POST"].Case(body={"model": "m", "stream": True} | asked, media_type="application/json")
    response = case.call()
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_more_of_it(server: Server) -> None:
    check(server, 450)  # of each of 12 routes


def test_the_document_names_every_route_and_model(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    paths = {f"{method} {path}" for path, methods in document["paths"].items() for method in methods}
    assert {"post /v1/chat/completions", "post /v1/messages", "post /v1/responses", "get /v1/models"} <= paths
    components = document["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) == components.keys()
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
            assert operation["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "object"
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                schema = components[body["$ref"].rsplit("/", 1)[-1]]
                assert "m" in schema["properties"]["model"]["enum"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("CompletionRequest", {"prompt": prompt}) for prompt in ("a", ["a", "b"], [1, 2], [[1], [2]])),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "stop": "a", "user": "u", "metadata": {}}),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1.5}, "stop": ["a"]}),
        ("ChatRequest", {"messages": [{"role": "user"}], "stream": True, "stream_options": {"include_usage": True}}),
        ("ResponsesRequest", {"input": "a", "stream_options": {"include_obfuscation": False}}),
        ("ResponsesRequest", {"input": [{"role": "user", "content": "a"}]}),
        ("MessagesRequest", {"max_tokens": 4, "system": "s", "messages": [{"role": "user", "content": "a"}]}),
        ("Prompt", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("TokenizeRequest", {"prompt": "a", "model": None}),
        ("DetokenizeRequest", {"tokens": [1]}),
    ],
)
def test_what_clients_send_is_what_the_document_says(server: Server, name: str, body: dict[str, Any]) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.validate({"model": "m"} | body, schema, cls=jsonschema.Draft202012Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "m", "max_token": 5} | body, schema, cls=jsonschema.Draft202012Validator)
