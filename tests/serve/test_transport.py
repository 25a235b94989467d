"""The way of Serve's call to a replica, where requests run on the loops of `make serve`: see docs/data-plane.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import ray.util
from ray._private.grpc_utils import init_grpc_channel
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from tests.serve.cluster import LOOPS, NAME, Cluster, config
from tests.serve.survival import processes

TOKENS = 1_100_000  # of a body of 4 MiB, and as many numbers of four bytes are more than a message of gRPC may be
LIMIT = 4 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Where the environment names an HTTP proxy, which gRPC heeds and which reaches no replica."""
    cluster = Cluster(LOOPS | {"http_proxy": "http://127.0.0.1:1"})
    try:
        yield cluster
    finally:
        cluster.stop()


def deploy(cluster: Cluster, import_path: str = "deployments.app:build", **changes: Any) -> None:
    data = config(EngineReplica__autoscaling_config__max_replicas=1, **changes)
    data["applications"][0]["import_path"] = import_path
    cluster.deploy(data, timeout=120)


def ask(cluster: Cluster, prompt: str | list[int]) -> httpx.Response:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=200)


def code(channel: grpc.Channel) -> grpc.StatusCode:
    """How a call of Serve's ends that says nothing."""
    with channel, pytest.raises(grpc.RpcError) as raised:
        ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=10)
    return raised.value.code()


def grpc_port() -> int:
    """Where the replica listens for calls of Serve's: of its ports, the one that knows them."""
    (replica,) = processes("ray::ServeReplica:llm:EngineReplica")
    found = {c.laddr.port for c in replica.net_connections() if c.status == psutil.CONN_LISTEN}
    ended = {port: code(init_grpc_channel(f"{ray.util.get_node_ip_address()}:{port}")) for port in found}
    (port,) = [port for port, status in ended.items() if status == grpc.StatusCode.UNKNOWN]  # nothing to unpickle
    return int(port)


def test_calls_go_by_grpc_and_want_ray_s_token(cluster: Cluster) -> None:
    """What comes there is unpickled."""
    deploy(cluster)
    assert ask(cluster, "hello").status_code == 200
    (ingress,) = processes("ray::ServeReplica:llm:Ingress")
    assert grpc_port() in {c.raddr.port for c in ingress.net_connections() if c.raddr}
    assert code(grpc.insecure_channel(f"127.0.0.1:{grpc_port()}")) == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.soak
@pytest.mark.parametrize("build", ["deployments.app:build", "loadtest.plane:build"])  # which has no channels
def test_a_prompt_longer_than_a_message_of_grpc(cluster: Cluster, build: str) -> None:
    deploy(
        cluster,
        build,
        args__engine__synthetic={"step_seconds": 0, "max_model_len": 2 * TOKENS},
        args__engine__num_blocks=2 * TOKENS // 16,
        args__engine__max_num_batched_tokens=1 << 16,
        args__engine__enable_prefix_caching=False,
    )
    prompt = [7] * TOKENS
    assert np.array(prompt, np.int32).nbytes > LIMIT
    answer = ask(cluster, prompt)
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["usage"]["prompt_tokens"] == TOKENS
