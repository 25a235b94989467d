"""BlockPool and prefix keys, one rule at a time; the property tests drive them together."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.cache.blocks import BlockPool
from nanoengine.cache.prefix import block_keys, root_key


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def published(pool: BlockPool, *keys: bytes) -> list[int]:
    """Blocks allocated and published under these keys."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.publish(block, key) == block
    return blocks


def test_a_key_stands_for_the_whole_prefix() -> None:
    root = root_key("model")
    first, second = block_keys(root, ids(1, 2, 3, 4, 5), 2)
    assert [first] == block_keys(root, ids(1, 2), 2)
    assert [second] == block_keys(first, ids(3, 4), 2)
    assert block_keys(root, ids(1, 9, 3, 4), 2)[1] != second
    assert block_keys(root, ids(3, 4), 2) != [second]
    assert block_keys(root, ids(1), 2) == []


@pytest.mark.parametrize("other", [("b", "", ""), ("a", "adapter", ""), ("a", "", "salt"), ("", "a", "")])
def test_model_adapter_and_salt_separate_prefixes(other: tuple[str, str, str]) -> None:
    assert root_key("a") != root_key(*other)


def test_parts_of_the_root_are_framed() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    a, _, c = published(pool, b"a", b"b", b"c")
    assert pool.match([b"a", b"x", b"c"]) == [a]
    assert pool.match([b"c"]) == [c]
    assert pool.match([b"x"]) == []


def test_released_blocks_stay_cached_and_can_be_taken_again() -> None:
    pool = BlockPool(4)
    blocks = published(pool, b"a", b"b")
    pool.release(blocks)
    assert (pool.available, pool.used) == (4, 0)
    assert pool.idle(blocks) == 2
    pool.acquire(blocks)
    assert (pool.available, pool.idle(blocks)) == (2, 0)
    pool.check([blocks])


def test_blank_blocks_go_first_then_the_least_recently_used_tail() -> None:
    pool = BlockPool(5)
    old, new = published(pool, b"a1", b"a2"), published(pool, b"b1", b"b2")
    pool.release(old)
    pool.release(new)
    blank, first, second = pool.allocate(3)
    assert blank not in old + new
    assert [first, second] == [old[1], old[0]], "the end of the oldest chain goes first"
    assert pool.match([b"a1"]) == []
    assert pool.match([b"b1", b"b2"]) == new
    assert pool.evictions == 2
    pool.check([[blank, first, second]])


def test_taking_a_block_again_makes_it_recent() -> None:
    pool = BlockPool(2)
    (a,), (b,) = published(pool, b"a"), published(pool, b"b")
    pool.release([a])
    pool.release([b])
    pool.acquire([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_a_duplicate_gives_the_block_that_is_there() -> None:
    pool = BlockPool(3)
    (first,) = published(pool, b"k")
    (second,) = pool.allocate(1)
    assert pool.publish(second, b"k") == first
    pool.release([second])
    pool.check([[first], [first]])
    pool.release([first])
    pool.release([first])
    pool.check([])


def test_clear_forgets_content_but_keeps_used_blocks() -> None:
    pool = BlockPool(3)
    kept, dropped = published(pool, b"a"), published(pool, b"b")
    pool.release(dropped)
    pool.clear()
    assert pool.match([b"a"]) == pool.match([b"b"]) == []
    pool.check([kept])
    pool.release(kept)
    pool.check([])
    assert pool.available == 3


def test_the_checker_sees_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
