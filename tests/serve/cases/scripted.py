"""An engine that says what it is told to: real scheduler, cache and detokeniser around a runner that reads a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.runner.base import PendingStep, Runner, StepResult
from nanoengine.scheduling.step import IntArray, Step
from tests.serve.tiny_engine import TinyEngines

FILLER = ord("~")  # after a script's end
IM_START, IM_END, EOS = 258, 259, 257  # of the synthetic tokenizer, whose other tokens are bytes; two of them end


class ScriptedEngines(TinyEngines):
    """Answers the prompt that holds a key of ``scripts`` with the tokens that are there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(Path("synthetic"), **settings)
        self.scripts: dict[str, list[int]] = {}
        self.engine._runner = _Scripted(self.engine._runner, self._script)

    def says(self, prompt: str, *parts: str | int) -> None:
        """Texts and token ids."""
        found = [[part] if isinstance(part, int) else list(part.encode()) for part in parts]
        self.scripts[prompt] = [token for tokens in found for token in tokens]

    def _script(self, prompt: IntArray) -> list[int]:
        text = self.tokenizer.decode(prompt.tolist())
        return next(script for key, script in self.scripts.items() if key in text)


class _Scripted:
    def __init__(self, runner: Runner, script: Callable[[IntArray], Sequence[int]]) -> None:
        self._runner, self._script = runner, script
        self.num_blocks, self.depth = runner.num_blocks, runner.depth
        self._of: dict[int, tuple[int, Sequence[int]]] = {}  # by slot: where its answer begins, and that answer

    def mask_memory(self, rows: int, words: int) -> IntArray:
        return self._runner.mask_memory(rows, words)

    def launch(self, step: Step) -> PendingStep:
        for admission in step.admissions:
            self._of[admission.slot] = len(admission.prompt), self._script(admission.prompt)
        tokens = np.zeros(len(step.slots), np.int32)
        for row in np.flatnonzero(step.samples).tolist():
            begin, script = self._of[int(step.slots[row])]
            at = int(step.starts[row] + step.counts[row]) - begin
            tokens[row] = script[at] if at < len(script) else FILLER
        return _Read(tokens)


class _Read:
    def __init__(self, tokens: IntArray) -> None:
        self._tokens = tokens

    def constrain(self, masks: IntArray) -> None:
        raise AssertionError("a script has no masks")

    def result(self) -> StepResult:
        return StepResult(self._tokens, {})
