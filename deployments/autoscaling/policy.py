"""QueueDepthPolicy: how many engine replicas the load asks for.

Serve calls a policy ten times a second on its controller's event loop. One that raises stops updates of every
application in the cluster, and one that blocks stalls them all: this one is arithmetic on numbers that are already
there, and in any doubt it answers with the target as it is, and says so in the controller's log.

Serve applies bounds and delays itself, those of ``autoscaling_config``: there are no others here. What it keeps of one
call for the next is the ``policy_state`` that Serve hands back, so that the policy itself has no memory.

Serve pickles this module by value, so it imports nothing of ours; the simulator (``loadtest.autoscale``) imports it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("ray.serve")

STALE_S = 30.0  # a replica whose last report is older counts as one without: Serve itself keeps it for ever
FIRST_REPORT_S = 10.0  # for so long reports may be missing without a word: the first one takes a second or two
REPEAT_S = 60.0  # between two lines of the log about the same trouble
KV_USE = 0.8  # of a replica's KV blocks that sequences may refer to: beyond, it preempts soon, and caches nothing
SLACK = 0.8  # how full the replicas that stay may become when others go: at 1, one would be given up and taken back


class QueueDepthPolicy:
    """Enough replicas that each has at most ``target_queue_depth`` sequences, waiting or running.

    With ``target_prefill_use``, also enough that prompt tokens, as they come and less those that are cached, take at
    most that fraction of the speed that the engines have measured of themselves, and that KV blocks suffice: one prompt
    of 8,000 tokens is as much work as forty of 200, and a queue shows it only when it is late.

    Fewer only where those that stay would be at most ``SLACK`` full, with the work that the caches of the others saved;
    and as many as were needed at any moment of ``downscale_delay_s``, not just at its end.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Takes ``policy_kwargs``, as ``targets`` does; wrong ones make a policy that leaves the count as it is. Serve
        makes it on its controller, where an exception would stop updates like one in a call."""
        self._fault: Exception | None = None
        try:
            self._target_queue_depth, self._target_prefill_use = self.targets(**kwargs)
        except (TypeError, ValueError) as error:
            self._fault = error

    @staticmethod
    def targets(
        target_queue_depth: float = 16.0, target_prefill_use: float | None = None
    ) -> tuple[float, float | None]:
        """The same. Raises ``ValueError`` or ``TypeError`` where these are none."""
        given = {"target_queue_depth": target_queue_depth}
        if target_prefill_use is not None:
            given["target_prefill_use"] = target_prefill_use
        for name, value in given.items():
            if not (_is_number(value) and value > 0):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
        return target_queue_depth, target_prefill_use

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """``context`` is a ``ray.serve.config.AutoscalingContext``. Returns the desired count and the next state."""
        try:
            return self._decide(context)
        except Exception as error:  # whatever it is, the count that we have is the better answer
            return context.target_num_replicas, _complain(context, error)

    def _decide(self, context: Any) -> tuple[int, dict[str, Any]]:
        if self._fault is not None:
            raise self._fault
        target = int(context.target_num_replicas)
        if not context.running_replicas:
            # None is up yet, so there is nothing to read. The target stands: it is what is being started.
            return target, {}
        reports = _Reports(context)
        depth = reports.total("waiting") + reports.total("running") + max(0.0, float(context.total_queued_requests))
        need, spared = depth / self._target_queue_depth, 0.0
        if self._target_prefill_use is not None:
            need = max(need, reports.total("kv_usage") / KV_USE)
            if (speed := reports.speed() * self._target_prefill_use) > 0:
                # As they come, not as they are done: what waits at a busy replica already no new one can take.
                need = max(need, reports.rate("arrived_tokens") / speed)
                spared = reports.rate("cached_tokens") / speed
        desired = _ceil(need)
        fewer = max(desired, _ceil(_with_caches_lost(need, spared, reports.count)))
        lows = _window(context, fewer)
        if desired < target:
            # Against the target, so that what is ordered counts as there; if it never comes, it can still be given up.
            desired = min(target - 1, lows[0][1]) if fewer < target else target
        return desired, {"lows": lows}


class _Reports:
    """What the replicas told, by name and replica, over ``look_back_period_s``.

    One that has told nothing usable counts as much as the others do on average: counting it as idle would scale down
    whenever a replica starts.
    """

    def __init__(self, context: Any) -> None:
        self._by_name = context.raw_metrics
        self._running = list(context.running_replicas)
        self._since = float(context.current_time) - STALE_S
        self._period = float(context.config.look_back_period_s - context.config.metrics_interval_s)  # first to last
        self.count = len(self._running)

    def mean(self, name: str) -> float:
        """Over the replicas, of each one's mean over time. Raises ``LookupError`` where none has told it."""
        return max(0.0, _mean([_mean(values) for values in self._told(name)]))

    def total(self, name: str) -> float:
        return self.mean(name) * self.count

    def rate(self, name: str) -> float:
        """By how much a counter rises each second, of all replicas together. Over the whole period, also where there
        are samples of a part: two requests in a first second are not a rate."""
        rises = [values[-1] - values[0] for values in self._told(name)]
        return max(0.0, _mean(rises)) * self.count / self._period

    def speed(self) -> float:
        """Prompt tokens a second of one replica, of those that have measured theirs and since they have: 0 until then
        is no speed, and in the mean it would make a fleet look slow that has just grown. 0 where none has."""
        measured = [[value for value in values if value > 0] for values in self._told("prefill_rate")]
        speeds = [_mean(values) for values in measured if values]
        return _mean(speeds) if speeds else 0.0

    def _told(self, name: str) -> list[list[float]]:
        """What each replica told that is a number and not stale, but for those that told nothing such. Raises
        ``LookupError`` where none did."""
        told, found = self._by_name.get(name, {}), []
        for replica in self._running:
            samples = told.get(replica, ())
            if values := [one.value for one in samples if _is_number(one.value) and one.timestamp >= self._since]:
                found.append(values)
        if not found:
            raise LookupError(f"no running replica reports a usable {name!r}")
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_caches_lost(need: float, spared: float, count: int) -> float:
    """The least n of ``count`` replicas that would be ``SLACK`` full: of what all caches spared (in replicas), the
    share of those that go, (count - n) / count, has to be computed again until it is cached anew."""
    if need >= SLACK * count:
        return need / SLACK
    return (need + spared) / (SLACK + spared / count)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _ceil(count: float) -> int:
    return math.ceil(count - 1e-9)  # 16 / 0.8 and the like may come out a hair above


def _window(context: Any, fewer: int) -> list[tuple[float, int]]:
    """How few would have done, over the last ``downscale_delay_s``: (time, count), of which later ones are lower, so
    that the first is the highest and there are never more than there are counts."""
    now = float(context.current_time)
    begin = now - float(context.config.downscale_delay_s)
    lows = [(time, count) for time, count in context.policy_state.get("lows", ()) if time >= begin and count > fewer]
    return [*lows, (now, fewer)]


def _complain(context: Any, error: Exception) -> dict[str, Any]:
    """Say that the count stays as it is, and why: at once, or where reports are missing when they have been for longer
    than ``FIRST_REPORT_S``; and then every ``REPEAT_S``."""
    reason = f"{type(error).__name__}: {error}"
    try:
        now = float(context.current_time)
        last, since, said_at = context.policy_state.get("trouble", ("", now, -math.inf))
        if reason != last:
            since, said_at = now, -math.inf
        patience = FIRST_REPORT_S if isinstance(error, LookupError) else 0.0
        if now - since >= patience and now - said_at >= REPEAT_S:
            said_at = now
            name, target = context.deployment_name, context.target_num_replicas
            logger.warning("autoscaling: %s stays at %s replicas: %s", name, target, reason)
        return {"trouble": (reason, since, said_at)}
    except Exception:
        logger.warning("autoscaling: the count of replicas stays as it is: %s", reason)
        return {}
