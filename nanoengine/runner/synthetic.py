"""SyntheticRunner: a stand-in for a model whose every token depends on the content of every KV block that it reads.

It keeps, for each cache position, the token and position that were written there, and derives a row's next token from
all that its block table shows it. A wrong block, a stale block or a missing write changes the tokens, so it tests
scheduler and cache as a model does, at no cost; with a clock, it loads the service at a known rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nanoengine.outputs import PromptScores
from nanoengine.runner.base import StepResult
from nanoengine.runner.inputs import flatten
from nanoengine.scheduling.step import IntArray, Scoring, Step
from nanoengine.structured import masks

_Hash = npt.NDArray[np.uint64]


def _mix(x: _Hash) -> _Hash:
    """The finaliser of SplitMix64 (Steele et al., 2014): every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def content(tokens: IntArray, positions: IntArray) -> _Hash:
    """What the stand-in stores for tokens (int32 [n]) at positions (int32 [n]): their "keys and values", uint64 [n]."""
    return _mix((tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + np.uint64(1))


class SyntheticRunner:
    """See the module. Output tokens are printable ASCII, as ids of the byte-level tokenizer."""

    depth = 0

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        step_seconds: float = 0.0,
        prefill_tokens_per_second: float = float("inf"),
        context: int | None = None,
        depth: int = 0,
        num_tokens: int = 256,
        eos_token_id: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.depth = depth
        self._num_tokens = num_tokens
        self._fallback = eos_token_id
        self._block_size = block_size
        self._cache = np.zeros(num_blocks * block_size, np.uint64)
        self._last_token = np.zeros(num_slots, np.int32)
        self._step_seconds = step_seconds
        self._prefill_rate = prefill_tokens_per_second
        self._context = context
        self._busy_until = 0.0

    def mask_memory(self) -> IntArray:
        return masks.empty(len(self._last_token), self._num_tokens)

    def launch(self, step: Step) -> _Timed:
        began = time.monotonic()
        inputs = flatten(step, self._block_size)
        tokens = np.concatenate((self._last_token[step.slots[: step.num_decodes]], step.tokens))
        self._cache[inputs.kv_slots] = content(tokens, inputs.positions)

        digest = self._digest(step.block_table, inputs.seq_lens)
        sampled = self.token(digest)
        self._last_token[step.slots[step.samples]] = sampled[step.samples]

        scores = tuple(self._score(scoring, self._blocks(step.block_table[scoring.row])) for scoring in step.scorings)

        def constrain(given: IntArray) -> None:
            rows = step.constrained
            for row, mask in zip(rows.tolist(), given, strict=True):
                ids = np.flatnonzero(masks.allowed(mask, self._num_tokens))
                sampled[row] = ids[int(digest[row] % np.uint64(len(ids)))] if len(ids) else self._fallback
            self._last_token[step.slots[rows]] = sampled[rows]

        duration = self._step_seconds + (step.num_tokens - step.num_decodes) / self._prefill_rate
        # One step after the other at this pace: what the host does between them is hidden, as it is where they overlap.
        self._busy_until = (self._busy_until if began - self._busy_until < duration else began) + duration
        return _Timed(StepResult(sampled, {}, scores), self._busy_until, constrain)

    def _blocks(self, table: IntArray) -> _Hash:
        """The content of the blocks of a table [..., width], one after the other."""
        return self._cache.reshape(-1, self._block_size)[table].reshape(*table.shape[:-1], -1)

    def _digest(self, table: IntArray, lens: IntArray) -> _Hash:
        """The sum of what each row reads, uint64 [rows]: its whole context, or the end of it."""
        if self._context is None:
            seen = self._blocks(table)
            read = np.arange(seen.shape[1]) < lens[:, None]
        else:
            positions = lens[:, None] - 1 - np.arange(self._context)
            read = positions >= 0
            positions = np.maximum(positions, 0)
            block = np.take_along_axis(table, positions // self._block_size, axis=1)
            seen = self._cache[block * self._block_size + positions % self._block_size]
        return np.where(read, seen, np.uint64(0)).sum(axis=1, dtype=np.uint64)

    def _score(self, scoring: Scoring, seen: _Hash) -> PromptScores:
        """Log-probabilities that depend, as tokens do, on all content before; the likeliest are always the first ids.

        ``seen``: the content of the row's blocks, in order.
        """
        n, first = len(scoring.targets), scoring.first
        before = np.cumsum(seen[: first + n - 1], dtype=np.uint64)[first - 1 :]
        logprobs = -(_mix(before + scoring.targets.astype(np.uint64)) % np.uint64(1000)).astype(np.float32) / 100
        top = np.broadcast_to(np.arange(scoring.top, dtype=np.int32), (n, scoring.top))
        ones = np.ones(n, np.int32)
        return PromptScores(first, logprobs.tobytes(), ones.tobytes(), top.tobytes(), top.astype(np.float32).tobytes())

    def token(self, digest: _Hash) -> IntArray:
        """The next token of each row (int32 [rows]) from the sum of all that it read (uint64 [rows])."""
        return (32 + _mix(digest) % np.uint64(95)).astype(np.int32)


class _Timed:
    """A step that is done at a given time."""

    def __init__(self, result: StepResult, done_at: float, constrain: Callable[[IntArray], None]) -> None:
        self._result, self._done_at = result, done_at
        self.constrain = constrain

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._done_at - time.monotonic()))
        return self._result
