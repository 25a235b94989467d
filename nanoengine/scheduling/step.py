"""Step: one immutable plan of what the model computes next. The scheduler makes it, the runner executes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int32]
KeyArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a slot with this step, so that the runner can set up what it keeps per slot.

    After a preemption the same request is admitted again, with the tokens that it had generated so far in ``output``;
    so is one that another engine began.
    """

    slot: int
    key: int
    params: SamplingParams
    prompt: IntArray  # [prompt length]
    output: IntArray  # [tokens generated before]
    first: bool = True  # of this request, here
    cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of a prompt whose log-probabilities are asked for, and come from this step."""

    row: int  # of the step
    first: int  # index in the prompt of the first of them; what comes before it is computed in this step's row
    targets: IntArray  # [n]
    top: int  # likeliest tokens asked for


@dataclass(frozen=True, slots=True)
class Step:
    """Rows are sequences, decodes first. Row i computes the tokens at positions starts[i] .. starts[i] + counts[i] - 1.

    A decode row computes one token whose value is the last one that the runner sampled for its slot: the scheduler may
    not know it yet (a step can be planned while the one before is still running), so it is not in ``tokens``.
    All other rows bring their token ids in ``tokens``, one after the other.
    """

    id: int  # counts up by one
    num_decodes: int  # rows [0, num_decodes) are decodes
    keys: KeyArray  # [rows] which request
    slots: IntArray  # [rows] where the runner keeps that request's state
    starts: IntArray  # [rows] position of the first token computed
    counts: IntArray  # [rows] how many tokens
    samples: BoolArray  # [rows] whether the row's last position yields a new token (False: unfinished prefill chunk)
    tokens: IntArray  # [sum of counts over non-decode rows]
    block_table: IntArray  # [rows, width] physical block of each logical block; entries past the row's length are 0
    admissions: tuple[Admission, ...]
    constrained: IntArray  # rows that sample, and whose masks depend on the tokens of the steps before
    scorings: tuple[Scoring, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return int(self.counts.sum())
