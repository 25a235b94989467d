"""Who decides: policies behind Serve's own delays, an autoscaler like Knative's, and one that knows the future."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from ray.serve._private.constants import SERVE_AUTOSCALING_DECISION_COUNTERS_KEY as COUNTER
from ray.serve._private.constants import SERVE_AUTOSCALING_DECISION_TIMESTAMP_KEY as SINCE
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    _get_cold_start_scale_up_replicas,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from loadtest.autoscale.simulator import SAMPLE_S, Fleet, Setting
from loadtest.autoscale.workload import Workload

Policy = Callable[[Any], tuple[float, dict[str, Any]]]


class Serve:
    """A Serve policy, called and bounded as Serve's controller does, with Serve's own code but for its clock."""

    def __init__(self, policy: Policy, config: AutoscalingConfig) -> None:
        self._policy = policy
        self._config = config
        self._state: dict[str, Any] = {}
        self._seen: tuple[float, dict[str, Any], float, float] = (-math.inf, {}, 0.0, 0.0)

    def desired(self, fleet: Fleet) -> int:
        config, setting = self._config, fleet.setting
        pushed_at, metrics, total, queued = self._seen
        running = [replica.name for replica in fleet.running]
        if fleet.now - pushed_at >= config.metrics_interval_s or not running:  # who holds requests tells it at once
            last = int(config.look_back_period_s / SAMPLE_S)
            metrics = {
                name: {replica: series[-last:] for replica, series in told.items()}
                for name, told in fleet.samples.items()
            }
            total, queued = fleet.mean(config.look_back_period_s), fleet.mean(config.look_back_period_s, held=True)
            self._seen = (fleet.now, metrics, total, queued)
        context = AutoscalingContext(
            deployment_id=None,  # nothing here reads it
            deployment_name="simulated",
            app_name="simulated",
            current_num_replicas=len(running),
            target_num_replicas=fleet.target,
            running_replicas=running,
            total_num_requests=total,
            total_queued_requests=queued,
            aggregated_metrics=None,
            raw_metrics=metrics,
            capacity_adjusted_min_replicas=setting.smallest,
            capacity_adjusted_max_replicas=setting.largest,
            policy_state=dict(self._state),
            last_scale_up_time=fleet.scaled_up_at,
            last_scale_down_time=None,
            current_time=fleet.now,
            config=config,
        )
        if (cold := _get_cold_start_scale_up_replicas(context)) is not None:
            return cold
        wanted, state = self._policy(context)
        scaled = _apply_scaling_factors(wanted, len(running), config)
        if not running and scaled > 0:
            return scaled
        timer = {COUNTER: self._state.get(COUNTER, 0), SINCE: self._state.get(SINCE)}
        decided, timer = _apply_delay_logic(max(0, scaled), fleet.target, config, timer, _now=fleet.now)
        self._state = {**state, **timer}
        return decided


class Knative:
    """KPA, from its documentation: concurrency over a stable window of 60 s, over a panic window of 6 s where that asks
    for twice what is there, and then no fewer for 60 s; at most halved at a time."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._panic: tuple[float, int] = (-math.inf, 0)  # until when, and with how many

    def desired(self, fleet: Fleet) -> int:
        ready = max(1, len(fleet.running))
        stable, panic = (math.ceil(fleet.mean(window) / self._target) for window in (60.0, 6.0))
        until, count = self._panic
        if panic >= 2 * ready:
            until, count = fleet.now + 60.0, max(panic, count)
        self._panic = (until, count if fleet.now < until else 0)
        if fleet.now < until:
            return max(count, fleet.target)
        return max(stable, fleet.target // 2)


class AtOnce:
    """Has not read the traffic, and orders all that may be at the first request: whatever a start costs after that
    nobody who does not know the future can spare."""

    def desired(self, fleet: Fleet) -> int:
        return fleet.setting.largest if fleet.mean(SAMPLE_S) > 0 else fleet.target


class Oracle:
    """Has read the traffic: has a replica ready when it will be needed, and none that won't be within two starts."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        window, engine = 10.0, setting.engine
        n = int(workload.seconds / window) + 1
        prompt, decode = np.zeros(n), np.zeros(n)
        for request in workload.requests:
            i = int(request.arrival / window)
            prompt[i] += request.tokens / engine.rate + engine.overhead
            decode[i] += request.output * engine.token_s
        prompt *= 1 + engine.slowdown * 20
        minute = np.convolve(prompt, np.ones(6), "same") / 60
        busy = np.maximum(prompt / window, minute / 0.7)
        seats = decode / window / ((setting.token_s - engine.token_s) / engine.harm_s)
        need = np.ceil(np.maximum(busy, seats)).astype(int)
        ahead = math.ceil(2.2 * setting.start_s / window) + 1
        self._need = [int(need[i : i + ahead].max()) for i in range(n)]
        self._window = window

    def desired(self, fleet: Fleet) -> int:
        i = int(fleet.now / self._window)
        return self._need[i] if i < len(self._need) else 0
