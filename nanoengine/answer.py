"""Answer: what the engine makes for one request, turned into deltas of text. Stop strings act here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoengine.outputs import Delta, FinishReason, PromptScores, TokenLogprob
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray
from nanoengine.text.detokenizer import Detokenizer
from nanoengine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Made:
    """What the engine made and nobody has taken yet."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each token, if asked for
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the end-of-sequence or stop token that ended it
    scores: list[PromptScores] = field(default_factory=list)  # of the prompt
    times: tuple[float, float] | None = None  # of the first delta


class Answer:
    """One request's answer as it grows. ``take`` as often as is convenient: the sum does not depend on it."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, tokens: Sequence[int] | IntArray, generated: int = 0
    ) -> None:
        """``tokens`` are those of the prompt, and at the end the ``generated`` ones that somebody has taken already."""
        self.cached_tokens = 0
        self._params = params
        self._prompt_tokens = length = len(tokens) - generated
        self._detokenizer = Detokenizer(tokenizer, params, tokens[:length])
        # What was given out is a function of the tokens, and so is what is held back.
        self._detokenizer.push([int(token) for token in tokens[length:]], finished=False)
        self._completion_tokens = generated

    def take(self, made: Made) -> Delta:
        """The next delta. With a finish reason it is the last, though the engine may have gone past a stop string."""
        tokens, logprobs, reason = made.tokens, made.logprobs, made.finish_reason
        if self._params.max_tokens == 0 and reason != "abort":  # the engine has sampled one, as it always does
            tokens, logprobs, reason, made.stop_token = [], [], reason and "length", None
        piece = self._detokenizer.push(tokens, reason is not None, made.stop_token is not None)
        stop_reason: str | int | None = None
        if piece.stop is not None:
            tokens, logprobs = tokens[: piece.kept_tokens], logprobs[: piece.kept_tokens]
            reason, stop_reason = "stop", piece.stop
        elif made.stop_token in self._params.stop_token_ids:
            stop_reason = made.stop_token
        self._completion_tokens += len(tokens)
        return Delta(
            text=piece.text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=tuple(logprobs) if self._params.logprobs is not None else None,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self._completion_tokens,
            prompt_scores=tuple(made.scores),
            times=made.times,
        )
