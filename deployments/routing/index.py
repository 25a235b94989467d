"""PrefixIndex: which replica holds which prefixes, for all replicas in one walk. Numpy arrays, one thread, no clock.

Two parts. What engines *told*: a hash table of two arrays, since a fleet's caches are millions of blocks, and a dict of
them would take 200 bytes each where this takes 20. And what a router *expects*: the blocks of prompts that it sent out
and of which nobody has told it yet; they are few, and expire.

The table has buckets of eight places, and a hash may lie in either of two buckets, one in each half of the table, the
emptier one when it came: no chains, so removal leaves no trace, and all of a prompt's blocks are looked up in one numpy
expression. Where both are full, one of those in them moves to its other bucket (cuckoo hashing, of one move); where
none can, the new one is left out, which costs a shorter match. A place holds a hash and the number of a row of bits,
which are its holders: there is a row for each slot alone, and one for each hash that several replicas hold.

What a walk costs is mostly the number of numpy's calls, at about half a microsecond each, and not what they look at.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nanoengine.cache.prefix_hash import HashArray

PLACES = 8  # of a bucket
MAX_FILL = 0.8  # of all places, beyond which the table grows
FIRST = 64  # hashes of a prompt that are looked up at once: most prompts end, or are unknown, within so many
THEN = 192  # ... and after those; up to 255 can be counted in a byte
_ONE = np.uint64(1)
_SPREAD = np.array([[1], [0xD6E8FEB86659FD93]], np.uint64)  # odd: spreads a hash again, for its second bucket

Places = npt.NDArray[np.intp]


class _Expected(NamedTuple):
    """Blocks of one prompt that a replica will soon hold."""

    deadline: float
    slot: int
    hashes: list[int]


class _Rows:
    """Sets of slots, as rows of bits: first, for each slot, the set of it alone; then others, which are given out."""

    def __init__(self) -> None:
        self.singles = 0  # row s, of the first so many, is the set of slot s
        self.bits = np.zeros((64, 0), np.uint64)
        self.empty = b""  # a row of zeros
        self._free = list(range(63, -1, -1))
        self.widen(1)

    def widen(self, slots: int) -> int:
        """Room for that many slots. Returns how far the numbers of rows that were given out have moved up."""
        words = -(-slots // 64)
        more = 64 * words - self.singles
        if more <= 0:
            return 0
        old, self.bits = self.bits, np.zeros((len(self.bits) + more, words), np.uint64)
        self.bits[self.singles + more :, : old.shape[1]] = old[self.singles :]
        self.singles += more
        every = np.arange(self.singles)
        self.bits[every, every >> 6] = _ONE << (every & 63).astype(np.uint64)
        self._free = [row + more for row in self._free]
        self.empty = bytes(8 * words)
        return more

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

    def only(self, rows: Places) -> Places:
        """The slot that is in each of these sets, which have one."""
        words = self.bits[rows]
        which = (words != 0).argmax(axis=1)
        bit = words[np.arange(len(rows)), which]
        return which * 64 + np.bitwise_count(bit - _ONE)


def _flipped(row: bytes, slot: int) -> bytes:
    """A row's bytes with one slot more in it, or less."""
    flipped = bytearray(row)
    flipped[slot >> 3] ^= 1 << (slot & 7)
    return bytes(flipped)


class PrefixIndex:
    """Replicas are slots, small numbers that the caller gives out; a slot is free again once ``sweep`` says so."""

    def __init__(self, places: int = 1 << 13) -> None:
        """Room for that many hashes at first, a power of two and at least 16."""
        self.held: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # told blocks of each slot
        self.left_out = 0  # told blocks that found no place, ever
        self._rows = _Rows()
        self._allocate(places // PLACES)
        self._sweeping: dict[int, int] = {}  # slot that was dropped -> buckets swept of it so far
        self._expected: dict[int, bytes] = {}  # by hash: the slots, as a row's bytes
        self._again: Counter[tuple[int, int]] = Counter()  # (hash, slot): how often more than once
        self._deadlines: deque[_Expected] = deque()

    def _allocate(self, buckets: int) -> None:
        self._buckets = buckets
        self._shift = np.uint64(64 - (buckets // 2 - 1).bit_length())
        self._halves = np.array([[0], [buckets // 2]], np.uint64)
        self._hash = np.zeros(buckets * PLACES, np.uint64)  # 0: the place is empty
        self._row = np.zeros(buckets * PLACES, np.uint32)  # number of the row that is its holders
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its rows; what is expected comes on top, some 200 bytes a block."""
        return self._hash.nbytes + self._row.nbytes + self._rows.bits.nbytes

    def __len__(self) -> int:
        return self._count

    # -- places --------------------------------------------------------------------------------------------------

    def _two_buckets(self, hashes: HashArray) -> Places:
        """The buckets where each hash may lie, one in each half of the table: [2, n]."""
        buckets = hashes * _SPREAD
        buckets >>= self._shift
        buckets += self._halves
        return buckets.view(np.intp)

    def _contents(self, buckets: Places) -> HashArray:
        """What lies in each hash's two buckets, uint64 [2, n, 8]."""
        return self._hash.reshape(-1, PLACES).take(buckets, axis=0)

    def _find(self, hashes: HashArray) -> tuple[Places, Places]:
        """Which of the hashes (not 0) are there, as indices, and the place of each of those."""
        buckets = self._two_buckets(hashes)
        (hits,) = (self._contents(buckets) == hashes[:, None]).ravel().nonzero()
        which = hits // PLACES
        return which % len(hashes), buckets.ravel()[which] * PLACES + hits % PLACES

    def _insert(self, hashes: HashArray, rows: npt.NDArray[np.uint32]) -> int:
        """Put distinct hashes that are not there into empty places; returns how many found one."""
        done = 0
        while len(hashes):
            buckets = self._two_buckets(hashes)
            empty = self._contents(buckets) == 0
            room = empty.sum(axis=2)
            full = room.max(axis=0) == 0
            if full.any():
                for i in np.flatnonzero(full).tolist():
                    if (place := self._make_room(buckets[:, i])) is None:
                        self.left_out += 1
                    else:
                        self._hash[place], self._row[place] = hashes[i], rows[i]
                        done += 1
                hashes, rows = hashes[~full], rows[~full]
                continue
            # The emptier bucket's first empty place. Of several hashes that want the same place one gets it.
            second, every = (room[1] > room[0]).astype(np.intp), np.arange(len(hashes))
            wanted = buckets[second, every] * PLACES + empty[second, every].argmax(axis=1)
            self._hash[wanted] = hashes
            won = self._hash[wanted] == hashes
            self._row[wanted[won]] = rows[won]
            done += int(won.sum())
            hashes, rows = hashes[~won], rows[~won]
        self._count += done
        return done

    def _make_room(self, buckets: Places) -> int | None:
        """Move what lies in these two full buckets to where else it may lie; returns the place that is empty now."""
        places = (buckets[:, None] * PLACES + np.arange(PLACES)).ravel()
        others = self._two_buckets(self._hash[places])
        second, which, where = np.nonzero(self._contents(others) == 0)
        if not len(which):
            return None
        place, other = places[which[0]], others[second[0], which[0]] * PLACES + where[0]
        self._hash[other], self._row[other] = self._hash[place], self._row[place]
        self._hash[place] = 0
        return int(place)

    def _grow(self) -> None:
        full = np.flatnonzero(self._hash)
        hashes, rows = self._hash[full], self._row[full]
        self._allocate(2 * self._buckets)
        for start in range(0, len(hashes), 1 << 16):  # in pieces: what the insertion needs is many times its input
            self._insert(hashes[start : start + (1 << 16)], rows[start : start + (1 << 16)])

    # -- what engines told ---------------------------------------------------------------------------------------

    def widen(self, slots: int) -> None:
        """Make room for slots 0 to ``slots - 1``."""
        if slots > len(self.held):
            self.held = np.concatenate((self.held, np.zeros(slots - len(self.held), np.int64)))
            first = self._rows.singles
            if more := self._rows.widen(slots):
                self._row[self._row >= first] += np.uint32(more)
                self._expected = {
                    hash: soon.ljust(len(self._rows.empty), b"\0") for hash, soon in self._expected.items()
                }

    def store(self, slot: int, hashes: HashArray) -> None:
        """``slot`` holds these now, uint64 [n]. Telling what is known changes nothing."""
        hashes = np.unique(hashes[hashes != 0])
        for start in range(0, len(hashes), 1 << 16):
            self._store(slot, hashes[start : start + (1 << 16)])

    def _store(self, slot: int, hashes: HashArray) -> None:
        found, places = self._find(hashes)
        if len(found):
            self._share(slot, places)
            new = np.ones(len(hashes), np.bool_)
            new[found] = False
            hashes = hashes[new]
        if len(hashes):
            while self._count + len(hashes) > MAX_FILL * len(self._hash):
                self._grow()
            self.held[slot] += self._insert(hashes, np.full(len(hashes), slot, np.uint32))

    def _share(self, slot: int, places: Places) -> None:
        """Add ``slot`` to the holders of what lies in these distinct places."""
        word, bit = slot >> 6, _ONE << np.uint64(slot & 63)
        rows = self._row[places]
        new = (self._rows.bits[rows, word] & bit) == 0
        places, rows = places[new], rows[new]
        self.held[slot] += len(places)
        alone = rows < self._rows.singles
        if alone.any():  # those rows are other hashes' too
            own = self._rows.take(int(alone.sum()))
            self._rows.bits[own] = self._rows.bits[rows[alone]]
            self._row[places[alone]] = rows[alone] = own
        self._rows.bits[rows, word] |= bit

    def remove(self, slot: int, hashes: HashArray) -> None:
        """``slot`` holds these no more, uint64 [n]. Those that it was not known to hold change nothing."""
        _, places = self._find(np.unique(hashes[hashes != 0]))
        self._drop(slot, places)

    def _drop(self, slot: int, places: Places) -> None:
        """Take ``slot`` out of the holders of what lies in these distinct places."""
        bits, word, bit = self._rows.bits, slot >> 6, _ONE << np.uint64(slot & 63)
        rows = self._row[places]
        has = (bits[rows, word] & bit) != 0
        places, rows = places[has], rows[has]
        self.held[slot] -= len(places)
        alone = rows < self._rows.singles
        self._hash[places[alone]] = 0
        self._count -= int(alone.sum())
        if alone.all():
            return
        places, rows = places[~alone], rows[~alone]
        bits[rows, word] ^= bit
        left = np.bitwise_count(bits[rows]).sum(axis=1) == 1
        if left.any():
            places, rows = places[left], rows[left]
            self._row[places] = self._rows.only(rows)
            self._rows.give_back(rows)

    def clear(self, slot: int) -> None:
        """``slot`` holds nothing. Costs a look at the whole table: a millisecond or two for each million of places."""
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
        first, last = start * PLACES, (start + count) * PLACES
        rows = self._row[first:last]
        may = (rows == slot) | (rows >= self._rows.singles)
        may &= self._hash[first:last] != 0
        self._drop(slot, first + may.nonzero()[0])

    # -- what a router expects -----------------------------------------------------------------------------------

    def expect(self, slot: int, hashes: HashArray, deadline: float) -> None:
        """``slot`` will hold these by ``deadline``, or has told so itself by then. Deadlines are about in order."""
        new, known = _Expected(deadline, slot, hashes.tolist()), self._expected
        alone = _flipped(self._rows.empty, slot)
        for hash in new.hashes:
            others = known.get(hash)
            if others is None:
                known[hash] = alone
            elif others[slot >> 3] >> (slot & 7) & 1:
                self._again[hash, slot] += 1
            else:
                known[hash] = _flipped(others, slot)
        self._deadlines.append(new)

    def expire(self, now: float) -> None:
        """Forget what was expected until now. One whose deadline is late holds up those after it, and no more."""
        known, again = self._expected, self._again
        while self._deadlines and self._deadlines[0].deadline <= now:
            _, slot, hashes = self._deadlines.popleft()
            alone = _flipped(self._rows.empty, slot)
            for hash in hashes:
                if again and (hash, slot) in again:
                    again[hash, slot] -= 1
                    if not again[hash, slot]:
                        del again[hash, slot]
                elif known[hash] == alone:
                    del known[hash]
                else:
                    known[hash] = _flipped(known[hash], slot)

    # -- the question --------------------------------------------------------------------------------------------

    def match(self, hashes: HashArray) -> npt.NDArray[np.int64]:
        """How many leading hashes of a prompt (uint64 [n]) each slot holds, or will: int64 [slots]."""
        depth = np.zeros(len(self.held), np.int64)
        start, end = 0, FIRST
        alive: HashArray | None = None  # the slots that hold all hashes so far
        while start < len(hashes):
            bits = self._holders(hashes[start:end])
            if alive is not None:
                bits[0] &= alive
            np.bitwise_and.accumulate(bits, axis=0, out=bits)
            every = np.unpackbits(bits.view(np.uint8), axis=1, count=len(depth), bitorder="little")
            depth += np.add.reduce(every, axis=0, dtype=np.uint8)
            alive = bits[-1]
            start, end = end, end + THEN
            if not alive.any():
                break
        return depth

    def _holders(self, hashes: HashArray) -> HashArray:
        """The slots that hold each hash, or will, as bits: uint64 [n, words]."""
        found, places = self._find(hashes)
        bits = np.zeros((len(hashes), self._rows.bits.shape[1]), np.uint64)
        bits[found] = self._rows.bits.take(self._row.take(places), axis=0)
        known = self._expected
        if known and not known.keys().isdisjoint(wanted := hashes.tolist()):
            soon = b"".join(map(known.get, wanted, repeat(self._rows.empty)))
            bits |= np.frombuffer(soon, np.uint64).reshape(bits.shape)
        return bits
