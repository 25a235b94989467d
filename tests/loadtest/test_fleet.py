"""The comparison of routers on a cluster: all of it but the cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve.request_router import RequestRouter
from ray.serve.schema import ServeDeploySchema

from deployments.config import AppArgs
from deployments.messages import GenerateCall
from loadtest.fleet.__main__ import CONFIG, SYNTHETIC, engine
from loadtest.fleet.affinity import PrefixAffinity
from loadtest.fleet.chats import Workload, ideal_cached
from loadtest.fleet.cluster import ROUTERS, config
from nanoengine.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def test_equal_workloads_make_equal_chats() -> None:
    workload = Workload(requests=40, turns=4, groups=3, think_s=2.0)
    chats = workload.chats()
    assert chats == workload.chats() != replace(workload, seed=1).chats()
    assert len(chats) == 10
    assert {len(chat.turns) for chat in chats} == {4}
    assert len({chat.system for chat in chats}) == 3
    assert {chat.turns[0][0] for chat in chats} == {0.0}
    assert [chat.start for chat in chats] == sorted(chat.start for chat in chats)


def test_requests_come_at_the_rate_and_favour_the_first_prompts() -> None:
    chats = Workload(requests=8000, rate=10.0, turns=4, groups=4, system_words=1, user_words=1).chats()
    assert chats[-1].start == pytest.approx(800, rel=0.1)
    shares = sorted(
        (sum(chat.system == system for chat in chats) for system in {c.system for c in chats}), reverse=True
    )
    assert np.array(shares) / len(chats) == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.04)


def test_the_ideal_is_what_an_endless_cache_of_whole_blocks_finds() -> None:
    a, b = list(range(100)), list(range(200, 300))
    requests: list[tuple[list[int], list[int]]] = [
        (a[:40], []),  # nothing is there yet
        (a[:40], [7, 7]),  # 2 blocks of 16; the rest is no whole one
        (a[:32], []),  # its last token is computed, so its second block is
        (b[:8] + a[:40], []),  # the same tokens behind others are others
        (b[:40], b[40:50]),
        (b[:60], []),  # its answer is there too: 50 tokens, 3 blocks
    ]
    assert [ideal_cached(requests[: n + 1], 16) for n in range(6)] == [0, 32, 48, 48, 48, 96]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_configuration_is_one_that_serve_takes(router: str) -> None:
    settings = engine("synthetic", ["synthetic.step_seconds=0.5", "block_size=32"])
    data = config(yaml.safe_load(CONFIG.read_text()), router, settings, 3, 2, 0.5, 8123)
    (app,) = ServeDeploySchema.model_validate(data).applications
    model = AppArgs.model_validate(app.args).engine
    assert (model.block_size, model.synthetic.step_seconds) == (32, 0.5)
    assert model.synthetic.max_model_len == SYNTHETIC["synthetic"]["max_model_len"]  # type: ignore[index]
    front, engines = app.deployments
    assert (front.num_replicas, engines.num_replicas) == (2, 3)
    assert engines.ray_actor_options.num_gpus == 0.5
    kind: Any = import_attr(engines.request_router_config["request_router_class"])
    assert issubclass(kind, RequestRouter)


def test_rays_router_sees_equal_prefixes_of_tokens_as_equal_prefixes_of_text() -> None:
    def text(prompt: list[int]) -> str:
        call = GenerateCall(
            ingress="i", number=0, prompt=np.array(prompt, np.int32), params=SamplingParams(), model="m"
        )
        return PrefixAffinity._extract_text_from_request(None, SimpleNamespace(args=[call]))  # type: ignore[arg-type]

    assert len(text([1, 0xD800, 151_000])) == 3
    assert text([1, 0xD800, 151_000, 5]).startswith(text([1, 0xD800, 151_000]))
    assert not text([2, 0xD800, 151_000]).startswith(text([1]))


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    command = [sys.executable, "-m", "loadtest.mock_server", "--port", "0", "--ttft", "0.1", "--itl", "0.02"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


SMALL = Workload(requests=8, rate=40.0, turns=2, groups=2, think_s=0.1, max_tokens=6)


@pytest.mark.parametrize("users", [None, 2])
def test_each_turn_is_asked_once_after_the_one_before_with_its_answer(mock: str, users: int | None) -> None:
    held = SMALL.hold(mock, "m", users)
    assert sorted(one.turn for one in held) == [(chat, turn) for chat in range(4) for turn in range(2)]
    by_turn = {one.turn: one for one in held}
    for chat in range(4):
        first, second = by_turn[chat, 0], by_turn[chat, 1]
        assert second.messages[:3] == (*first.messages, {"role": "assistant", "content": "word " * 6})
        assert second.record.sent >= first.record.ended
        assert first.record.outcome == second.record.outcome == "ok"
    assert 0.1 < min(one.record.ttft for one in held) < 0.15
    most = max(sum(o.record.sent <= one.record.sent < o.record.ended for o in held) for one in held)
    assert most <= (users or 4)


@pytest.mark.parametrize("model", ["error", "cut", "busy"])
def test_a_chat_that_fails_is_told_and_not_gone_on_with(mock: str, model: str) -> None:
    held = SMALL.hold(mock, model)
    assert [one.turn[1] for one in held] == [0] * 4
    assert all(one.record.outcome == "failed" and one.record.error for one in held)
