"""One application, several models: each its own deployment, chosen by the request's ``model``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from deployments.app import build
from deployments.config import AppArgs, ModelArgs
from deployments.ingress.api import Api
from deployments.ingress.served import ServedModel
from deployments.ingress.text import TextFrontend
from tests.serve.fakes import FakeEngines, FakeMetrics, api_of
from tests.serve.test_api import CHAT, COMPLETION, MESSAGES, TOKENIZER, envelope

TWO: dict[str, Any] = {
    "models": [
        {"served_model_names": ["small", "alias"], "engine": {"model": "synthetic"}},
        {"served_model_names": ["large"], "engine": {"model": "synthetic"}, "deployment": "LargeReplica"},
    ]
}


class Service:
    def __init__(self) -> None:
        self.engines = {"small": FakeEngines(["I am ", "small"]), "large": FakeEngines(["I am ", "large"])}
        self.metrics = {name: FakeMetrics() for name in self.engines}
        args = AppArgs.model_validate(TWO)
        self.api = Api(args.ingress, [self._served(model, args) for model in args.served])
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api.app()), base_url="http://test")

    def _served(self, model: ModelArgs, args: AppArgs) -> ServedModel:
        name = model.model_names[0]
        text = TextFrontend(TOKENIZER, threads=1)
        return ServedModel(model, args.ingress, self.engines[name], text, self.metrics[name])


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    async with service.http:
        yield service


@pytest.mark.parametrize(("name", "expected"), [("small", "small"), ("alias", "small"), ("large", "large")])
async def test_the_name_chooses(service: Service, name: str, expected: str) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 20}
    for path, body in (
        (CHAT, chat),
        (COMPLETION, {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", chat),
    ):
        response = await service.http.post(path, json={"model": name, **body})
        assert f"I am {expected}" in response.text
        assert response.json()["model"] == name
    assert service.metrics[expected].seen["finished:stop"] == 4
    assert sum(len(engines.calls) for engines in service.engines.values()) == 4


async def test_models_are_listed_and_others_are_not_found(service: Service) -> None:
    listed = (await service.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["small", "alias", "large"]
    assert (await service.http.get("/v1/models/large")).json() == listed[2]
    for response in (
        await service.http.get("/v1/models/other"),
        await service.http.post(CHAT, json={"model": "other", "messages": MESSAGES}),
        await service.http.post("/tokenize", json={"model": "other", "prompt": "hi"}),
    ):
        error = envelope(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "small, alias, large" in error["message"]


async def test_healthy_while_one_is_up(service: Service) -> None:
    service.engines["small"].up = False
    assert (await service.http.get("/health")).status_code == 200
    assert [model["id"] for model in (await service.http.get("/v1/models")).json()["data"]] == ["large"]
    envelope(await service.http.get("/v1/models/small"), 503)
    service.engines["large"].up = False
    assert (await service.http.get("/health")).status_code == 503


async def test_priority_is_taken_where_the_policy_reads_it() -> None:
    for policy, status in (("fcfs", 400), ("priority", 200)):
        args = AppArgs.model_validate({"served_model_names": ["m"], "engine": {"scheduling_policy": policy}})
        api = api_of(args, FakeEngines(), TextFrontend(TOKENIZER, threads=1), FakeMetrics())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app()), base_url="http://test") as http:
            response = await http.post(CHAT, json={"model": "m", "messages": MESSAGES, "priority": 3})
        assert response.status_code == status


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (TWO | {"served_model_names": ["x"]}, "with models, served_model_names must be said of each"),
        ({"models": [{"served_model_names": ["a"]}, {"served_model_names": ["b"]}]}, "deployment 'EngineReplica'"),
        ({"models": [{}, {"deployment": "Other"}]}, "the name 'smollm2-135m-instruct'"),
        ({"models": [{"engin": {}}]}, "did you mean 'engine'"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate(args)


def test_each_has_a_deployment_of_its_own() -> None:
    app = build(AppArgs.model_validate(TWO))
    engines = app._bound_deployment.init_args[1:]
    assert [engine._bound_deployment.name for engine in engines] == ["EngineReplica", "LargeReplica"]
