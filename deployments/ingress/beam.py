"""Beam search, on top of engines that sample: every step asks for one token of each beam, and for the likeliest ones.

As in transformers: of all continuations of all beams, one that ends the answer counts if it is among the best ``width``
of them, and is compared by its score over its length to the power of ``length_penalty``; the best ``width`` others go
on. What a beam has in common with its last step is in the engine's prefix cache, so a step costs about
``width`` tokens and a round trip: some milliseconds a token, which nobody streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from deployments.ingress.errors import bad_request, internal
from deployments.messages import Chunk
from nanoengine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deployments.ingress.served import Job

MAX_BEAMS = 10
_MAX_LIKELIEST = 20  # tokens that an engine names at each step

Ask = Callable[[list[int]], Awaitable[list[tuple[int, float]]]]
"""The likeliest next tokens after these of an answer, (token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which answers are best, and when there are enough of them."""

    length_penalty: float = 1.0  # above 0 for longer answers, below for shorter ones
    # True: as many as are wanted are enough. False: they are once none that goes on is better as it is now. "never":
    # once none can become better, if all its further tokens were certain.
    early_stopping: bool | Literal["never"] = False

    def score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty

    def best_possible(self, logprob: float, length: int, max_length: int) -> float:
        """Of an answer that goes on."""
        far = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(logprob, max_length if far else length)


@dataclass(frozen=True, slots=True)
class Beam:
    tokens: list[int]  # of the answer, an end-of-sequence token included
    score: float  # sum of log-probabilities; of a finished one, over its length to the power of the penalty
    finish_reason: Literal["stop", "length"] | None = None


async def search(ask: Ask, width: int, max_tokens: int, eos_token_ids: Collection[int], rules: Rules) -> list[Beam]:
    """The ``width`` best answers, best first. ``ask`` gives as many tokens as ``likeliest`` says, or all there are."""
    beams, finished = [Beam([], 0.0)], list[Beam]()
    for length in range(1, max_tokens + 1):
        asked = await asyncio.gather(*(ask(beam.tokens) for beam in beams))
        candidates = [
            (beam.score + logprob, beam, token)
            for beam, tokens in zip(beams, asked, strict=True)
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        beams = []
        for rank, (score, beam, token) in enumerate(candidates):
            tokens = [*beam.tokens, token]
            if token in eos_token_ids or length == max_tokens:
                if rank < width:
                    reason: Literal["stop", "length"] = "stop" if token in eos_token_ids else "length"
                    finished.append(Beam(tokens, rules.score(score, length), reason))
            elif len(beams) < width:
                beams.append(Beam(tokens, score))
        finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        if not beams:
            break
        if len(finished) == width and (
            rules.early_stopping is True
            or rules.best_possible(beams[0].score, length, max_tokens) <= finished[-1].score
        ):
            break
    return finished


def likeliest(width: int, eos_token_ids: Collection[int]) -> int:
    """How many continuations of each beam suffice: ``width`` to go on with, and every one that ends."""
    return min(_MAX_LIKELIEST, width + max(width, len(eos_token_ids)))


async def chunks(job: Job) -> AsyncGenerator[tuple[int, Chunk]]:
    """The choices of a job with ``beams``, whole, each with its index. Raises ``ApiError``."""
    model, width = job.model, job.n
    assert job.beams is not None
    eos_token_ids = model.text.eos_token_ids
    count = likeliest(width, eos_token_ids)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(job.prompts):
        max_tokens, most = job.params.max_tokens, model.engines.max_model_len
        room = (most or 1 << 30) - len(prompt)
        if max_tokens is None or (job.clip and max_tokens > room):
            max_tokens = room
        elif max_tokens > room:
            raise bad_request(
                f"{len(prompt)} prompt tokens and max_tokens {max_tokens} exceed this model's context of {most} tokens",
                "max_tokens",
                "context_length_exceeded",
            )
        cached = 0

        async def ask(tokens: list[int], prompt=prompt) -> list[tuple[int, float]]:  # type: ignore[no-untyped-def]
            nonlocal cached
            stream = model.engines.generate(
                np.concatenate((prompt, np.array(tokens, np.int32))),
                params,
                clip=False,
                priority=job.priority,
                cache_salt=job.cache_salt,
                session=job.session,
            )
            async with aclosing(stream) as answer:
                async for chunk in answer:
                    if not tokens:
                        cached = chunk.cached_tokens
                    if chunk.logprobs:
                        return list(chunk.logprobs[0].top)
            raise internal()

        for index, beam in enumerate(await search(ask, width, max_tokens, eos_token_ids, job.beams)):
            ended = beam.finish_reason == "stop"
            text = await model.text.decode(beam.tokens[:-1] if ended else beam.tokens, skip_special_tokens=True)
            yield (
                number * width + index,
                Chunk(
                    text,
                    beam.finish_reason,
                    None,
                    len(prompt),
                    cached,
                    len(beam.tokens),
                    token_ids=tuple(beam.tokens),
                ),
            )
