"""The router's hash of a prompt's prefixes: one 64-bit number per 64 tokens, by numpy alone.

A router has to hash every prompt and look it up for every replica, so it wants few blocks and no loop: 4,096 tokens
take 19 us here, where a chain of SHA-256 over the engine's own blocks takes 100. Two prompts with equal hashes are
taken for equal, which costs at worst a request that goes to the wrong replica: what a replica may share is for its
engine's own keys (``nanoengine.cache.prefix``) to say.

    block j:   c_j = mix(sum_i (token_ij + 1) * R_i)
    prefix j:  H_j = mix(root + sum_{k <= j} c_k * P_k)

in 64-bit arithmetic that wraps, with odd constants R and P. The sum over blocks is what makes a chain: it can be
extended from its last value. Engine and router both use this file, so their hashes cannot drift apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanoengine.cache.prefix import root_key
from nanoengine.scheduling.step import IntArray

ROUTER_BLOCK = 64
"""Tokens that one hash covers beyond the hash before it."""

HashArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


_MIX = tuple(np.uint64(x) for x in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31))
"""Made once: most of what a short prompt costs are the calls of numpy, and a number that has a type is the cheapest."""


def _mix(x: HashArray) -> HashArray:
    """The finaliser of SplitMix64 (Steele et al., 2014), in place: every input bit changes about half of the output
    bits."""
    first, times, second, again, third = _MIX
    x ^= x >> first
    x *= times
    x ^= x >> second
    x *= again
    x ^= x >> third
    return x


def _odd(first: int, count: int) -> HashArray:
    """Numbers ``first`` to ``first + count`` of a fixed pseudo-random sequence of odd numbers, uint64 [count]."""
    return _mix(np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


_TOKEN = _odd(1 << 32, ROUTER_BLOCK)
_POSITION = _odd(0, 1024)


def prefix_root(model: str, adapter: str = "", salt: str = "") -> int:
    """What a chain starts from: prefixes are shared only where model, adapter and the caller's salt are equal."""
    return int.from_bytes(root_key(model, adapter, salt)[:8], "little")


class PrefixChain:
    """The hashes of one growing sequence of tokens."""

    __slots__ = ("_sum", "blocks")

    def __init__(self, root: int) -> None:
        """``root``: of ``prefix_root``."""
        self.blocks = 0  # hashed so far
        self._sum = np.uint64(root)

    def extend(self, tokens: IntArray) -> HashArray:
        """Hashes of the next full blocks, uint64 [len(tokens) // 64].

        ``tokens``, int32 [n], begin where the last full block ended; those beyond the last full block are not kept.
        """
        count = len(tokens) // ROUTER_BLOCK
        if not count:
            return np.empty(0, np.uint64)
        blocks = tokens[: count * ROUTER_BLOCK].reshape(count, ROUTER_BLOCK).astype(np.uint64)
        end = self.blocks + count
        positions = _POSITION[self.blocks : end] if end <= len(_POSITION) else _odd(self.blocks, count)
        sums = blocks.dot(_TOKEN)
        # One in each place adds the same to every block's sum: it keeps a block of zeros from being nothing.
        sums += _GOLDEN
        sums = _mix(sums)
        sums *= positions
        sums = np.add.accumulate(sums)
        sums += self._sum
        self.blocks, self._sum = end, sums[-1]
        return _mix(sums)


def prefix_hashes(root: int, tokens: IntArray) -> HashArray:
    """Hash j stands for the first ``64 * (j + 1)`` tokens under ``root``: uint64 [n // 64] of int32 [n]."""
    return PrefixChain(root).extend(tokens)
