"""PrefixIndex against sets of hashes, whatever happens to it."""

from __future__ import annotations

from collections import Counter, deque
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
    i.store(2, np.delete(HASHES, 4))
    assert i.match(HASHES[:length]).tolist() == [0, length - 1, 4, length]


def test_who_joins_changes_nothing_for_the_others() -> None:
    """More than 64 replicas take a second word of bits."""
    i = index(3)
    i.store(0, HASHES[:20])
    i.store(1, HASHES[:10])
    i.expect(2, HASHES[:5], 10.0)
    i.widen(70)
    assert i.match(HASHES[:30]).tolist() == [20, 10, 5, *[0] * 67]
    i.store(69, HASHES[:15])
    i.expect(69, HASHES[15:18], 11.0)
    i.remove(0, HASHES[12:14])
    assert i.match(HASHES[:30]).tolist() == [12, 10, 5, *[0] * 66, 18]


slots = st.sampled_from([0, 1, 63, 64, 69])  # few, so that several hold the same
ranges = (st.integers(0, 390), st.integers(1, 60))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), slots, *ranges),
        st.tuples(st.just("remove"), slots, *ranges),
        st.tuples(st.just("clear"), slots),
        st.tuples(st.just("drop"), slots),
        st.tuples(st.just("expect"), slots, *ranges),
        st.tuples(st.just("expire"), st.integers(1, 20)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations, st.integers(0, 390))
def test_is_what_sets_would_be(steps: list[tuple[Any, ...]], start: int) -> None:
    """Up to seventy replicas, which join when they are first heard of, so that sets of them come to take a second word
    of bits; a table of 64 places, so that it has to grow."""
    i, told, soon = index(1), [set[int]() for _ in range(70)], deque[tuple[int, int, set[int]]]()
    for now, step in enumerate(steps):
        if step[0] != "expire":
            i.widen(step[1] + 1)
        match step:
            case ("store", slot, first, count):
                i.store(slot, HASHES[first : first + count])
                told[slot] |= set(HASHES[first : first + count].tolist())
            case ("remove", slot, first, count):
                i.remove(slot, HASHES[first : first + count])
                told[slot] -= set(HASHES[first : first + count].tolist())
            case ("clear", slot):
                i.clear(slot)
                told[slot] = set()
            case ("drop", slot):
                i.drop(slot)
                while i.sweep(3) != [slot]:
                    pass
                told[slot] = set()
            case ("expect", slot, first, count):
                i.expect(slot, HASHES[first : first + count], now)
                soon.append((now, slot, set(HASHES[first : first + count].tolist())))
            case ("expire", age):
                i.expire(now - age)
                while soon and soon[0][0] <= now - age:
                    soon.popleft()
    count = len(i.held)
    assert i.left_out == 0
    assert i.held.tolist() == [len(held) for held in told[:count]]
    assert len(i) == len(set().union(*told))
    shared = sum(n > 1 for n in Counter(hash for held in told for hash in held).values())
    assert len(i._rows.bits) - i._rows.singles - len(i._rows._free) == shared
    holds = [held.union(*(hashes for _, other, hashes in soon if other == slot)) for slot, held in enumerate(told)]
    prompt = HASHES[start:]
    expected = [next((n for n, h in enumerate(prompt.tolist()) if h not in held), len(prompt)) for held in holds]
    assert i.match(prompt).tolist() == expected[:count]
    i.expire(len(steps))
    assert not i._expected
    assert not i._again


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
