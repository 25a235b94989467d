"""QueueDepthPolicy: how many engine replicas the queue asks for.

Serve calls a policy ten times a second on its controller's event loop. One that raises stops updates of every
application in the cluster, and one that blocks stalls them all: this one is arithmetic on numbers that are already
there, and in any doubt it answers with the target as it is. Serve applies bounds, delays and smoothing itself.

Serve pickles this module by value, so it imports nothing of ours.
"""

from __future__ import annotations

import math
from typing import Any


class QueueDepthPolicy:
    """Enough replicas that each has at most ``target_queue_depth`` sequences, waiting or running.

    The depth is the engines' own (``record_autoscaling_stats``), averaged by Serve over ``look_back_period_s``, plus
    what still waits in handles for a replica. How long a queue is in tokens it doesn't see; ``target_backlog_tokens``
    adds that: prompt tokens to compute per replica, which are what a new request's first token waits for.
    """

    def __init__(self, target_queue_depth: float = 16.0, target_backlog_tokens: float | None = None) -> None:
        for name, value in (
            ("target_queue_depth", target_queue_depth),
            ("target_backlog_tokens", target_backlog_tokens),
        ):
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
        self._target_queue_depth = target_queue_depth
        self._target_backlog_tokens = target_backlog_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """``context`` is a ``ray.serve.config.AutoscalingContext``. Returns the desired count and no state."""
        try:
            return self._desired(context), {}
        except Exception:  # whatever it is, the count that we have is the better answer
            return context.target_num_replicas, {}

    def _desired(self, context: Any) -> int:
        running = list(context.running_replicas)
        if not running:
            # None is up yet, so there is nothing to read. The target stands: it is what is being started.
            return int(context.target_num_replicas)
        metrics = context.aggregated_metrics
        depth = _total(metrics["waiting"], running) + _total(metrics["running"], running)
        depth += max(0.0, float(context.total_queued_requests))
        desired = math.ceil(depth / self._target_queue_depth)
        if self._target_backlog_tokens is not None:
            backlog = _total(metrics["backlog_tokens"], running)
            desired = max(desired, math.ceil(backlog / self._target_backlog_tokens))
        return desired


def _total(by_replica: dict[Any, float], running: list[Any]) -> float:
    """Sum over running replicas. One that has not reported counts as much as the others do on average: counting it as
    idle would scale down whenever a replica starts. Raises where none has, or a value is no number."""
    values = [float(by_replica[replica]) for replica in running if replica in by_replica]
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("no report")
    return sum(values) / len(values) * len(running)
