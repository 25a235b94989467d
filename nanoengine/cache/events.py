"""What routers are told of an engine's prefix cache: which prefix hashes it holds, step by step.

The engine caches blocks of its own size under keys of its own; routers know prefixes of 64 tokens by
``nanoengine.cache.prefix_hash``. ``PrefixLog``, in the engine, follows the one and speaks the other: a hash is *held*
while the engine's block in which its 64 tokens end is in the index. That one block is enough: a block's predecessors
are in the index as long as it is, for whoever refers to a block refers to all before it and gives them up after it.

Changes go out once a step as ``PrefixEvents``, numbered. ``HeldPrefixes``, at the engine's owner, adds them up, so that
a listener who has missed one gets all that is held now, without asking the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from nanoengine.cache.prefix_hash import ROUTER_BLOCK, HashArray, PrefixChain
from nanoengine.scheduling.step import IntArray


class PrefixEvents(msgspec.Struct, frozen=True, array_like=True):
    """Changes since the events before. No hash is both stored and removed; ``cleared`` came before either."""

    seq: int  # counts up by one, from 1
    cleared: bool  # all held before is gone: the cache was reset, or this is a snapshot
    stored: bytes  # uint64 hashes
    removed: bytes

    def stored_hashes(self) -> HashArray:
        return np.frombuffer(self.stored, np.uint64)

    def removed_hashes(self) -> HashArray:
        return np.frombuffer(self.removed, np.uint64)


class _Changes:
    """What was stored and removed since they were last taken: of a hash that was both, nothing."""

    def __init__(self) -> None:
        self.seq = 0  # how often they were taken
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._cleared = False

    def store(self, hashes: set[int]) -> None:
        """These are held now, and were not before."""
        self._stored |= hashes - self._removed
        self._removed -= hashes

    def remove(self, hashes: set[int]) -> None:
        """These were held, and are not any more."""
        self._removed |= hashes - self._stored
        self._stored -= hashes

    def clear(self) -> None:
        """Nothing is held now."""
        self._stored, self._removed, self._cleared = set(), set(), True

    def take(self) -> PrefixEvents | None:
        """All of them as the next events; None if there are none."""
        if not (self._stored or self._removed or self._cleared):
            return None
        self.seq += 1
        events = PrefixEvents(self.seq, self._cleared, _bytes(self._stored), _bytes(self._removed))
        self._stored, self._removed, self._cleared = set(), set(), False
        return events


class PrefixLog:
    """The engine's side. The scheduler says what it publishes, the pool what it evicts; once a step somebody takes."""

    def __init__(self, block_size: int) -> None:
        self.generation = 0  # of the cache: how often it was cleared
        self._block_size = block_size
        self._in_block: dict[int, list[int]] = {}  # hashes that end in each published block
        self._held: Counter[int] = Counter()  # blocks that a hash ends in: two may, unless 64 is a multiple of one
        self._changes = _Changes()

    def published(self, blocks: list[int], first: int, last: int, tokens: IntArray, chain: PrefixChain) -> None:
        """A sequence's blocks ``first`` to ``last`` (its own numbering, ``last`` excluded) are in the index now.

        ``blocks`` is its block table, ``tokens`` int32 its tokens from the start, ``chain`` what was hashed of them.
        """
        size = self._block_size
        begin, full = chain.blocks, last * size // ROUTER_BLOCK
        if full <= begin:
            return
        hashes = chain.extend(tokens[begin * ROUTER_BLOCK : full * ROUTER_BLOCK]).tolist()
        for j, hash in enumerate(hashes, begin):
            block = ((j + 1) * ROUTER_BLOCK - 1) // size
            if block < first:
                continue  # was found in the index, and is known since it came there
            inside = self._in_block.setdefault(blocks[block], [])
            if hash in inside:
                continue  # another sequence published the same block
            inside.append(hash)
            self._held[hash] += 1
            if self._held[hash] == 1:
                self._changes.store({hash})

    def evicted(self, block: int) -> None:
        """This block has left the index."""
        for hash in self._in_block.pop(block, ()):
            self._held[hash] -= 1
            if not self._held[hash]:
                del self._held[hash]
                self._changes.remove({hash})

    def cleared(self) -> None:
        """The index is empty. What sequences compute that run now is not logged: its beginning is not in the index."""
        self.generation += 1
        self._in_block.clear()
        self._held.clear()
        self._changes.clear()

    def take(self) -> PrefixEvents | None:
        """All changes since the last call; None if there were none."""
        return self._changes.take()


class HeldPrefixes:
    """All that an engine holds, from its events; and those again, fewer and larger, for who listens from afar."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._changes = _Changes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def seq(self) -> int:
        """Of the last ``changes``."""
        return self._changes.seq

    def apply(self, events: PrefixEvents) -> None:
        """The engine's next events, in order."""
        if events.cleared:
            self._held.clear()
            self._changes.clear()
        stored, removed = set(events.stored_hashes().tolist()), set(events.removed_hashes().tolist())
        self._held |= stored
        self._held -= removed
        self._changes.store(stored)
        self._changes.remove(removed)

    def changes(self) -> PrefixEvents | None:
        """All that was applied since the last call, as one; None if nothing is left of it."""
        return self._changes.take()

    def snapshot(self) -> PrefixEvents:
        """Events that bring any listener, whatever it knew, to what is held now. ``changes`` go on from there: they may
        tell again what the snapshot told."""
        return PrefixEvents(self.seq, True, _bytes(self._held), b"")


def _bytes(hashes: Iterable[int]) -> bytes:
    return np.fromiter(hashes, np.uint64).tobytes()
