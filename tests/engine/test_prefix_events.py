"""The router's prefix hash, and the events of it against the engine's own index."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoengine.async_engine import AsyncEngine
from nanoengine.cache.blocks import BlockPool
from nanoengine.cache.events import HeldPrefixes, PrefixEvents, PrefixLog
from nanoengine.cache.prefix import block_keys, root_key
from nanoengine.cache.prefix_hash import ROUTER_BLOCK, PrefixChain, prefix_hashes, prefix_root
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.runner.synthetic import SyntheticRunner
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.policies import Fcfs
from nanoengine.scheduling.scheduler import Limits, Scheduler

VOCAB = 50
TOKENS = np.random.default_rng(0).integers(0, 50_000, 5000).astype(np.int32)
ROOT = prefix_root("model")


def test_a_hash_stands_for_the_whole_prefix() -> None:
    hashes = prefix_hashes(ROOT, TOKENS)
    assert len(hashes) == len(TOKENS) // ROUTER_BLOCK == len(set(hashes.tolist()))
    assert (prefix_hashes(ROOT, TOKENS[:200]) == hashes[:3]).all()
    for place in (0, 63, 64, 700):
        changed = TOKENS.copy()
        changed[place] += 1
        same = prefix_hashes(ROOT, changed) == hashes
        assert same.tolist() == [j < place // ROUTER_BLOCK for j in range(len(hashes))]


def test_order_of_tokens_and_blocks_counts() -> None:
    a, b = TOKENS[:64], TOKENS[64:128]
    assert prefix_hashes(ROOT, np.concatenate((a, b)))[1] != prefix_hashes(ROOT, np.concatenate((b, a)))[1]
    assert prefix_hashes(ROOT, a)[0] != prefix_hashes(ROOT, a[::-1].copy())[0]
    zeros = prefix_hashes(ROOT, np.zeros(640, np.int32))
    assert len(set(zeros.tolist())) == 10


@pytest.mark.parametrize("other", [("b", "", ""), ("model", "adapter", ""), ("model", "", "salt"), ("", "model", "")])
def test_model_adapter_and_salt_separate_prefixes(other: tuple[str, str, str]) -> None:
    assert not set(prefix_hashes(prefix_root(*other), TOKENS).tolist()) & set(prefix_hashes(ROOT, TOKENS).tolist())


@given(st.lists(st.integers(0, 4), max_size=8))
def test_a_chain_can_be_extended_at_any_block(pieces: list[int]) -> None:
    chain, parts, at = PrefixChain(ROOT), [], 0
    for blocks in pieces:
        parts.append(chain.extend(TOKENS[at : at + blocks * ROUTER_BLOCK]))
        at += blocks * ROUTER_BLOCK
    whole = prefix_hashes(ROOT, TOKENS[:at])
    assert np.concatenate([*parts, np.empty(0, np.uint64)]).tolist() == whole.tolist()


def test_positions_beyond_the_table_go_on_as_within() -> None:
    tokens = np.zeros(64 * 1500, np.int32)
    chain = PrefixChain(ROOT)
    parts = [chain.extend(tokens[: 64 * 1000]), chain.extend(tokens[64 * 1000 :])]
    assert np.concatenate(parts).tolist() == prefix_hashes(ROOT, tokens).tolist()


# -- events --------------------------------------------------------------------------------------------------------


class Run:
    """A scheduler with a log, and a listener that adds up its events."""

    def __init__(self, block_size: int, num_blocks: int, depth: int = 0) -> None:
        self.limits = Limits(4, 256, 256, min(700, num_blocks * block_size), block_size, VOCAB)
        self.log = PrefixLog(block_size)
        self.pool = BlockPool(num_blocks, self.log)
        self.scheduler = Scheduler(self.limits, self.pool, Fcfs(), model="tiny", eos_token_ids=())
        self.runner = SyntheticRunner(num_slots=4, num_blocks=num_blocks, block_size=block_size, num_tokens=VOCAB)
        self.in_flight: deque = deque()
        self.depth = depth
        self.held = HeldPrefixes()
        self.seen: dict[int, tuple[str, list[int]]] = {}  # salt and tokens of each request
        self.batches: list[PrefixEvents] = []

    def add(self, key: int, prompt: list[int], max_tokens: int, salt: str = "") -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(key, np.array(prompt, np.int32), params, cache_salt=salt)
        self.seen[key] = (salt, list(prompt))

    def step(self) -> None:
        step = self.scheduler.plan()
        if step is not None:
            self.in_flight.append((step, self.runner.launch(step).result().tokens % VOCAB))
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            retired = self.scheduler.retire(*self.in_flight.popleft())
            for key, token in zip(retired.keys.tolist(), retired.tokens.tolist(), strict=True):
                self.seen[key][1].append(token)
        self.take()

    def take(self) -> None:
        if (events := self.log.take()) is not None:
            assert not set(events.stored_hashes().tolist()) & set(events.removed_hashes().tolist())
            self.batches.append(events)
            self.held.apply(events)

    def real(self) -> set[int]:
        """Hashes of all prefixes that some request had and that the engine's index could give to the next one."""
        size, held = self.limits.block_size, set()
        for salt, tokens in self.seen.values():
            ids = np.array(tokens, np.int32)
            hits = len(self.pool.match(block_keys(root_key("tiny", salt=salt), ids, size)))
            held |= set(prefix_hashes(prefix_root("tiny", salt=salt), ids[: hits * size]).tolist())
        return held


@st.composite
def work(draw: st.DrawFn) -> tuple[int, int, int, list[tuple]]:
    block_size = draw(st.sampled_from([1, 8, 16, 16, 48, 64, 128]))
    num_blocks = draw(st.integers(2 + 400 // block_size, 2 + 1600 // block_size))
    stems = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    action = st.one_of(
        st.tuples(st.just("add"), st.sampled_from(stems), st.integers(1, 380), st.integers(1, 90), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 60)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("reset")),
    )
    return block_size, num_blocks, draw(st.sampled_from([0, 1])), draw(st.lists(action, min_size=3, max_size=25))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(work())
def test_events_add_up_to_the_pools_index(case: tuple[int, int, int, list[tuple]]) -> None:
    block_size, num_blocks, depth, actions = case
    run = Run(block_size, num_blocks, depth)
    reset_amid = False
    for number, action in enumerate([*actions, ("step", 2000)]):
        match action:
            case ("add", stem, length, max_tokens, salted):
                length = min(length, run.limits.max_model_len - 1)
                prompt = np.random.default_rng(stem).integers(0, VOCAB, length).tolist()
                run.add(number, prompt, min(max_tokens, run.limits.max_model_len - length), "salt" if salted else "")
            case ("step", count):
                for _ in range(count):
                    if not run.scheduler.has_work and not run.in_flight:
                        break
                    run.step()
            case ("abort", key):
                run.scheduler.abort(key)
            case ("reset",):
                reset_amid |= run.scheduler.has_work
                run.pool.clear()
        run.take()
        held = set(run.held.snapshot().stored_hashes().tolist())
        if reset_amid:
            # What runs across a reset is not logged, though a part of it may be found again later.
            assert held <= run.real()
        else:
            assert held == run.real()
    event(f"removed: {any(batch.removed for batch in run.batches)}")
    event(f"reset amid: {reset_amid}")
    assert [batch.seq for batch in run.batches] == list(range(1, len(run.batches) + 1))


def test_answers_are_told_too() -> None:
    run = Run(16, 60)
    run.add(0, list(range(40)), 200)
    while run.scheduler.has_work:
        run.step()
    tokens = np.array(run.seen[0][1], np.int32)
    assert len(run.held) == 239 // ROUTER_BLOCK, "the last token's KV was never computed"
    assert set(prefix_hashes(prefix_root("tiny"), tokens)[:3].tolist()) == run.real()


def test_changes_that_cancel_out_within_a_step_are_not_told() -> None:
    log = PrefixLog(64)
    log.published([7], 0, 1, TOKENS, PrefixChain(ROOT))
    log.evicted(7)
    assert log.take() is None
    log.published([7], 0, 1, TOKENS, PrefixChain(ROOT))
    assert log.take() is not None
    log.evicted(7)
    log.published([3], 0, 1, TOKENS, PrefixChain(ROOT))
    assert log.take() is None


def test_a_snapshot_makes_up_for_any_gap() -> None:
    run = Run(16, 40)
    late = HeldPrefixes()
    for key in range(12):
        run.add(key, np.random.default_rng(key).integers(0, VOCAB, 200).tolist(), 20)
        while run.scheduler.has_work:
            run.step()
    for batch in run.batches[::3]:  # what it knows is wrong: it got one in three
        late.apply(batch)
    assert set(late.snapshot().stored_hashes().tolist()) != run.real()
    late.apply(run.held.snapshot())
    assert set(late.snapshot().stored_hashes().tolist()) == run.real()


def test_changes_are_the_events_put_together() -> None:
    run = Run(16, 40)
    listener = HeldPrefixes()
    for key in range(12):
        run.add(key, np.random.default_rng(key).integers(0, VOCAB, 200).tolist(), 20)
        while run.scheduler.has_work:
            run.step()
        if key % 3 == 2:
            if key == 5:
                run.pool.clear()
                run.take()
            changes = run.held.changes()
            assert changes is not None
            assert changes.cleared == (key == 5)
            listener.apply(changes)
            assert set(listener.snapshot().stored_hashes().tolist()) == run.real()
    assert run.held.seq == 4 < len(run.batches)
    assert run.held.changes() is None


def test_engine_tells_only_who_asked() -> None:
    config = EngineConfig(model="synthetic", num_blocks=64, synthetic={"step_seconds": 0.0})
    for asked in (False, True):
        engine = Engine(config, log_prefixes=asked)
        engine.add(0, TOKENS[:200] % 90, SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        events = engine.prefix_events()
        assert (events is not None) == asked
        if events is not None:
            expected = prefix_hashes(prefix_root("synthetic"), TOKENS[:200] % 90)
            assert set(events.stored_hashes().tolist()) == set(expected.tolist())
            engine.reset_prefix_cache()
            assert engine.prefix_events() == PrefixEvents(2, True, b"", b"")


async def test_async_engine_passes_events_on() -> None:
    config = EngineConfig(model="synthetic", num_blocks=64, synthetic={"step_seconds": 0.0})
    held = HeldPrefixes()
    engine = AsyncEngine(config, held.apply)
    await engine.start()
    try:
        prompt = TOKENS[:200] % 90
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1)):
            pass
        assert set(held.snapshot().stored_hashes().tolist()) == set(
            prefix_hashes(prefix_root("synthetic"), prompt).tolist()
        )
    finally:
        await engine.stop()
