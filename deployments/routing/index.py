"""PrefixIndex: which replica holds which prefixes, for all replicas in one walk. Numpy arrays, one thread, no clock.

Two parts. What engines *told*: a hash table of two arrays, since a fleet's caches are millions of blocks, and a dict of
them would take 200 bytes each where this takes 20. And what a router *expects*: the blocks of prompts that it sent out
and of which nobody has told it yet; they are few, and expire.

The table has buckets of eight places, and a hash may lie in either of two buckets, the emptier one when it came: no
chains, so removal leaves no trace, and all of a prompt's blocks are looked up in one numpy expression. Where both are
full, one of those in them moves to its other bucket (cuckoo hashing, of one move); where none can, the new one is left
out, which costs a shorter match. A place holds a hash and its holder: a replica's slot, or the number of a row of
bits where there are several.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.cache.prefix_hash import HashArray

PLACES = 8  # of a bucket
MAX_FILL = 0.8  # of all places, beyond which the table grows
_SHARED = np.uint32(1 << 31)  # set in a holder that is the number of a row
_ONE = np.uint64(1)
_SECOND = np.uint64(0xD6E8FEB86659FD93)  # odd: spreads a hash again, for its second bucket

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class _Expected:
    """Blocks of one prompt that a replica will soon hold."""

    deadline: float
    slot: int
    hashes: list[int]
    alone: list[_Expected]  # itself: of most hashes it is all there is, and then one list serves them all


class _Rows:
    """Sets of slots as rows of bits, for hashes that several replicas hold."""

    def __init__(self) -> None:
        self.bits = np.zeros((64, 1), np.uint64)
        self._free = list(range(63, -1, -1))

    def widen(self, slots: int) -> None:
        if slots > 64 * self.bits.shape[1]:
            more = np.zeros((len(self.bits), -(-slots // 64) - self.bits.shape[1]), np.uint64)
            self.bits = np.hstack((self.bits, more))

    def take(self, count: int) -> Places:
        """Numbers of that many rows of zeros."""
        while len(self._free) < count:
            size = len(self.bits)
            self.bits = np.vstack((self.bits, np.zeros_like(self.bits)))
            self._free = [*range(2 * size - 1, size - 1, -1), *self._free]
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.intp)

    def give_back(self, rows: Places) -> None:
        self.bits[rows] = 0
        self._free.extend(rows.tolist())


class PrefixIndex:
    """Replicas are slots, small numbers that the caller gives out; a slot is free again once ``sweep`` says so."""

    def __init__(self, places: int = 1 << 13) -> None:
        """Room for that many hashes at first, a power of two."""
        self.held: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # told blocks of each slot
        self.left_out = 0  # told blocks that found no place, ever
        self._rows = _Rows()
        self._allocate(places // PLACES)
        self._sweeping: dict[int, int] = {}  # slot that was dropped -> buckets swept of it so far
        self._expected: dict[int, list[_Expected]] = {}  # by hash
        self._deadlines: deque[_Expected] = deque()

    def _allocate(self, buckets: int) -> None:
        self._buckets = buckets
        self._shift = np.uint64(64 - (buckets - 1).bit_length()) if buckets > 1 else np.uint64(63)
        self._mask = np.uint64(buckets - 1)
        self._hash = np.zeros(buckets * PLACES, np.uint64)  # 0: the place is empty
        self._holder = np.zeros(buckets * PLACES, np.uint32)
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its rows; what is expected comes on top, some 200 bytes a block."""
        return self._hash.nbytes + self._holder.nbytes + self._rows.bits.nbytes

    def __len__(self) -> int:
        return self._count

    # -- places --------------------------------------------------------------------------------------------------

    def _two_buckets(self, hashes: HashArray) -> Places:
        """The buckets where each hash may lie, [n, 2]."""
        buckets = np.empty((len(hashes), 2), np.intp)
        buckets[:, 0] = (hashes >> self._shift) & self._mask
        buckets[:, 1] = ((hashes * _SECOND) >> self._shift) & self._mask
        return buckets

    def _contents(self, buckets: Places) -> HashArray:
        """What lies in each hash's two buckets, uint64 [n, 16]."""
        return self._hash.reshape(-1, PLACES).take(buckets, axis=0).reshape(len(buckets), 2 * PLACES)

    def _find(self, hashes: HashArray) -> tuple[npt.NDArray[np.bool_], Places]:
        """Whether each hash is there, and where: bool [n], intp [n]."""
        buckets = self._two_buckets(hashes)
        equal = self._contents(buckets) == hashes[:, None]
        which = equal.argmax(axis=1)
        rows = np.arange(len(hashes))
        return equal[rows, which], buckets[rows, which // PLACES] * PLACES + which % PLACES

    def _insert(self, hashes: HashArray, holders: npt.NDArray[np.uint32]) -> int:
        """Put distinct hashes that are not there into empty places; returns how many found one."""
        done = 0
        while len(hashes):
            buckets = self._two_buckets(hashes)
            empty = self._contents(buckets) == 0
            room = empty.reshape(-1, 2, PLACES).sum(axis=2)
            full = room.max(axis=1) == 0
            if full.any():
                for i in np.flatnonzero(full).tolist():
                    if (place := self._make_room(buckets[i])) is None:
                        self.left_out += 1
                    else:
                        self._hash[place], self._holder[place] = hashes[i], holders[i]
                        done += 1
                hashes, holders = hashes[~full], holders[~full]
                continue
            # The emptier bucket's first empty place. Of several hashes that want the same place one gets it.
            rows, second = np.arange(len(hashes)), (room[:, 1] > room[:, 0]).astype(np.intp)
            first_empty = empty.reshape(-1, 2, PLACES)[rows, second].argmax(axis=1)
            wanted = buckets[rows, second] * PLACES + first_empty
            self._hash[wanted] = hashes
            won = self._hash[wanted] == hashes
            self._holder[wanted[won]] = holders[won]
            done += int(won.sum())
            hashes, holders = hashes[~won], holders[~won]
        self._count += done
        return done

    def _make_room(self, buckets: Places) -> int | None:
        """Move what lies in these two full buckets to where else it may lie; returns the place that is empty now."""
        places = (buckets[:, None] * PLACES + np.arange(PLACES)).ravel()
        others = self._two_buckets(self._hash[places])
        which, where = np.nonzero(self._contents(others) == 0)
        if not len(which):
            return None
        place, other = places[which[0]], others[which[0], where[0] // PLACES] * PLACES + where[0] % PLACES
        self._hash[other], self._holder[other] = self._hash[place], self._holder[place]
        self._hash[place] = 0
        return int(place)

    def _grow(self) -> None:
        full = np.flatnonzero(self._hash)
        hashes, holders = self._hash[full], self._holder[full]
        self._allocate(2 * self._buckets)
        for start in range(0, len(hashes), 1 << 16):  # in pieces: what the insertion needs is many times its input
            self._insert(hashes[start : start + (1 << 16)], holders[start : start + (1 << 16)])

    # -- what engines told ---------------------------------------------------------------------------------------

    def widen(self, slots: int) -> None:
        """Make room for slots 0 to ``slots - 1``."""
        if slots > len(self.held):
            self.held = np.concatenate((self.held, np.zeros(slots - len(self.held), np.int64)))
            self._rows.widen(slots)

    def store(self, slot: int, hashes: HashArray) -> None:
        """``slot`` holds these now, uint64 [n]. Telling what is known changes nothing."""
        hashes = np.unique(hashes[hashes != 0])
        for start in range(0, len(hashes), 1 << 16):
            self._store(slot, hashes[start : start + (1 << 16)])

    def _store(self, slot: int, hashes: HashArray) -> None:
        found, places = self._find(hashes)
        if found.any():
            self._share(slot, places[found])
        new = hashes[~found]
        if len(new):
            while self._count + len(new) > MAX_FILL * len(self._hash):
                self._grow()
            self.held[slot] += self._insert(new, np.full(len(new), slot, np.uint32))

    def _share(self, slot: int, places: Places) -> None:
        """Add ``slot`` to the holders of what lies in these distinct places."""
        holders = self._holder[places]
        shared = (holders & _SHARED) != 0
        bits, word, bit = self._rows.bits, slot >> 6, _ONE << np.uint64(slot & 63)
        rows = (holders[shared] & ~_SHARED).astype(np.intp)
        self.held[slot] += int(((bits[rows, word] & bit) == 0).sum())
        bits[rows, word] |= bit
        others = ~shared & (holders != slot)
        if others.any():
            rows, first = self._rows.take(int(others.sum())), holders[others].astype(np.intp)
            bits = self._rows.bits
            bits[rows, first >> 6] = _ONE << (first & 63).astype(np.uint64)
            bits[rows, word] |= bit
            self._holder[places[others]] = rows.astype(np.uint32) | _SHARED
            self.held[slot] += len(rows)

    def remove(self, slot: int, hashes: HashArray) -> None:
        """``slot`` holds these no more, uint64 [n]. Those that it was not known to hold change nothing."""
        found, places = self._find(np.unique(hashes))
        self._drop(slot, places[found & (self._hash[places] != 0)])

    def _drop(self, slot: int, places: Places) -> None:
        """Take ``slot`` out of the holders of what lies in these distinct places."""
        holders = self._holder[places]
        shared = (holders & _SHARED) != 0
        alone = places[~shared & (holders == slot)]
        self._hash[alone] = 0
        self._count -= len(alone)
        self.held[slot] -= len(alone)
        if not shared.any():
            return
        bits, word, bit = self._rows.bits, slot >> 6, _ONE << np.uint64(slot & 63)
        places, rows = places[shared], (holders[shared] & ~_SHARED).astype(np.intp)
        has = (bits[rows, word] & bit) != 0
        places, rows = places[has], rows[has]
        bits[rows, word] &= ~bit
        self.held[slot] -= len(rows)
        left = np.bitwise_count(bits[rows]).sum(axis=1) == 1
        if left.any():
            places, rows = places[left], rows[left]
            words = bits[rows]
            which = (words != 0).argmax(axis=1)
            low = words[np.arange(len(rows)), which]
            self._holder[places] = (which * 64 + np.bitwise_count(low - _ONE)).astype(np.uint32)
            self._rows.give_back(rows)

    def clear(self, slot: int) -> None:
        """``slot`` holds nothing. Costs a look at the whole table: some milliseconds for each million of places."""
        if self.held[slot]:
            for start in range(0, self._buckets, 1 << 13):
                self._sweep_buckets(slot, start, 1 << 13)

    def drop(self, slot: int) -> None:
        """The replica is gone. Matches that say otherwise are the caller's to ignore until ``sweep`` has been there."""
        self._sweeping[slot] = 0

    def sweep(self, buckets: int = 1 << 13) -> list[int]:
        """Look for slots that were dropped in so many of the buckets; returns those that are free now."""
        free = []
        for slot, start in list(self._sweeping.items()):
            if self.held[slot]:
                self._sweep_buckets(slot, start, buckets)
            self._sweeping[slot] = start + buckets
            if start + buckets >= self._buckets or not self.held[slot]:
                del self._sweeping[slot]
                free.append(slot)
        return free

    def _sweep_buckets(self, slot: int, start: int, count: int) -> None:
        places = np.arange(start * PLACES, min(start + count, self._buckets) * PLACES)
        self._drop(slot, places[self._hash[places] != 0])

    # -- what a router expects -----------------------------------------------------------------------------------

    def expect(self, slot: int, hashes: HashArray, deadline: float) -> None:
        """``slot`` will hold these by ``deadline``, or has told so itself by then. Deadlines are about in order."""
        new, known = _Expected(deadline, slot, hashes.tolist(), []), self._expected
        new.alone.append(new)
        for hash in new.hashes:
            known[hash] = [*known[hash], new] if hash in known else new.alone
        self._deadlines.append(new)

    def expire(self, now: float) -> None:
        """Forget what was expected until now. One whose deadline is late holds up those after it, and no more."""
        while self._deadlines and self._deadlines[0].deadline <= now:
            old = self._deadlines.popleft()
            for hash in old.hashes:
                others = [one for one in self._expected[hash] if one is not old]
                if others:
                    self._expected[hash] = others
                else:
                    del self._expected[hash]
            old.alone.clear()  # it holds itself: else this would be garbage of the oldest kind, collected once an hour

    # -- the question --------------------------------------------------------------------------------------------

    def match(self, hashes: HashArray) -> npt.NDArray[np.int64]:
        """How many leading hashes of a prompt (uint64 [n]) each slot holds, or will: int64 [slots]."""
        slots = len(self.held)
        depth = np.zeros(slots, np.int64)
        start, count = 0, 64  # most prompts end, or are unknown, within the first piece
        alive: HashArray | None = None
        while start < len(hashes):
            piece = hashes[start : start + count]
            bits = self._holders(piece)
            if not len(bits):
                break
            if alive is not None:
                bits[0] &= alive
            bits = np.bitwise_and.accumulate(bits, axis=0)
            alive = bits[-1]
            every = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
            depth += every.sum(axis=0, dtype=np.uint16)[:slots]
            if len(bits) < len(piece) or not alive.any():
                break
            start, count = start + count, min(4 * count, 1 << 14)
        return depth

    def _holders(self, hashes: HashArray) -> HashArray:
        """The slots that hold each hash, as bits, uint64 [n, words]; up to the first hash that none holds."""
        found, places = self._find(hashes)
        expected = [self._expected.get(hash, ()) for hash in hashes.tolist()] if self._expected else []
        held = found | np.fromiter(map(bool, expected), np.bool_, len(expected)) if expected else found
        if not held.all():
            end = int(held.argmin())
            hashes, found, places, expected = hashes[:end], found[:end], places[:end], expected[:end]
        holders = self._holder[places]
        shared = (holders & _SHARED) != 0
        bits = np.zeros((len(hashes), self._rows.bits.shape[1]), np.uint64)
        alone = np.flatnonzero(found & ~shared)
        first = holders[alone].astype(np.intp)
        bits[alone, first >> 6] = _ONE << (first & 63).astype(np.uint64)
        several = np.flatnonzero(found & shared)
        bits[several] = self._rows.bits[(holders[several] & ~_SHARED).astype(np.intp)]
        for i, soon in enumerate(expected):
            for one in soon:
                bits[i, one.slot >> 6] |= _ONE << np.uint64(one.slot & 63)
        return bits
