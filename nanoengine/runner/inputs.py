"""From a Step to the flat arrays that a forward pass takes. Pure numpy, vectorised over all tokens of the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.scheduling.step import IntArray, Step

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """Tokens of all rows, one after the other. T is their number."""

    positions: LongArray  # [T] index of each token in its sequence
    kv_slots: LongArray  # [T] where its K and V go: block * block_size + offset
    query_start: IntArray  # [rows + 1] offsets of the rows in the T axis
    seq_lens: IntArray  # [rows] context lengths, this step's tokens included
    sampled_rows: LongArray  # [n] rows that sample
    sampled_at: LongArray  # [n] their last token's index in the T axis


def flatten(step: Step, block_size: int) -> FlatInputs:
    """Lay out a step's tokens."""
    rows = len(step.slots)
    query_start = np.zeros(rows + 1, np.int32)
    np.cumsum(step.counts, out=query_start[1:])
    if step.num_decodes == rows:
        row: LongArray = np.arange(rows)
        positions = step.starts.astype(np.int64)
    else:
        row = np.repeat(np.arange(rows), step.counts)
        positions = (np.arange(len(row)) + (step.starts - query_start[:-1])[row]).astype(np.int64)
    blocks = step.block_table[row, positions // block_size].astype(np.int64)
    sampled_rows = np.flatnonzero(step.samples)
    return FlatInputs(
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        query_start=query_start,
        seq_lens=step.starts + step.counts,
        sampled_rows=sampled_rows,
        sampled_at=query_start[1:][sampled_rows].astype(np.int64) - 1,
    )
