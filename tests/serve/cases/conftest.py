"""Servers over real HTTP: one with a tiny random model, one whose engine reads from a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.structured_cases import write_tiny_llm
from tests.serve.cases.http import Http
from tests.serve.cases.scripted import ScriptedEngines
from tests.serve.live import Server
from tests.serve.tiny_engine import TinyEngines


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def tiny_server(folder: Path) -> Iterator[Server]:
    server = Server(TinyEngines(folder))
    yield server
    server.stop()


@pytest.fixture(scope="package")
def scripted_server() -> Iterator[Server]:
    server = Server(ScriptedEngines(synthetic={"step_seconds": 0, "max_model_len": 256}))
    server.engines.says("A", "hello")  # type: ignore[attr-defined]  # what ``alive`` asks for
    yield server
    server.stop()


@pytest.fixture
def tiny(tiny_server: Server) -> Iterator[Http]:
    yield from _used(tiny_server)


@pytest.fixture
def scripted(scripted_server: Server) -> Iterator[Http]:
    yield from _used(scripted_server)


def _used(server: Server) -> Iterator[Http]:
    """Whatever was sent: nothing of it is left, and the next request is served."""
    http = Http(server.url)
    with http.client:
        yield http
    server.alive()
    server.engines.engine.check()
