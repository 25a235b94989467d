"""How a step's decode rows are divided among the programs of a GPU: plans for kernels/paged_decode.py. No torch.

Decoding is bound by reading keys and values, so each processor has to get the same share of them, from the first row to
the last and however ragged they are. A row that is longer than a fair share is split, its parts are merged by their
log-sum-exp, and programs start with the longest piece: what is left at the end is small (LPT scheduling, Graham, 1969).

A plan is int32 arrays of a bounded size that the host works out while the step before runs. On the device they lie in
fixed buffers, so a CUDA graph that was recorded once takes whatever plan is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.attention.shared_prefix import PrefixBounds, PrefixPlan, SharedPrefixPlanner

IntArray = npt.NDArray[np.int32]

_PROGRAMS = 396
"""Pieces, over all key-value heads, that a step's reading is divided into, if the rows are long enough: 3 for each
processor of an H200, which are as many as run at once. With 528 and 792, 256 rows of 640 tokens take 164 and 162 us in
place of 158, 64 of 620 take 54 in place of 47."""

_FINE = 4
"""One part in so many of the reading is cut so many times finer, and comes last, as shorter pieces do: it fills what
the long ones leave at the end. TB/s on an H200 with and without: 64 rows of 8k 4.36, 4.03; 120 of 1,100 4.03, 3.82; 64
of 900 to 1,800 4.00, 3.84; 64 of 620 3.40, 3.22; no difference for 256 of 640, whose rows are not cut."""

_GRAIN = 64  # tokens: no piece is cut finer than the kernel's smallest tile

_KEPT = 16
"""Steps that a plan lasts while its rows only grow by their tokens: its last pieces grow with them, by a quarter of a
grain. To divide anew takes the host 40 to 170 us, a fifth of what a step takes it in all."""


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """What plans depend on: sizes of a layer, of this device's share of it."""

    max_rows: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    token_bytes: int  # keys and values of one token in one layer
    windows: tuple[int | None, ...]  # of the layers, each once
    share_prefixes: bool


class DecodePlanner:
    """Plans decode steps one after the other.

    Arrays of a plan, for each window: ``items`` [size + 2 more, 4] (row, first position, end, part or -1: it is the
    whole row; first equal to end: nothing to do), then ``rows`` [2, size] (each row's first part, its parts); at the
    end, if prefixes are shared, those of ``PrefixPlan``.
    """

    def __init__(self, layout: DecodeLayout) -> None:
        self.windows = layout.windows
        self._more = -(-_PROGRAMS // layout.num_kv_heads)
        self.prefix_bounds: PrefixBounds | None = None
        self._prefixes: SharedPrefixPlanner | None = None
        if layout.share_prefixes and None in layout.windows:
            heads = {"num_heads": layout.num_heads, "num_kv_heads": layout.num_kv_heads}
            self.prefix_bounds = PrefixBounds.of(layout.max_rows, **heads)
            self._prefixes = SharedPrefixPlanner(
                self.prefix_bounds, block_size=layout.block_size, token_bytes=layout.token_bytes, **heads
            )
        self._kept: _Kept | None = None

    @property
    def shares(self) -> bool:
        """Whether rows may read prefixes together."""
        return self._prefixes is not None

    def shapes(self, size: int, shared: bool) -> list[tuple[int, int]]:
        """Of the arrays of a plan for ``size`` rows."""
        shapes = [(size + 2 * self._more, 4), (2, size)] * len(self.windows)
        if shared:
            assert self.prefix_bounds is not None
            shapes += self.prefix_bounds.shapes
        return shapes

    def prefixes(self, table: IntArray, seq_lens: IntArray) -> PrefixPlan | None:
        """Which of these rows read prefixes together, or None; ``table`` int32 [rows, width], ``seq_lens`` [rows]."""
        return None if self._prefixes is None else self._prefixes.plan(table, seq_lens)

    def plan(self, seq_lens: IntArray, size: int, prefixes: PrefixPlan | None = None) -> tuple[IntArray, ...]:
        """Plan rows of ``seq_lens`` int32 [rows], in arrays for ``size`` rows; ``prefixes`` as found for them.

        The arrays hold until the next call, which may write to them.
        """
        arrays: list[IntArray] = []
        for window in self.windows:
            if window is None:
                arrays += self._whole(seq_lens, size, prefixes)
            else:
                arrays += divide(np.maximum(seq_lens - window, 0), seq_lens, size, self._more)
        return (*arrays, *(() if prefixes is None else prefixes.arrays()))

    def _whole(self, seq_lens: IntArray, size: int, prefixes: PrefixPlan | None) -> tuple[IntArray, IntArray]:
        """For layers without a window."""
        kept = self._kept
        if kept is not None and kept.grows_to(seq_lens, size, prefixes):
            return kept.arrays
        first = np.zeros(len(seq_lens), np.int32) if prefixes is None else prefixes.rows[1, : len(seq_lens)]
        items, rows = divide(first, seq_lens, size, self._more)
        self._kept = _Kept(seq_lens.copy(), prefixes, (items, rows))
        return items, rows


class _Kept:
    """A plan, and the rows that it is for."""

    def __init__(self, lens: IntArray, prefixes: PrefixPlan | None, arrays: tuple[IntArray, IntArray]) -> None:
        """``lens`` int32 [rows]."""
        self.arrays = arrays
        self._lens, self._prefixes, self._left = lens, prefixes, _KEPT - 1
        items = arrays[0]
        self._last = np.flatnonzero((items[:, 2] > 0) & (items[:, 2] == lens[items[:, 0]]))  # piece of each row

    def grows_to(self, lens: IntArray, size: int, prefixes: PrefixPlan | None) -> bool:
        """Whether it is now the plan of rows of these ``lens``, as they are those that it was for, one token on."""
        if self._left == 0 or prefixes is not self._prefixes or self.arrays[1].shape[1] != size:
            return False
        if len(lens) != len(self._lens) or not (lens == self._lens + 1).all():
            return False
        self._left -= 1
        self._lens = lens.copy()
        self.arrays[0][self._last, 2] += 1
        return True


def divide(first: IntArray, end: IntArray, size: int, more: int) -> tuple[IntArray, IntArray]:
    """Divide positions ``first`` to ``end`` of each row; gives ``items`` and ``rows`` of a plan.

    ``more`` is about how many pieces of equal length all of it would make; no more than twice that are added to one a
    row.
    """
    lengths = end - first
    total = int(lengths.sum())
    share = max(_GRAIN, -(-total // more))
    fine = (total - np.cumsum(lengths) + lengths) * _FINE <= total  # the last rows, as good as any
    pieces = np.maximum(_ceil(lengths, np.where(fine, max(2 * _GRAIN, share // _FINE), share)), 1)
    # Of a row that is split, all pieces but the last are equally long, in whole grains.
    span = np.maximum(_ceil(_ceil(lengths, pieces), _GRAIN), 1) * _GRAIN
    pieces = np.maximum(_ceil(lengths, span), 1)
    row = np.repeat(np.arange(len(end), dtype=np.int32), pieces)
    start = np.cumsum(pieces) - pieces
    number = np.arange(len(row)) - start[row]
    begins = first[row] + number * span[row]
    ends = np.minimum(begins + span[row], end[row])

    parts = np.where(pieces > 1, pieces, 0)
    first_part = np.cumsum(parts) - parts
    part = np.where(parts[row] > 0, first_part[row] + number, -1)

    items = np.zeros((size + 2 * more, 4), np.int32)
    longest_first = np.argsort(begins - ends, kind="stable")
    items[: len(row)] = np.stack((row, begins, ends, part), axis=1)[longest_first]
    rows = np.zeros((2, size), np.int32)
    rows[0, : len(end)], rows[1, : len(end)] = first_part, parts
    return items, rows


def _ceil(numerator: IntArray, denominator: IntArray | int) -> IntArray:
    return -(-numerator // denominator)
