"""QueueDepthPolicy without Ray's controller."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve._private.common import TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.autoscaling.policy import FIRST_REPORT_S, REPEAT_S, STALE_S, QueueDepthPolicy

NOW = 1000.0
CONFIG = AutoscalingConfig(metrics_interval_s=1, look_back_period_s=10, downscale_delay_s=100)
PATH = "deployments.autoscaling.policy:QueueDepthPolicy"


def series(value: Any, per_second: float = 0.0, age: float = 0.0) -> list[TimeStampedValue]:
    """Ten samples, of which the last is ``age`` old; ``value`` is the last one's."""
    return [TimeStampedValue(NOW - age - i, value - per_second * i if per_second else value) for i in range(9, -1, -1)]


def context(
    waiting: list[Any], running: list[Any] | None = None, *, queued: float = 0, target: int = 7, **changes: Any
) -> Any:
    """What Serve gives a policy. A replica's figure is its value, samples, or None for a replica that tells none."""
    names = [f"r{i}" for i in range(len(waiting))]
    told = {"waiting": waiting, "running": running or [0] * len(names)}
    more: dict[str, list[Any]] = changes.pop("told", {})
    metrics = {
        name: {
            replica: value if isinstance(value, list) else series(value)
            for replica, value in zip(names, values, strict=True)
            if value is not None
        }
        for name, values in (told | more).items()
    }
    given = {
        "deployment_name": "EngineReplica",
        "running_replicas": names,
        "target_num_replicas": target,
        "total_queued_requests": queued,
        "raw_metrics": metrics,
        "current_time": NOW,
        "policy_state": {},
        "config": CONFIG,
    }
    return SimpleNamespace(**(given | changes))


def tokens(rate: float, *, speed: float = 1000, cached: float = 0, kv: float = 0, replicas: int = 1) -> dict[str, Any]:
    """``rate``, ``cached``: prompt tokens a second of each replica."""
    return {
        "prefill_rate": [speed] * replicas,
        "arrived_tokens": [series(1e6, rate)] * replicas,
        "cached_tokens": [series(1e6, cached)] * replicas,
        "kv_usage": [kv] * replicas,
    }


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
    """The plain mode: one number, and a division."""
    target = min(desired, len(waiting)) or 1
    count, _ = QueueDepthPolicy(target_queue_depth=8)(context(waiting, running, queued=queued, target=target))
    assert count == desired


@pytest.mark.parametrize(
    ("told", "desired"),
    [
        (tokens(740), 1),
        (tokens(760), 2),  # of 1,000 a second, three quarters are meant to be used
        (tokens(3000), 4),
        (tokens(760, speed=0), 1),  # not measured yet
        (tokens(0, kv=0.81), 2),
    ],
)
def test_tokens_and_blocks_can_ask_for_more(told: dict[str, Any], desired: int) -> None:
    policy = QueueDepthPolicy(target_queue_depth=8, target_prefill_use=0.75)
    assert policy(context([0], [1], target=1, told=told))[0] == desired


def test_speed_is_that_of_those_who_know_theirs_and_since_they_do() -> None:
    """A 0 is no speed: with it in the mean each new replica would ask for more."""
    policy = QueueDepthPolicy(target_queue_depth=8, target_prefill_use=0.75)
    told = tokens(300, replicas=4) | {"prefill_rate": [1000, 0, 0, 0]}  # 1,200 a second in all
    assert policy(context([0] * 4, target=2, told=told))[0] == 2
    told = tokens(700) | {
        "prefill_rate": [[TimeStampedValue(NOW - i, 1000.0 if i == 0 else 0) for i in range(9, -1, -1)]]
    }
    assert policy(context([0], target=1, told=told))[0] == 1


def test_replica_without_report_counts_as_the_mean() -> None:
    policy = QueueDepthPolicy(target_queue_depth=8)
    assert policy(context([16, None], [0, None]))[0] == 5, "a replica that just started is not idle capacity to remove"


def test_a_stale_report_counts_as_none() -> None:
    old = series(100, age=STALE_S + 1)
    assert QueueDepthPolicy(target_queue_depth=8)(context([16, old], [0, 0], target=1))[0] == 4
    count, state = QueueDepthPolicy()(context([old], [old]))
    assert count == 7
    assert "trouble" in state


# -- fewer -----------------------------------------------------------------------------------------------------------


def test_those_that_stay_must_not_be_full() -> None:
    """N to N - 1 and back, for ever: what is given up at a load under the target would be asked for again."""
    policy = QueueDepthPolicy(target_queue_depth=10)
    assert policy(context([0, 0], [5, 4], target=2))[0] == 2, "one replica would be nine tenths full"
    assert policy(context([0, 0], [4, 4], target=2))[0] == 1


def test_what_a_cache_saves_is_counted_before_it_is_given_up() -> None:
    policy = QueueDepthPolicy(target_queue_depth=100, target_prefill_use=1.0)

    def count(cached: float) -> int:
        return policy(context([0, 0], target=2, told=tokens(300, cached=cached, replicas=2)))[0]

    assert count(0) == 1
    assert count(1000) == 2, "half of 2,000 cached tokens a second would be computed anew, beside 600"


def test_fewer_is_the_most_of_the_whole_delay_not_its_end() -> None:
    policy, state = QueueDepthPolicy(target_queue_depth=8), {}
    counts = []
    for second, active in [(0, 30), (30, 30), (60, 8), (90, 8), (120, 8), (140, 8)]:
        given = context([0], [active], target=9, policy_state=state, current_time=NOW, told={})
        given.current_time = NOW + second
        given.raw_metrics = {
            name: {"r0": [TimeStampedValue(NOW + second, value)]}
            for name, value in (("waiting", 0), ("running", active))
        }
        count, state = policy(given)
        counts.append(count)
    assert counts == [5, 5, 5, 5, 5, 2]
    assert len(state["lows"]) == 1


# -- nothing takes it down -------------------------------------------------------------------------------------------

BROKEN = [
    context([None], [None]),
    context([float("nan")]),
    context([float("inf")]),
    context(["x"]),
    context([[]]),
    context([1], policy_state={"lows": 3}),
    context([1], policy_state={"lows": ["x"]}),
    context([1], config=None),
    context([1], queued=None),  # type: ignore[arg-type]
    context([1], raw_metrics=None),
    context([1], raw_metrics={}),
    context([1], told={"kv_usage": ["x"]}),
    SimpleNamespace(target_num_replicas=7),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_in_doubt_the_target_stands_and_the_log_says_why(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = QueueDepthPolicy(target_prefill_use=0.75)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        count, state = policy(broken)
        assert count == 7
        if "trouble" in state:  # reports may come late, and only a start's first seconds are no trouble
            later = SimpleNamespace(**vars(broken) | {"policy_state": state, "current_time": NOW + FIRST_REPORT_S})
            assert policy(later)[0] == 7
    assert caplog.text.count("stays") == 1


def test_the_log_is_not_filled_with_it(caplog: pytest.LogCaptureFixture) -> None:
    policy, state = QueueDepthPolicy(), {}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        for tick in range(int(FIRST_REPORT_S + 2 * REPEAT_S)):
            _, state = policy(context([None], current_time=NOW + tick, policy_state=state))
    assert len(caplog.records) == 2
    assert "no running replica reports a usable 'waiting'" in caplog.text


def test_a_start_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """Until the first report has come, each time that one starts."""
    policy, state = QueueDepthPolicy(), {}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        for start in range(0, 100, 20):
            for second in range(int(FIRST_REPORT_S)):
                _, state = policy(context([None], current_time=NOW + start + second, policy_state=state))
            now = NOW + start + FIRST_REPORT_S
            came = [TimeStampedValue(now, 1)]
            _, state = policy(context([came], [came], current_time=now, policy_state=state))
    assert not caplog.records


def test_where_none_is_up_the_target_stands() -> None:
    assert QueueDepthPolicy()(context([]))[0] == 7


@pytest.mark.parametrize("name", ["target_queue_depth", "target_prefill_use"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "8"])
def test_bad_targets_are_named_and_leave_the_count(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Serve's controller, which makes the policy, gets no exception; ``deployments.check`` does."""
    with pytest.raises(ValueError, match=name):
        QueueDepthPolicy.targets(**{name: value})
    assert QueueDepthPolicy(**{name: value})(context([9]))[0] == 7
    assert name in caplog.text


def test_an_unknown_argument_leaves_the_count(caplog: pytest.LogCaptureFixture) -> None:
    assert QueueDepthPolicy(target_queue=8)(context([9]))[0] == 7
    assert "unexpected keyword argument 'target_queue'" in caplog.text


anything = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(-(10**9), 10**9), st.text(max_size=3), st.just([]),
    st.lists(st.builds(TimeStampedValue, st.floats(900, 1100), st.one_of(st.floats(), st.text(max_size=2), st.none())),
             max_size=4),
)  # fmt: skip
FIGURES = ("waiting", "running", "kv_usage", "prefill_rate", "arrived_tokens", "cached_tokens")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_it_is_given_it_answers_with_a_count_and_a_state(data: st.DataObject) -> None:
    replicas = [f"r{i}" for i in range(data.draw(st.integers(0, 4)))]
    metrics = data.draw(
        st.dictionaries(st.sampled_from(FIGURES), st.dictionaries(st.sampled_from(["r0", "r1", "r2", "z"]), anything))
    )
    state = data.draw(st.dictionaries(st.sampled_from(["lows", "trouble", "x"]), anything))
    given_ = context([], running_replicas=replicas, raw_metrics=metrics, policy_state=state, queued=data.draw(anything))
    policy = QueueDepthPolicy(target_prefill_use=data.draw(st.sampled_from([None, 0.75])))
    count, after = policy(given_)
    assert isinstance(count, int)
    assert count >= 0
    assert isinstance(after, dict)
    given_.policy_state = after
    assert isinstance(policy(given_)[0], int), "nor does what it remembers of it"


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.tuples(*[st.floats(0, 60)] * 2, *[st.floats(0, 2000)] * 2), min_size=1, max_size=6),
    target=st.integers(1, 20),
    more=st.floats(0, 30),
)  # fmt: skip
def test_more_work_never_asks_for_fewer(loads: list[tuple[float, ...]], target: int, more: float) -> None:
    def count(extra: float) -> int:
        waiting, running, rates, cached = (list(column) for column in zip(*loads, strict=True))
        told = {
            "prefill_rate": [1000.0] * len(loads),
            "kv_usage": [0.1] * len(loads),
            "arrived_tokens": [series(1e6, rate + 10 * extra) for rate in rates],
            "cached_tokens": [series(1e6, rate) for rate in cached],
        }
        waiting[0] += extra
        return QueueDepthPolicy(target_queue_depth=8, target_prefill_use=0.75)(
            context(waiting, running, target=target, told=told)
        )[0]

    assert count(more) >= count(0)


@settings(max_examples=100, deadline=None)
@given(active=st.floats(0, 400), target=st.integers(1, 30))
def test_a_steady_load_has_one_answer(active: float, target: int) -> None:
    """From wherever it starts it comes to a count at which it stays: no flapping under constant load."""
    seen = []
    for _ in range(10):
        share = [[TimeStampedValue(NOW, active / target)]] * target
        told = {name: [[TimeStampedValue(NOW, 0.0)]] * target for name in ("kv_usage", "prefill_rate")}
        given_ = context(share, target=target, told=told)
        target = max(1, QueueDepthPolicy(target_prefill_use=0.75)(given_)[0])
        seen.append(target)
    assert len(set(seen[5:])) == 1
    assert active / 16 <= seen[-1] + 1e-9
    if active == 0:
        assert seen[-1] == 1


def test_it_is_fast() -> None:
    """On the controller's event loop, ten times a second: a hundredth of it for 64 replicas."""
    many = context([1] * 64, [5] * 64, told=tokens(100, replicas=64))
    policy = QueueDepthPolicy(target_prefill_use=0.75)
    took = []
    for _ in range(20):
        began = time.thread_time()
        policy(many)
        took.append(time.thread_time() - began)
    assert min(took) < 0.01


def test_serve_can_send_it_to_its_controller() -> None:
    """By value, so that its controller needs nothing of ours."""
    policy = AutoscalingPolicy(policy_function=PATH, policy_kwargs={"target_queue_depth": 8})
    blob = policy.get_serialized_policy_def()
    assert blob is not None
    assert b"stays at" in blob, "the code itself, not the name of a module"
    count, state = cloudpickle.loads(blob)(target_queue_depth=8)(context([0], [9], target=1))
    assert count == 2
    assert state["lows"] == [(NOW, 2)]
