"""The head node ends under streams and comes back, on two nodes of one machine: Ray's state outlives it on a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.serve.cluster import NAME, eventually, free_port
from tests.serve.survival import StreamLoad, service

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

TOKEN = "of-the-test-of-a-head-that-ends-0001"
AWAY_S = 10.0
BIN = Path(sys.executable).parent


class Nodes:
    """A head, on which no replica runs, and a worker; as `ray start` makes them, each with its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gcs, self.dashboard, self.head_http, self.http = (free_port() for _ in range(4))
        (folder / "gcs").mkdir()
        self.env = os.environ | {
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(folder / "gcs"),
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.http),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        }
        self.env.pop("RAY_ADDRESS", None)
        self.running: list[psutil.Process] = []

    def start(self, *args: str) -> psutil.Process:
        command = [BIN / "ray", "start", "--block", "--object-store-memory", str(80 << 20), *args]
        with (self.folder / "log").open("a") as log:
            node = psutil.Popen(command, env=self.env, stdout=log, stderr=log)
        self.running.append(node)
        return node

    def start_head(self) -> psutil.Process:
        # It is what keeps a second head from being started beside one: here the worker is taken for that.
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        ports = ["--port", str(self.gcs), "--dashboard-port", str(self.dashboard)]
        return self.start("--head", "--num-cpus", "0", "--temp-dir", str(self.folder), *ports)

    def start_worker(self) -> psutil.Process:
        return self.start("--address", f"127.0.0.1:{self.gcs}", "--num-cpus", "4")

    def stop(self, node: psutil.Process) -> None:
        """As a machine that loses its power."""
        self.running.remove(node)
        with suppress(psutil.NoSuchProcess):
            for process in [node, *node.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            node.wait(10)

    def deploy(self, replicas: int) -> None:
        data = service(replicas, Ingress__num_replicas=1)
        data["proxy_location"] = "EveryNode"
        data["http_options"]["port"] = self.head_http
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(data))
        subprocess.run([BIN / "serve", "deploy", file], env=self.env, check=True, timeout=120, capture_output=True)

    def up(self) -> bool:
        """Whether the head's dashboard answers, which is what starts last there."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.dashboard}/api/version", timeout=5).status_code < 500
        return False

    def engines(self) -> list[str]:
        """Of the replicas that Serve's controller has, the states; none where it does not answer."""
        with suppress(httpx.HTTPError, KeyError):
            url = f"http://127.0.0.1:{self.dashboard}/api/serve/applications/"
            answer = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10).json()
            found: list[dict[str, Any]] = answer["applications"]["llm"]["deployments"]["EngineReplica"]["replicas"]
            return [replica["state"] for replica in found]
        return []

    def settled(self, replicas: int) -> float:
        return eventually(lambda: self.engines() == ["RUNNING"] * replicas, 120, f"{replicas} engines")

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            body = {"model": NAME, "prompt": "x", "max_tokens": 2}
            return httpx.post(f"http://127.0.0.1:{self.http}/v1/completions", json=body, timeout=10).status_code == 200
        return False


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="ns"))
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        for node in list(nodes.running):
            nodes.stop(node)
        shutil.rmtree(folder, ignore_errors=True)


def test_streams_outlive_the_head_and_the_next_one_goes_on(nodes: Nodes) -> None:
    head = nodes.start_head()
    eventually(nodes.up, 60, "a head")
    worker = nodes.start_worker()
    nodes.deploy(2)
    nodes.settled(2)
    eventually(nodes.answers, 30, "an answer")
    load = StreamLoad(f"http://127.0.0.1:{nodes.http}", 6, 400)
    time.sleep(4)
    nodes.stop(head)
    time.sleep(AWAY_S)
    head = nodes.start_head()
    took = nodes.settled(2)
    print(f"the controller is back {took:.1f} s after its node")
    nodes.deploy(3)
    nodes.settled(3)
    (victim, *_) = [one for one in worker.children(recursive=True) if "nanoengine.process" in one.cmdline()]
    victim.kill()
    eventually(lambda: nodes.engines() != ["RUNNING"] * 3, 30, "its death noticed")
    nodes.settled(3)
    load.stop()
    found = load.take()
    print(dict(found))
    assert set(found) == {"whole"}, found
