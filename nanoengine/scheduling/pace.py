"""StepTimes: what a step costs, measured as the engine runs. Whoever chooses among engines needs it in seconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FORGET = 0.998  # weight of a step after the next one: the last few hundred steps count
_RIDGE = 0.05  # of a step
_SOLVE_FIRST = 2  # steps; then after twice as many each time, until it is
_SOLVE_EVERY = 32  # steps


class StepTimes:
    """A running least-squares fit of  seconds = base + prefill * (prompt tokens) + decode * (decoding sequences)."""

    def __init__(self) -> None:
        self.base = self.prefill = self.decode = 0.0  # 0 as long as it is not known
        self._xx: npt.NDArray[np.float64] = np.zeros((3, 3))
        self._xy: npt.NDArray[np.float64] = np.zeros(3)
        self._steps = 0
        self._solve_at = _SOLVE_FIRST

    def add(self, prefill: int, decodes: int, seconds: float) -> None:
        """One step's prompt tokens, decoding sequences and duration."""
        x = np.array((1.0, prefill, decodes))
        self._xx *= _FORGET
        self._xy *= _FORGET
        self._xx += x[:, None] * x
        self._xy += x * seconds
        self._steps += 1
        if self._steps == self._solve_at:
            # Soon at first: 32 steps may take long where prompts are, and until they are over nobody knows the speed.
            self._solve_at += min(self._steps, _SOLVE_EVERY)
            self._solve()

    def _solve(self) -> None:
        # To a unit diagonal, and a ridge worth a part of a step: steps may all be alike, and then no split of their
        # time is right, but without a ridge noise would make one part large and another nothing.
        scale = np.sqrt(np.maximum(self._xx.diagonal(), 1e-12))
        xx, xy = self._xx / np.outer(scale, scale), self._xy / scale
        fit = np.linalg.solve(xx + _RIDGE / self._xx[0, 0] * np.eye(3), xy) / scale
        known = self._xx.diagonal() > 0
        self.base, self.prefill, self.decode = np.where(known, np.maximum(fit, 0.0), 0.0).tolist()
