"""A Ray Serve of one's own for tests: serve_config.yaml as it is but for model, sizes and port."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "serve_config.yaml"
NAME = "test-model"


def made_environment() -> dict[str, str]:
    """What `make serve` sets for Serve."""
    return dict(re.findall(r"^serve: export (RAY_SERVE_\w+) \?= (\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


LOOPS = {name: value for name, value in made_environment().items() if name.startswith("RAY_SERVE_RUN_")}
"""Of it, on which event loops requests run; and so, by which way calls go."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def config(**changes: Any) -> dict[str, Any]:
    """serve_config.yaml for the synthetic model; ``changes`` are dotted paths below the application, or below
    ``Ingress`` or ``EngineReplica``, with double underscores for dots."""
    data: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    app = data["applications"][0]
    app["args"]["served_model_names"] = [NAME]
    app["args"]["engine"] = {
        "model": "synthetic",
        "num_blocks": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "synthetic": {"step_seconds": 0.005, "max_model_len": 2048},
    }
    roots = {"args": app["args"]} | {deployment["name"]: deployment for deployment in app["deployments"]}
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = roots[parents[0]]
        for part in parents[1:]:
            node = node.setdefault(part, {})
        node[last] = value
    return data


class Cluster:
    """A running cluster; ``deploy`` replaces what it serves.

    ``environment`` is that of its processes: {} for what plain `serve run` starts. This process has none of it: its
    handles have a loop of their own, as a test has none for them.
    """

    def __init__(self, environment: Mapping[str, str] = LOOPS) -> None:
        self.folder = tempfile.mkdtemp(prefix="ns")  # short: Ray puts socket paths under it, and they have a limit
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        os.environ.pop("RAY_ADDRESS", None)
        with patch.dict(os.environ, environment):  # which all processes of Ray inherit
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                _temp_dir=self.folder,
                object_store_memory=128 << 20,
                log_to_driver=False,
                namespace="serve",
            )
        self._client = serve.start(http_options={"host": "127.0.0.1", "port": self.port})

    def deploy(self, data: dict[str, Any], timeout: float = 60, wait: bool = True) -> None:
        """Deploy as ``serve run`` does, and wait until it answers. Raises ``RuntimeError`` with Serve's message."""
        from ray.serve.context import _get_global_client

        data = copy.deepcopy(data)
        data["http_options"] = {**data.get("http_options", {}), "port": self.port}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(data), _blocking=False)
        deadline = time.monotonic() + timeout
        while wait:
            app = serve.status().applications.get("llm")
            if app is not None and app.status == "RUNNING" and self.healthy():
                return
            if (app is not None and app.status == "DEPLOY_FAILED") or time.monotonic() > deadline:
                raise RuntimeError(f"not deployed: {app}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def replicas(self, deployment: str = "EngineReplica") -> int:
        """Replicas that are running."""
        deployments = serve.status().applications["llm"].deployments
        return int(deployments[deployment].replica_states.get("RUNNING", 0))

    def load(self) -> Any:
        """One engine's last load report."""
        handle = serve.get_deployment_handle("EngineReplica", "llm")
        return handle.load.remote().result(timeout_s=5)

    def stop(self) -> None:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def eventually(condition: Callable[[], Any], timeout: float = 5, what: str = "condition") -> float:
    """Wait until it is true; returns the seconds that took. Fails the test when it never is."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout:
            raise AssertionError(f"{what} did not come true within {timeout} s")
        time.sleep(0.02)
    return time.monotonic() - start
