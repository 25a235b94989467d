"""serve_config.yaml and its check."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from deployments import check
from deployments.autoscaling.policy import QueueDepthPolicy
from deployments.config import AppArgs
from deployments.routing.router import EngineRouter

FILE = Path(__file__).parents[2] / "serve_config.yaml"


@pytest.fixture
def data() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def engine(data: dict[str, Any]) -> dict[str, Any]:
    return next(d for d in data["applications"][0]["deployments"] if d["name"] == "EngineReplica")


def test_our_file_is_right(data: dict[str, Any]) -> None:
    assert check.check_file(FILE) == []


def test_policy_and_router_of_our_file_are_ours(data: dict[str, Any]) -> None:
    """Serve replaces these blocks as a whole: if one lost its class, Serve's own would quietly take over."""
    scaling = AutoscalingConfig.model_validate(engine(data)["autoscaling_config"])
    policy = scaling.policy.get_policy()
    assert policy.__name__ == QueueDepthPolicy.__name__
    assert policy(**scaling.policy.policy_kwargs)._target_queue_depth == 16
    router = RequestRouterConfig.model_validate(engine(data)["request_router_config"]).get_request_router_class()
    assert router.__name__ == EngineRouter.__name__
    assert scaling.min_replicas <= scaling.max_replicas


def test_limits_of_our_file_fit_together(data: dict[str, Any]) -> None:
    args = AppArgs.model_validate(data["applications"][0]["args"])
    ingress = next(d for d in data["applications"][0]["deployments"] if d["name"] == "Ingress")
    assert ingress["max_ongoing_requests"] > args.ingress.max_inflight_requests
    assert engine(data)["max_ongoing_requests"] > args.engine.max_num_seqs
    assert data["http_options"]["request_timeout_s"] is None


MISTAKES = [
    # path to the node, key, value, what the message must contain
    ((), "aplications", [], "did you mean 'applications'?"),
    (("http_options",), "prot", 1, "did you mean 'port'?"),
    (("http_options",), "port", "x", "http_options.port"),
    (("app",), "importpath", "x", "did you mean 'import_path'?"),
    (("app",), "import_path", "deployments.ap:build", "deployments.ap"),
    (("app",), "import_path", "deployments.app:biuld", "biuld"),
    (("args",), "served_model_name", ["x"], "did you mean 'served_model_names'?"),
    (("args", "engine"), "max_num_seq", 3, "did you mean 'max_num_seqs'?"),
    (("args", "engine"), "synthetic", {"step_second": 1}, "did you mean 'step_seconds'?"),
    (("args", "engine"), "max_num_seqs", -3, "engine.max_num_seqs"),
    (("args", "engine"), "max_num_batched_tokens", 3, "max_num_batched_tokens (3) must be at least max_num_seqs"),
    (("args", "ingress"), "max_inflight", 3, "did you mean 'max_inflight_requests'?"),
    (("engine",), "name", "EngineReplicas", "no such deployment"),
    (("engine",), "max_ongoing_request", 3, "did you mean 'max_ongoing_requests'?"),
    (("engine",), "num_replicas", 2, "num_replicas"),
    (("engine", "ray_actor_options"), "num_gpu", 1, "did you mean 'num_gpus'?"),
    (("engine", "autoscaling_config"), "min_replica", 1, "did you mean 'min_replicas'?"),
    (("engine", "autoscaling_config"), "min_replicas", 3, "max_replicas"),
    (("engine", "autoscaling_config"), "look_back_period_s", 0.5, "look_back_period_s"),
    (("engine", "autoscaling_config", "policy"), "policy_function", "deployments.autoscaling.policy:Nope", "Nope"),
    (("engine", "autoscaling_config", "policy"), "policy_kwargs", {"target": 1}, "target"),
    (("engine", "autoscaling_config", "policy", "policy_kwargs"), "target_queue_depth", 0, "above 0"),
    (("engine", "autoscaling_config", "policy", "policy_kwargs"), "target_prefill_us", 1, "target_prefill_us"),
    (("engine", "request_router_config"), "request_router_clas", "x", "did you mean 'request_router_class'?"),
    (("engine", "request_router_config"), "request_router_class", "deployments.config:AppArgs", "no RequestRouter"),
    (("engine", "request_router_config"), "request_router_kwargs", {"policy": "best"}, "best"),
    (("engine", "request_router_config"), "request_router_kwargs", {"polcy": "x"}, "polcy"),
]


@pytest.mark.parametrize(("path", "key", "value", "says"), MISTAKES)
def test_mistakes_are_named(data: dict[str, Any], path: tuple[str, ...], key: str, value: Any, says: str) -> None:
    data = copy.deepcopy(data)
    app = data["applications"][0]
    node = {"app": app, "args": app["args"], "engine": engine(data)}.get(path[0], data) if path else data
    for part in path if node is data else path[1:]:
        node = node[part]
    node[key] = value
    problems = check.check(data)
    assert any(says in problem for problem in problems), problems


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("applications: []\nhttp_options: {port: 1, port: 2}\n")
    assert any("given twice" in problem for problem in check.check_file(file))
    file.write_text("a: [")
    assert any("not valid YAML" in problem for problem in check.check_file(file))
    assert any("cannot read" in problem for problem in check.check_file(tmp_path / "none.yaml"))


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["check", str(FILE)])
    assert check.main() == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text(FILE.read_text().replace("max_replicas: 2", "max_replica: 2"))
    monkeypatch.setattr("sys.argv", ["check", str(bad)])
    assert check.main() == 1
    assert "did you mean 'max_replicas'?" in capsys.readouterr().err


def test_args_name_the_nearest_key() -> None:
    with pytest.raises(ValidationError, match="did you mean 'max_num_seqs'"):
        AppArgs.model_validate({"engine": {"max_num_seq": 1}})


def test_scaling_to_zero_has_to_say_how_long_a_request_waits_for_a_start(data: dict[str, Any]) -> None:
    engine(data)["autoscaling_config"]["min_replicas"] = 0
    assert any("needs args.ingress.start_wait_s" in problem for problem in check.check(data))
    data["applications"][0]["args"]["ingress"]["start_wait_s"] = 60
    assert check.check(data) == []


def rash_policy(context: Any) -> tuple[float, dict[str, Any]]:
    return context.aggregated_metrics["waiting"], {}


def test_a_policy_that_raises_is_named_before_it_stops_a_cluster(data: dict[str, Any]) -> None:
    engine(data)["autoscaling_config"]["policy"] = {"policy_function": f"{__name__}:rash_policy"}
    (problem,) = check.check(data)
    assert "the policy fails where no replica has reported yet: KeyError('waiting')" in problem
