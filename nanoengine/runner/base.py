"""Runner: what executes steps. The engine knows no more of it, so a real model and a stand-in are exchangeable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanoengine.outputs import PromptScores, TokenLogprob
from nanoengine.scheduling.step import IntArray, Step


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled token of each row, int32 [rows] (meaningless where the step does not sample), and logprobs if asked."""

    tokens: IntArray
    logprobs: dict[int, TokenLogprob]  # by row
    scores: tuple[PromptScores, ...] = ()  # of each of ``step.scorings``


class PendingStep(Protocol):
    """A launched step."""

    def constrain(self, masks: IntArray) -> None:
        """Sample the rows ``step.constrained``, whose ``masks`` (of ``nanoengine.structured.masks``) are known by now:
        the first rows of ``mask_memory``, which stay as they are until ``result`` has returned.

        If there are such rows: once, before ``result``, and before the next step is launched, as that reads their
        tokens.
        """

    def result(self) -> StepResult:
        """Wait for the step to be done."""


class Runner(Protocol):
    """Executes steps in order. What it keeps per slot is set up by the admissions that a step carries."""

    num_blocks: int  # KV blocks that it holds
    depth: int  # 0, or 1 if a step may be in flight while the next one is planned, where that hides something

    def mask_memory(self) -> IntArray:
        """Where the masks of a step are to lie, in its first rows: int32 [rows of the largest step, words]."""

    def launch(self, step: Step) -> PendingStep:
        """Start a step; must not wait for it where the device can run on its own."""
