"""One tiny engine, requests by number, and transformers as the judge of what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine, StepOutput
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling.params import SamplingParams
from tests.engine.test_equality import TIE, Reference


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Run:
    """Checks the engine's invariants after every step."""

    def __init__(self, model: Path | str, **settings: Any) -> None:
        fixed = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1, "watermark": 0.0}
        fixed["num_blocks"] = 512  # the check looks at every one
        self.engine = Engine(EngineConfig.model_validate(fixed | settings))
        self.prompts: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.logprobs: list[list[TokenLogprob]] = []
        self.scores: dict[int, list[float]] = {}  # log-probabilities of prompts, from the second token on
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.steps = 0

    def add(self, prompt: list[int], params: SamplingParams, priority: int = 0) -> int:
        number = len(self.prompts)
        self.engine.add(number, np.array(prompt, np.int32), params, priority=priority)
        self.prompts.append(prompt)
        self.tokens.append([])
        self.logprobs.append([])
        return number

    def step(self) -> StepOutput | None:
        output = self.engine.step()
        self.engine.check()
        self.steps += 1
        if output is not None:
            self.cached |= dict(output.started)
            for index, (key, token) in enumerate(zip(output.keys.tolist(), output.tokens.tolist(), strict=True)):
                self.tokens[key].append(token)
                if index in output.logprobs:
                    self.logprobs[key].append(output.logprobs[index])
            for key, found in output.scores:
                self.scores.setdefault(key, []).extend(np.frombuffer(found.logprobs, np.float32).tolist())
            self.reasons |= {end.key: end.reason for end in output.finished}
        return output

    def until_idle(self) -> None:
        while self.engine.has_work:
            self.step()
            assert self.steps < 10_000, "no end"

    def until(self, key: int, tokens: int) -> int:
        """Run until a request has so many tokens; returns the steps that it took."""
        begin = self.steps
        while len(self.tokens[key]) < tokens:
            self.step()
        return self.steps - begin

    def all(self, prompts: list[list[int]], params: SamplingParams) -> list[int]:
        """Their numbers, after all of them were run at once."""
        found = [self.add(prompt, params) for prompt in prompts]
        self.until_idle()
        return found

    def check(self, reference: Reference, *numbers: int) -> None:
        """Assert that every token is the reference's own choice. No numbers: of all requests."""
        for number in numbers or range(len(self.prompts)):
            worst, _ = reference.judge(self.prompts[number], self.tokens[number])
            assert worst <= TIE, f"request {number}: a token scores {worst:.6f} below the reference's choice"
