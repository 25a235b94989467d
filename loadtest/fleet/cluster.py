"""A Ray Serve of its own for each router: serve_config.yaml as it is, but for model, router and numbers of replicas."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

# As in the Makefile, and before Ray is imported: its ports on loopback only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.routing.policies import POLICIES
from nanoengine.outputs import Load

MODEL = "fleet"
START_S = 240.0

_OURS = {"request_router_class": "deployments.routing.router:EngineRouter"}
_RAY = {"request_router_class": "loadtest.fleet.affinity:PrefixAffinity"}
ROUTERS: dict[str, dict[str, Any]] = {
    **{name: {**_OURS, "request_router_kwargs": {"policy": name}} for name in POLICIES},
    "serve": {"request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"},
    "ray": _RAY,
    "ray10": {**_RAY, "request_router_kwargs": {"imbalanced_threshold": 10}},
}
"""``request_router_config`` by the name that it has here: our policies, Serve's power of two, and Ray's
PrefixCacheAffinityRouter as shipped and with the threshold that its documentation had first."""


def config(
    base: dict[str, Any], router: str, engine: dict[str, Any], replicas: int, ingresses: int, gpus: float, port: int
) -> dict[str, Any]:
    """``base``, a parsed serve_config.yaml, for one router. ``gpus``: of each engine replica."""
    data = copy.deepcopy(base)
    data["http_options"]["port"] = port
    (app,) = data["applications"]
    # What a model thinks is text like any other here.
    app["args"] |= {"served_model_names": [MODEL], "engine": engine, "reasoning_parser": "none"}
    for deployment in app["deployments"]:
        deployment |= {"num_replicas": ingresses, "ray_actor_options": {"num_cpus": 0.1}}
        deployment["graceful_shutdown_timeout_s"] = 5
        if deployment["name"] == "EngineReplica":
            del deployment["autoscaling_config"]
            deployment["num_replicas"] = replicas
            deployment["ray_actor_options"]["num_gpus"] = gpus
            deployment["request_router_config"] |= {"request_router_kwargs": {}, **ROUTERS[router]}
    return data


@contextlib.contextmanager
def served(data: dict[str, Any]) -> Iterator[None]:
    """A cluster that serves this configuration, with all its replicas up; it ends with the block.

    Raises ``RuntimeError`` where it does not start.
    """
    folder = tempfile.mkdtemp(prefix="ns")  # short: Ray puts socket paths under it, and they have a limit
    try:
        ray.init("local", include_dashboard=False, _temp_dir=folder, log_to_driver=False, object_store_memory=256 << 20)
        serve.start(http_options=data["http_options"])
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(data), _blocking=False)
        deadline = time.monotonic() + START_S
        while (app := serve.status().applications.get("llm")) is None or app.status != "RUNNING":
            if time.monotonic() > deadline or (app is not None and app.status == "DEPLOY_FAILED"):
                raise RuntimeError(f"not deployed: {app}")
            time.sleep(0.2)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def loads() -> list[Load]:
    """Every engine's last load report, in the running cluster."""
    answers: list[Load] = serve.get_deployment_handle("EngineReplica", "llm").broadcast("load").results(timeout_s=10)
    return answers
