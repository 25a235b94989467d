"""Random numbers without state: a uniform number is a hash of (seed, position), so there is nothing to lose.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) read at
random access: the generator's output n = 0, 1, ... is ``mix(state + (n + 1) * GOLDEN)``, a bijective mixer over a
counter. It passes BigCrush, costs a few vectorised multiplications, and gives the same on every machine and device
because it is integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def _output(state: npt.NDArray[np.uint64], n: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = state + (n + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap, as the algorithm wants
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row, a function of that row's (seed, position) alone.

    The generator's state is not the seed but its first output: seeds are neighbours (0, 1, 2, ...) because people
    choose them, and taken as states they could give one stream read from different places.
    """
    bits = _output(_output(seeds, np.zeros_like(seeds)), positions.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(seed: int | None, engine_seed: int, key: int) -> int:
    """The 64-bit seed of a request: its own modulo 2**64, or without one the ``key``-th output of the engine's."""
    if seed is not None:
        return seed & _MASK
    state, n = np.array([[engine_seed & _MASK], [key & _MASK]], dtype=np.uint64)
    return int(_output(_output(state, np.zeros_like(state)), n)[0])
