"""Properties of scheduler and block pool together, over generated workloads with tiny pools.

The model is a stand-in whose next token depends on the content of every block that it reads, so each finished request
is compared, token by token, with what its own tokens alone demand: a wrong, stale or missing block turns the test red.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoengine.cache.blocks import BlockPool
from nanoengine.errors import InvalidRequestError
from nanoengine.runner.synthetic import SyntheticRunner, content
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.policies import POLICIES
from nanoengine.scheduling.scheduler import Limits, Retired, Scheduler
from nanoengine.scheduling.sequence import Sequence
from nanoengine.scheduling.step import IntArray, Step

VOCAB, EOS = 50, 0


class TinyVocabulary(SyntheticRunner):
    """Tokens 0..49, of which about one in fifteen is end-of-sequence."""

    def token(self, digest: np.ndarray) -> IntArray:
        return np.maximum((super().token(digest) - 32) % 53 - 3, EOS).astype(np.int32)


def expected_output(prompt: list[int], params: SamplingParams, limit: int) -> tuple[list[int], str]:
    """What the stand-in must say to a prompt, worked out with no scheduler and no cache."""
    runner = TinyVocabulary(num_slots=1, num_blocks=1, block_size=1)
    tokens, stop = list(prompt), set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        ids = np.array(tokens, np.int32)
        digest = content(ids, np.arange(len(ids))).sum(dtype=np.uint64)
        tokens.append(int(runner.token(np.array([digest]))[0]))
        done = len(tokens) - len(prompt)
        if tokens[-1] in stop and done >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == limit:
            return tokens[len(prompt) :], "length"


@dataclass
class Case:
    """One request of a workload: when it comes, and when, if at all, it is aborted (in steps)."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None
    salt: str = ""
    priority: int = 0
    output: list[int] = field(default_factory=list)
    reason: str | None = None


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Limits, int, int, list[Case]]:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_blocks = draw(st.integers(2, 24))
    max_num_seqs = draw(st.integers(1, 6))
    max_model_len = min(draw(st.integers(3, 40)), num_blocks * block_size)
    budget = draw(st.integers(max_num_seqs, 24))
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=draw(st.integers(1, budget)),
        max_model_len=max_model_len,
        block_size=block_size,
        vocab_size=VOCAB,
        watermark_blocks=draw(st.integers(0, 3)),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )
    stems = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=24), min_size=1, max_size=3))
    cases = []
    for _ in range(draw(st.integers(1, 10))):
        stem = draw(st.sampled_from(stems))
        cut = draw(st.integers(0, len(stem)))
        prompt = (stem[:cut] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)))[: max_model_len - 1] or [7]
        room = max_model_len - len(prompt)
        max_tokens = draw(st.none() | st.integers(1, room))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens or room)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        )
        arrives = draw(st.integers(0, 15))
        aborted = draw(st.none() | st.none() | st.integers(0, 12))
        salt = draw(st.sampled_from(["", "", "", "other"]))
        ends = None if aborted is None else arrives + aborted
        cases.append(Case(prompt, params, arrives, ends, salt, draw(st.integers(-1, 1))))
    return limits, num_blocks, draw(st.sampled_from([0, 0, 1, 2])), cases


def run(scheduler: Scheduler, runner: SyntheticRunner, cases: list[Case], *, check: bool = True) -> None:
    """Drive a workload to its end; ``runner.depth`` steps are in flight while the next is planned."""
    in_flight: deque[tuple[Step, np.ndarray]] = deque()
    clock, idle = 0, 0
    while True:
        for key, case in enumerate(cases):
            if case.arrives == clock:
                prompt = np.array(case.prompt, np.int32)
                scheduler.add(key, prompt, case.params, priority=case.priority, cache_salt=case.salt)
            if case.aborted == clock and case.reason is None and scheduler.abort(key):
                case.reason = "abort"
        if check:
            scheduler.check()
        step = scheduler.plan()
        if step is not None:
            assert step.counts.min() >= 1, "a row with nothing to compute has no logits"
            assert step.num_tokens <= scheduler.limits.max_num_batched_tokens
            assert len(set(step.slots.tolist())) == len(step.slots) <= scheduler.limits.max_num_seqs
            in_flight.append((step, runner.launch(step).result().tokens))
        if in_flight and (step is None or len(in_flight) > runner.depth):
            retired = scheduler.retire(*in_flight.popleft())
            for key, token in zip(retired.keys.tolist(), retired.tokens.tolist(), strict=True):
                assert cases[key].reason is None, "a token of a request that has ended"
                cases[key].output.append(token)
            for end in retired.finished:
                cases[end.key].reason = end.reason
            idle = 0
        elif step is None:
            idle += 1
        if check:
            scheduler.check()
        clock += 1
        if not in_flight and not scheduler.has_work and all(case.arrives < clock for case in cases):
            return
        assert idle <= 40, "requests are unfinished, but nothing is planned: a deadlock"
        assert clock < 5000, "no end"


def build(
    limits: Limits, num_blocks: int, depth: int, policy: str = "fcfs"
) -> tuple[Scheduler, TinyVocabulary, BlockPool]:
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(limits, pool, POLICIES[policy](), model="tiny", eos_token_ids=(EOS,))
    runner = TinyVocabulary(
        num_slots=limits.max_num_seqs, num_blocks=num_blocks, block_size=limits.block_size, depth=depth
    )
    return scheduler, runner, pool


def check_outputs(limits: Limits, cases: list[Case]) -> None:
    for case in cases:
        limit = limits.max_model_len
        if case.params.max_tokens is not None:
            limit = len(case.prompt) + case.params.max_tokens
        tokens, reason = expected_output(case.prompt, case.params, limit)
        if case.reason == "abort":
            assert case.output == tokens[: len(case.output)]
        else:
            assert (case.output, case.reason) == (tokens, reason)


def check_workload(workload: tuple[Limits, int, int, list[Case]], policy: str) -> None:
    limits, num_blocks, depth, cases = workload
    scheduler, runner, pool = build(limits, num_blocks, depth, policy)
    run(scheduler, runner, cases)
    check_outputs(limits, cases)
    scheduler.check_idle()
    event(f"preempted: {scheduler.counters.preemptions > 0}")
    event(f"hits: {scheduler.counters.prefix_hit_tokens > 0}")
    event(f"evicted: {pool.evictions > 0}")
    event(f"steps in flight: {depth}")


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), st.sampled_from([*POLICIES]))
def test_any_workload_reads_the_right_blocks_and_leaks_none(
    workload: tuple[Limits, int, int, list[Case]], policy: str
) -> None:
    check_workload(workload, policy)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), st.sampled_from([*POLICIES]))
def test_many_more_workloads(workload: tuple[Limits, int, int, list[Case]], policy: str) -> None:
    check_workload(workload, policy)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3, 4]), ("priority", [3, 1, 4, 0, 2])])
def test_the_order_of_admission(policy: str, order: list[int]) -> None:
    scheduler, runner, _ = build(Limits(1, 8, 8, 32, 4, VOCAB), 16, 0, policy)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    cases = [Case([7, key + 1], params, 0, None, priority=priority) for key, priority in enumerate([5, 0, 5, -2, 0])]
    ended: list[int] = []
    retire = scheduler.retire

    def noting(step: Step, tokens: IntArray) -> Retired:
        retired = retire(step, tokens)
        ended.extend(end.key for end in retired.finished)
        return retired

    scheduler.retire = noting  # type: ignore[method-assign]
    run(scheduler, runner, cases)
    assert ended == order


def test_the_least_urgent_gives_way() -> None:
    """Two sequences outgrow the pool: the one with the higher number is preempted, though it came first."""
    scheduler, runner, _ = build(Limits(2, 16, 16, 32, 4, VOCAB), 8, 0, "priority")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    cases = [Case([1, 2, 3], params, 0, None, priority=1), Case([4, 5, 6], params, 0, None, priority=0)]
    preempted: list[int] = []
    preempt = scheduler._preempt

    def noting(seq: Sequence) -> None:
        preempted.append(seq.key)
        preempt(seq)

    scheduler._preempt = noting  # type: ignore[method-assign]
    run(scheduler, runner, cases)
    assert set(preempted) == {0}


def test_the_stand_in_sees_a_corrupted_block() -> None:
    """The test above can fail: one changed cache entry changes what a request says."""
    limits = Limits(4, 16, 16, 32, 4, VOCAB)
    scheduler, runner, _ = build(limits, 8, 0)
    cases = [Case(list(range(1, 12)), SamplingParams(max_tokens=8, ignore_eos=True), 0, None)]
    original, calls = runner.launch, 0

    def corrupting(step: Step):
        nonlocal calls
        calls += 1
        if calls == 3:
            runner._cache[int(step.block_table[0, 1]) * 4] += np.uint64(1)
        return original(step)

    runner.launch = corrupting  # type: ignore[method-assign]
    run(scheduler, runner, cases)
    with pytest.raises(AssertionError):
        check_outputs(limits, cases)


def test_duplicates_in_flight_wait_for_the_first_and_share_its_blocks() -> None:
    limits = Limits(8, 8, 8, 64, 4, VOCAB)
    scheduler, runner, _ = build(limits, 64, 0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    cases = [Case(list(range(1, 34)), params, 0, None) for _ in range(6)]
    run(scheduler, runner, cases)
    check_outputs(limits, cases)
    # Eight full blocks are computed once; each of the other five computes its last prompt token, not 33.
    assert scheduler.counters.computed_tokens == 33 + 5 * 1 + 6 * 3
    assert scheduler.counters.prefix_hit_tokens == 5 * 32


def test_another_salt_shares_nothing() -> None:
    limits = Limits(8, 64, 64, 64, 4, VOCAB)
    scheduler, runner, _ = build(limits, 64, 0)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    cases = [Case(list(range(1, 34)), params, i, None, salt) for i, salt in enumerate(["a", "b", "a"])]
    run(scheduler, runner, cases)
    assert scheduler.counters.prefix_hit_tokens == 32


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    limits = Limits(4, 8, 4, 256, 4, VOCAB)
    scheduler, runner, _ = build(limits, 256, 0)
    scheduler.add(0, np.arange(1, 4, dtype=np.int32), SamplingParams(max_tokens=50, ignore_eos=True))
    step = scheduler.plan()
    assert step is not None
    scheduler.retire(step, runner.launch(step).result().tokens)
    scheduler.add(1, np.ones(200, np.int32), SamplingParams(max_tokens=1))
    for _ in range(20):
        step = scheduler.plan()
        assert step is not None
        assert step.num_decodes == 1, "the running sequence must get a token in every step"
        assert step.counts.tolist() == [1, 4], "the prompt takes no more than its chunk"
        scheduler.retire(step, runner.launch(step).result().tokens)


def test_a_request_that_can_never_fit_is_refused_and_others_are_untouched() -> None:
    scheduler, runner, _ = build(Limits(2, 8, 8, 16, 4, VOCAB), 4, 0)
    good = Case([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), 0, None)
    scheduler.add(0, np.array(good.prompt, np.int32), good.params)
    bad: list[tuple[list[int], SamplingParams]] = [
        ([], SamplingParams()),
        ([1] * 16, SamplingParams(max_tokens=1)),
        ([1] * 12, SamplingParams(max_tokens=5)),
        ([VOCAB], SamplingParams()),
        ([-1], SamplingParams()),
        ([1], SamplingParams(max_tokens=1, stop_token_ids=(VOCAB,))),
    ]
    for prompt, params in bad:
        with pytest.raises(InvalidRequestError):
            scheduler.add(1, np.array(prompt, np.int32), params)
    with pytest.raises(InvalidRequestError, match="already running"):
        scheduler.add(0, np.array([1], np.int32), SamplingParams())
    while scheduler.has_work:
        step = scheduler.plan()
        assert step is not None
        retired = scheduler.retire(step, runner.launch(step).result().tokens)
        good.output += retired.tokens.tolist()
    assert good.output == expected_output(good.prompt, good.params, 8)[0]
    scheduler.check_idle()
