"""QueueDepthPolicy without Ray's controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.autoscaling.policy import QueueDepthPolicy


def context(
    waiting: list[Any], running: list[Any] | None = None, *, queued: float = 0, target: int = 7, **changes: Any
) -> Any:
    names = [f"r{i}" for i in range(len(waiting))]
    running = running if running is not None else [0] * len(waiting)
    metrics = {
        "waiting": {n: v for n, v in zip(names, waiting, strict=True) if v is not None},
        "running": {n: v for n, v in zip(names, running, strict=True) if v is not None},
        "backlog_tokens": dict.fromkeys(names, 1000.0),
    }
    return SimpleNamespace(
        running_replicas=names,
        target_num_replicas=target,
        total_queued_requests=queued,
        aggregated_metrics=metrics,
        **changes,
    )


@pytest.mark.parametrize(
    ("waiting", "running", "queued", "desired"),
    [
        ([0], [0], 0, 0),  # Serve raises it to min_replicas
        ([0], [8], 0, 1),
        ([1], [8], 0, 2),
        ([0], [8], 1, 2),
        ([20, 0], [8, 4], 0, 4),
        ([0, 0, 0], [1, 1, 1], 0, 1),
    ],
)
def test_desired_count(waiting: list[float], running: list[float], queued: float, desired: int) -> None:
    assert QueueDepthPolicy(target_queue_depth=8)(context(waiting, running, queued=queued)) == (desired, {})


def test_backlog_tokens_can_ask_for_more() -> None:
    policy = QueueDepthPolicy(target_queue_depth=8, target_backlog_tokens=500)
    assert policy(context([1, 1]))[0] == 4


def test_replica_without_report_counts_as_the_mean() -> None:
    policy = QueueDepthPolicy(target_queue_depth=8)
    assert policy(context([16, None], [0, None]))[0] == 4, "a replica that just started is not idle capacity to remove"


@pytest.mark.parametrize(
    "broken",
    [
        context([]),
        context([None], [None]),
        context([float("nan")]),
        context(["x"]),
        SimpleNamespace(target_num_replicas=7),
        SimpleNamespace(target_num_replicas=7, running_replicas=["a"], aggregated_metrics=None),
        SimpleNamespace(target_num_replicas=7, running_replicas=["a"], aggregated_metrics={}),
    ],
)
def test_in_doubt_the_target_stands(broken: Any) -> None:
    assert QueueDepthPolicy()(broken) == (7, {})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "8"])
def test_bad_targets_are_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match="target_queue_depth"):
        QueueDepthPolicy(target_queue_depth=value)
