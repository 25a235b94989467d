"""PrefixIndex against sets of hashes, whatever happens to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.index import PrefixIndex
from nanoengine.cache.prefix_hash import prefix_hashes, prefix_root

HASHES = np.random.default_rng(0).integers(1, 2**63, 400).astype(np.uint64) * np.uint64(2) + np.uint64(1)


def index(slots: int = 4, places: int = 64) -> PrefixIndex:
    made = PrefixIndex(places)
    made.widen(slots)
    return made


def test_longest_leading_match_of_each_replica() -> None:
    i = index()
    i.store(0, HASHES[:10])
    i.store(1, HASHES[:3])
    i.store(2, np.delete(HASHES[:10], 4))  # a gap ends the match, whatever lies behind it
    assert i.match(HASHES[:12]).tolist() == [10, 3, 4, 0]
    assert i.match(HASHES[:0]).tolist() == [0, 0, 0, 0]
    assert i.match(HASHES[20:30]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("length", [63, 64, 65, 319, 320, 321, 400])
def test_long_prompts_are_walked_to_their_end(length: int) -> None:
    i = index()
    i.store(3, HASHES)
    i.store(1, HASHES[: length - 1])
    assert i.match(HASHES[:length]).tolist() == [0, length - 1, 0, length]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 69), st.integers(0, 390), st.integers(1, 60)),
        st.tuples(st.just("remove"), st.integers(0, 69), st.integers(0, 390), st.integers(1, 60)),
        st.tuples(st.just("clear"), st.integers(0, 69)),
        st.tuples(st.just("drop"), st.integers(0, 69)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations, st.integers(0, 390))
def test_is_what_sets_would_be(steps: list[tuple[Any, ...]], start: int) -> None:
    """Seventy replicas, so that holders take two words of bits; a table of 64 places, so that it has to grow."""
    i, truth = index(70), [set[int]() for _ in range(70)]
    for step in steps:
        match step:
            case ("store", slot, first, count):
                i.store(slot, HASHES[first : first + count])
                truth[slot] |= set(HASHES[first : first + count].tolist())
            case ("remove", slot, first, count):
                i.remove(slot, HASHES[first : first + count])
                truth[slot] -= set(HASHES[first : first + count].tolist())
            case ("clear", slot):
                i.clear(slot)
                truth[slot] = set()
            case ("drop", slot):
                i.drop(slot)
                while i.sweep(3) != [slot]:
                    pass
                truth[slot] = set()
    assert i.left_out == 0
    assert i.held.tolist() == [len(held) for held in truth]
    assert len(i) == len(set().union(*truth))
    prompt = HASHES[start:]
    expected = [next((n for n, h in enumerate(prompt.tolist()) if h not in held), len(prompt)) for held in truth]
    assert i.match(prompt).tolist() == expected


def test_expectations_count_until_they_expire() -> None:
    i = index()
    i.store(0, HASHES[:2])
    i.expect(0, HASHES[2:5], 10.0)
    i.expect(1, HASHES[:5], 11.0)
    assert i.match(HASHES[:6]).tolist() == [5, 5, 0, 0]
    i.expire(10.5)
    assert i.match(HASHES[:6]).tolist() == [2, 5, 0, 0]
    i.expire(11.5)
    assert i.match(HASHES[:6]).tolist() == [2, 0, 0, 0]
    assert not i._expected


def test_an_expectation_that_is_renewed_stays() -> None:
    i = index()
    i.expect(0, HASHES[:3], 10.0)
    i.expect(0, HASHES[:3], 12.0)
    i.expire(11.0)
    assert i.match(HASHES[:3])[0] == 3
    i.expire(13.0)
    assert i.match(HASHES[:3])[0] == 0


def test_many_unique_prompts_do_not_grow_it() -> None:
    i, rng = index(2, 1 << 13), np.random.default_rng(1)
    for _ in range(3000):
        hashes = rng.integers(1, 2**63, 64).astype(np.uint64)
        i.store(0, hashes)
        i.expect(1, hashes, 0.0)
        i.expire(1.0)
        i.remove(0, hashes)
    assert i.nbytes < 200_000
    assert len(i) == 0
    assert not i._expected


def test_a_full_table_leaves_out_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.index.MAX_FILL", 10.0)
    i = index(1, 64)
    i.store(0, HASHES)
    assert i.left_out > 300
    assert i.held[0] + i.left_out == 400
    i.remove(0, HASHES)
    assert len(i) == i.held[0] == 0


def test_hashes_of_prompts_spread_over_the_table() -> None:
    i = index(1, 1 << 13)
    tokens = np.arange(64 * 6500, dtype=np.int32) % 50_000
    i.store(0, prefix_hashes(prefix_root("m"), tokens))
    assert i.left_out == 0
    assert len(i) == 6500
    assert i.nbytes < 110_000, "it did not have to grow at a fill of 0.79"
