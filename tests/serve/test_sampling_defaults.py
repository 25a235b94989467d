"""generation_config.json: what a model recommends holds where a request says nothing, field by field."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppArgs
from deployments.ingress.text import TextFrontend
from nanoengine.config import EngineConfig
from nanoengine.sampling.defaults import sampling_defaults
from nanoengine.weights.sources import ModelFiles
from tests.serve.fakes import FakeEngines, FakeMetrics, api_of
from tests.serve.test_api import CHAT, COMPLETION, MESSAGES, TOKENIZER

RECOMMENDED = {"temperature": 0.2, "top_k": 1, "top_p": 0.05, "repetition_penalty": 1.2}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def defaults(folder: Path, stated: Any, **settings: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return dict(sampling_defaults(EngineConfig(**settings), ModelFiles(folder, "safetensors")))


def test_what_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nanoengine")
    assert defaults(tmp_path, RECOMMENDED | {"max_new_tokens": 5, "eos_token_id": [1], "min_p": None}) == RECOMMENDED
    assert "temperature 0.2, top_k 1, top_p 0.05, repetition_penalty 1.2" in caplog.text
    assert defaults(tmp_path, RECOMMENDED, generation_config="none") == {}
    (tmp_path / "generation_config.json").unlink()
    assert sampling_defaults(EngineConfig(), ModelFiles(tmp_path, "safetensors")) == {}
    assert sampling_defaults(EngineConfig(), ModelFiles(tmp_path, "gguf")) == {}


@pytest.mark.parametrize("stated", [[], "no", {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}])
def test_what_nobody_could_ask_for_is_left_out(tmp_path: Path, stated: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert defaults(tmp_path, stated) == {}
    assert "does not apply" in caplog.text


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, RECOMMENDED),
        ({"temperature": 1.4}, RECOMMENDED | {"temperature": 1.4}),
        ({"temperature": None}, RECOMMENDED),
        (NEUTRAL, NEUTRAL),
    ],
)
async def test_a_request_wins_field_by_field(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    engines = FakeEngines()
    text = TextFrontend(TOKENIZER, threads=1, sampling_defaults=RECOMMENDED)
    api = api_of(AppArgs.model_validate({"served_model_names": ["m"]}), engines, text, FakeMetrics())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app()), base_url="http://test") as http:
        await http.post(CHAT, json={"model": "m", "messages": MESSAGES, **asked})
        await http.post(COMPLETION, json={"model": "m", "prompt": "hi", **asked})
        models = (await http.get("/v1/models")).json()["data"]
    assert models[0]["sampling_defaults"] == RECOMMENDED
    for _, params, _ in engines.calls:
        assert {name: getattr(params, name) for name in expected} == expected
