"""BlockPool: physical KV blocks, their reference counts, and the index of those whose content can be shared.

A block is in one of three states:

- *blank*: nobody refers to it and its content means nothing;
- *used*: at least one sequence refers to it; it may be published (in the index) or not yet;
- *cached*: nobody refers to it, but it is published, so a later prefix can still take it. Evicted oldest first.

Blank and cached blocks are both available; blank ones are taken first. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from nanoengine.cache.events import PrefixLog


class BlockPool:
    """``num_blocks`` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, log: PrefixLog | None = None) -> None:
        """``log`` is told what leaves the index; of what enters it, by whoever publishes, who knows the tokens."""
        self.num_blocks = num_blocks
        self.log = log
        self.evictions = 0
        self._refs = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give."""
        return len(self._blank) + len(self._cached)

    @property
    def filled(self) -> int:
        """Blocks that are not blank: what is written beyond the blank ones evicts something."""
        return self.num_blocks - len(self._blank)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest published prefix of this chain of keys. Changes nothing."""
        blocks = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody refers to: what ``acquire`` would take away from ``available``."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these published or used blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with one reference each, evicting cached ones if need be; ``available`` permitting."""
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                key = self._key[block]
                assert key is not None
                del self._index[key]
                self._key[block] = None
                self.evictions += 1
                if self.log is not None:
                    self.log.evicted(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> int:
        """Put a used, fully computed block into the index; returns the block that the caller must use from now on.

        When another block already holds the same content, that one is returned with a reference for the caller, who
        rewrites its table and releases ``block``. Keeping both would leave one unreachable once it is free.
        """
        canonical = self._index.setdefault(key, block)
        if canonical == block:
            self._key[block] = key
        else:
            self.acquire((canonical,))
        return canonical

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block. A chain's end is evicted before its start: it is useless without."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def clear(self) -> None:
        """Forget all cached content, for example after a change of weights. Used blocks stay, unpublished."""
        self._blank.extend(self._cached)
        self._cached.clear()
        for block in self._index.values():
            self._key[block] = None
        self._index.clear()
        if self.log is not None:
            self.log.cleared()

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the block lists of all who hold references. For tests and the idle checker."""
        refs = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the owners' tables"
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & cached, "a block is both blank and cached"
        assert blank | cached == {b for b, r in enumerate(refs) if r == 0}, (
            "available blocks are not those without owner"
        )
        assert {k: b for b, k in enumerate(self._key) if k is not None} == self._index, "index and keys differ"
        assert not any(self._key[b] for b in blank), "a blank block is published"
        assert all(self._key[b] for b in cached), "a cached block is not published"
