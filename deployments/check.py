"""Check a serve_config.yaml strictly: ``python -m deployments.check serve_config.yaml``.

Ray accepts keys that it doesn't know, takes the last of two equal keys, and reports a wrong application argument only
after the deployment has failed. All of that is found here before anything is started.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from ray.serve.schema import ServeDeploySchema

from deployments.autoscaling.policy import QueueDepthPolicy
from deployments.config import unknown_keys
from deployments.routing.router import EngineRouter


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def check_file(path: Path) -> list[str]:
    """Everything that is wrong with the file, one line each; empty if nothing is."""
    try:
        data = yaml.load(path.read_text(), _UniqueKeyLoader)
    except OSError as error:
        return [f"cannot read it: {error.strerror}"]
    except yaml.YAMLError as error:
        return [f"not valid YAML: {error}"]
    if not isinstance(data, dict):
        return ["the file must hold a mapping with the key 'applications'"]
    return check(data)


def check(data: dict[str, Any]) -> list[str]:
    """As ``check_file``, for what is already parsed."""
    problems = list(unknown_keys(ServeDeploySchema, data))
    try:
        config = ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        return problems + _explained(error)
    except Exception as error:  # Serve imports policy and router classes as it validates
        return [*problems, f"a class that it names cannot be used: {error}"]
    for app in config.applications:
        where = f"application {app.name!r}"
        problems += [f"{where}: {problem}" for problem in _check_application(app.model_dump(exclude_unset=True))]
    return problems


def _check_application(app: dict[str, Any]) -> Iterator[str]:
    try:
        build = import_attr(app["import_path"])
        names = _deployment_names(build, app.get("args", {}))
    except ValidationError as error:
        yield from (f"args: {problem}" for problem in _explained(error))
        return
    except Exception as error:
        yield f"import_path {app['import_path']!r} cannot be used: {error}"
        return
    for deployment in app.get("deployments", ()):
        where = f"deployment {deployment['name']!r}"
        if deployment["name"] not in names:
            yield f"{where}: the application has no such deployment, only {', '.join(names)}"
            continue
        yield from (f"{where}: {problem}" for problem in _check_deployment(deployment))
        scaling, ingress = deployment.get("autoscaling_config") or {}, app.get("args", {}).get("ingress", {})
        if deployment["name"] != "Ingress" and scaling.get("min_replicas") == 0 and not ingress.get("start_wait_s"):
            yield f"{where}: min_replicas 0 needs args.ingress.start_wait_s: what finds no engine waits for one"


def _deployment_names(build: Any, args: dict[str, Any]) -> list[str]:
    """The deployments that the import path makes of these arguments, by Serve's own calls. Starts nothing."""
    application = call_user_app_builder_with_args_if_necessary(build, args)
    return [deployment.name for deployment in build_app(application, name="check").deployments]


def _check_deployment(deployment: dict[str, Any]) -> Iterator[str]:
    for block, check_block in (("autoscaling_config", _check_autoscaling), ("request_router_config", _check_router)):
        if (data := deployment.get(block)) is None:
            continue
        try:
            check_block(data)
        except ValidationError as error:
            yield from (f"{block}.{problem}" for problem in _explained(error))
        except Exception as error:  # what it names cannot be imported, or does not take these arguments
            yield f"{block}: {error}"


def _check_autoscaling(data: dict[str, Any]) -> None:
    scaling = AutoscalingConfig.model_validate(data)
    if scaling.metrics_interval_s >= scaling.look_back_period_s:
        raise ValueError("look_back_period_s must be longer than metrics_interval_s")
    policy = import_attr(scaling.policy.policy_function)
    if isinstance(policy, type):
        if issubclass(policy, QueueDepthPolicy):
            policy.targets(**scaling.policy.policy_kwargs)
        policy = policy(**scaling.policy.policy_kwargs)
    _try_policy(policy, scaling)


def _try_policy(policy: Any, scaling: AutoscalingConfig) -> None:
    """Call it as Serve's controller may at any time: one replica is up and has reported nothing yet.

    Raises ``ValueError`` where it does: in the controller it would stop updates of every application of the cluster.
    """
    context = AutoscalingContext(
        deployment_id=DeploymentID("check", "check"),
        deployment_name="check",
        app_name="check",
        current_num_replicas=1,
        target_num_replicas=1,
        running_replicas=[ReplicaID("check", DeploymentID("check", "check"))],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics={},
        capacity_adjusted_min_replicas=scaling.min_replicas,
        capacity_adjusted_max_replicas=scaling.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=time.time(),
        config=scaling,
    )
    logging.disable(logging.WARNING)  # one may say that nothing is reported
    try:
        desired, _ = policy(context)
        math.ceil(desired)
    except Exception as error:
        raise ValueError(f"the policy fails where no replica has reported yet: {error!r}") from error
    finally:
        logging.disable(logging.NOTSET)


def _check_router(data: dict[str, Any]) -> None:
    config = RequestRouterConfig.model_validate(data)
    router = import_attr(config.request_router_class)
    if not issubclass(router, RequestRouter):
        raise ValueError(f"{config.request_router_class} is no RequestRouter")
    if issubclass(router, EngineRouter):
        router.settings(**config.request_router_kwargs)


def _explained(error: ValidationError) -> list[str]:
    lines = []
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in one["loc"])
        reason = one["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {reason}" if where else reason)
    return lines


def main() -> int:
    """Check the files named on the command line. Returns 1 if anything is wrong with any of them."""
    parser = argparse.ArgumentParser(prog="python -m deployments.check", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    failed = False
    for path in parser.parse_args().files:
        problems = check_file(path)
        failed |= bool(problems)
        for problem in problems:
            print(f"{path}: {problem}", file=sys.stderr)
        if not problems:
            print(f"{path}: ok")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
