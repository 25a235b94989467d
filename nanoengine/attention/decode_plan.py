"""How a step's decode rows are divided among the programs of a GPU: plans for kernels/paged_decode.py. No torch.

Decoding is bound by reading keys and values, so each processor has to get the same share of them, however ragged the
rows are. The rows are laid end to end and cut into as many equal stretches as programs are resident at once: a program
takes the rows, and the parts of rows, that lie in its stretch (the idea of Stream-K, Osama et al., 2023). Parts of a
row are merged by their log-sum-exp. No program is started late, none is left alone at the end, and few rows are cut.

A plan is int32 arrays of a bounded size that the host works out while the step before runs. On the device they lie in
fixed buffers, so a CUDA graph that was recorded once takes whatever plan is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.attention.shared_prefix import PrefixBounds, SharedPrefixPlanner

IntArray = npt.NDArray[np.int32]

_RESIDENT = 3
"""Programs that run on a processor at once: what the shared memory of a Hopper one holds at a head size of 128."""

_GRAIN = 64  # tokens: no row is cut finer than the kernel's smallest tile


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
    processors: int = 132  # of the device


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """``arrays`` in the planner's order; ``shared``: whether rows read prefixes together."""

    arrays: tuple[IntArray, ...]
    shared: bool


class DecodePlanner:
    """Plans decode steps one after the other.

    Arrays of a plan, for each window: ``starts`` [programs + 1] (where each program's items begin), ``items``
    [size + programs, 4] (row, first position, end, part or -1: it is the whole row) and ``rows`` [2, size] (each row's
    first part, its parts); at the end, if prefixes are shared, those of ``PrefixPlan``.
    """

    def __init__(self, layout: DecodeLayout) -> None:
        self.windows = layout.windows
        self._programs = max(1, _RESIDENT * layout.processors // layout.num_kv_heads)
        self.prefix_bounds: PrefixBounds | None = None
        self._prefixes: SharedPrefixPlanner | None = None
        if layout.share_prefixes and None in layout.windows:
            heads = {"num_heads": layout.num_heads, "num_kv_heads": layout.num_kv_heads}
            self.prefix_bounds = PrefixBounds.of(layout.max_rows, **heads)
            self._prefixes = SharedPrefixPlanner(
                self.prefix_bounds, block_size=layout.block_size, token_bytes=layout.token_bytes, **heads
            )

    @property
    def shares(self) -> bool:
        """Whether rows may read prefixes together."""
        return self._prefixes is not None

    def shapes(self, size: int, shared: bool) -> list[tuple[int, ...]]:
        """Of the arrays of a plan for ``size`` rows."""
        programs = self._programs
        shapes: list[tuple[int, ...]] = [(programs + 1,), (size + programs, 4), (2, size)] * len(self.windows)
        if shared:
            assert self.prefix_bounds is not None
            shapes += self.prefix_bounds.shapes
        return shapes

    def plan(self, table: IntArray, seq_lens: IntArray, size: int) -> DecodePlan:
        """Plan the rows of ``table`` int32 [rows, width] and ``seq_lens`` int32 [rows] in arrays for ``size`` rows."""
        prefixes = self._prefixes.plan(table, seq_lens) if self._prefixes is not None else None
        arrays: list[IntArray] = []
        for window in self.windows:
            first = np.zeros(len(seq_lens), np.int32)
            if window is not None:
                first = np.maximum(seq_lens - window, 0)
            elif prefixes is not None:
                first = prefixes.rows[1, : len(seq_lens)]
            whole = window is not None or prefixes is None
            arrays += divide(first, seq_lens, size, self._programs, whole=whole)
        if prefixes is not None:
            arrays += prefixes.arrays()
        return DecodePlan(tuple(arrays), prefixes is not None)


def divide(
    first: IntArray, end: IntArray, size: int, programs: int, *, whole: bool = True
) -> tuple[IntArray, IntArray, IntArray]:
    """Divide positions ``first`` to ``end`` of each row; gives ``starts``, ``items`` and ``rows`` of a plan.

    Unless ``whole``, a row with ``first`` above 0 has a part in its one piece too, as it has others elsewhere.
    """
    grains = _ceil(end - first, _GRAIN)
    stop = np.cumsum(grains)
    start = stop - grains  # of each row, where all lie end to end
    share = max(1, -(-int(stop[-1]) // programs))
    begins_in = start // share  # which program's
    pieces = (stop - 1) // share - begins_in + 1

    row = np.repeat(np.arange(len(end), dtype=np.int32), pieces)
    number = np.arange(len(row)) - (np.cumsum(pieces) - pieces)[row]
    program = begins_in[row] + number
    origin = first[row] - start[row] * _GRAIN
    begins = np.maximum(origin + program * share * _GRAIN, first[row])
    ends = np.minimum(origin + (program + 1) * share * _GRAIN, end[row])

    parts = np.where((pieces > 1) | ((first > 0) & (not whole)), pieces, 0)
    first_part = np.cumsum(parts) - parts
    part = np.where(parts[row] > 0, first_part[row] + number, -1)

    starts = np.zeros(programs + 1, np.int32)
    np.cumsum(np.bincount(program, minlength=programs), out=starts[1:])
    items = np.zeros((size + programs, 4), np.int32)
    items[: len(row), 0], items[: len(row), 1], items[: len(row), 2], items[: len(row), 3] = row, begins, ends, part
    rows = np.zeros((2, size), np.int32)
    rows[0, : len(end)], rows[1, : len(end)] = first_part, parts
    return starts, items, rows


def _ceil(numerator: IntArray, denominator: int) -> IntArray:
    return -(-numerator // denominator)
