"""LLM: offline batches. Prompts in, answers out, in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoengine.answer import Answer, Made
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine, StepOutput
from nanoengine.errors import InvalidRequestError
from nanoengine.outputs import Completion, Delta, FinishReason, PromptLogprob, PromptScores, TokenLogprob
from nanoengine.request import check_request, token_array
from nanoengine.sampling.defaults import sampling_defaults
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import Tokenizer, load_tokenizer
from nanoengine.weights.sources import resolve_model

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_TEXTS_A_STEP = 16


class LLM:
    """An engine in this process, for scripts and evaluations.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text
    """

    def __init__(self, model: str = "smollm2-135m-instruct", **settings: Any) -> None:
        """``settings`` are the fields of ``EngineConfig``. Raises ``ModelLoadError`` or ``ValueError``."""
        config = EngineConfig(model=model, **settings)
        files = resolve_model(config.model, config.revision)
        self.tokenizer = load_tokenizer(files)
        self.default_params = SamplingParams(**sampling_defaults(config, files))
        self.engine = Engine(config, self.tokenizer.eos_token_ids, self.tokenizer.vocab_size)
        self._next_key = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer each prompt: a text or its token ids, one or many; ``sampling_params`` one for all or one for each,
        by default ``default_params``, what the model recommends.

        Raises ``InvalidRequestError`` before anything is computed if one of them can never be served.
        """
        arrays = [
            token_array(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for prompt in _as_batch(prompts)
        ]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_params] * len(arrays)
        else:
            params = list(sampling_params)
            if len(params) != len(arrays):
                raise InvalidRequestError(
                    f"{len(arrays)} prompts, but {len(params)} sampling parameters: give one or each"
                )
        info = self.engine.info
        for array, each in zip(arrays, params, strict=True):
            check_request(array, each, info.max_model_len, info.vocab_size, info.num_tokens)
            self.engine.check_grammar(each)
        answers = _Answers(self.tokenizer, arrays, params, info.max_model_len)
        keys = range(self._next_key, self._next_key + len(arrays))
        self._next_key = keys.stop
        for key, array, each in zip(keys, arrays, params, strict=True):
            self.engine.add(key, array, each)
        try:
            self._run(answers, keys.start, use_tqdm)
        finally:
            for index in answers.unfinished:  # interrupted: leave nothing behind for the next call
                self.engine.abort(keys[index])
        return [answer for answer in answers.completions if answer is not None]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer each conversation: a list of ``{"role": ..., "content": ...}``, one or many.

        Raises ``InvalidRequestError`` if the model has no chat template or it does not take these messages.
        """
        template = ChatTemplate.of(self.tokenizer)
        many = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        # The template writes the special tokens itself; adding them again would double the first one.
        prompts = [
            self.tokenizer.encode(template.render(messages), add_special_tokens=False)  # type: ignore[arg-type]
            for messages in many
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, answers: _Answers, first_key: int, use_tqdm: bool) -> None:
        with tqdm(total=len(answers.unfinished), desc="prompts", disable=not use_tqdm) as bar:
            while answers.unfinished:
                if output := self.engine.step():
                    for _, error in output.refused:
                        raise error
                    answers.add(output, first_key)
                # Text of a few at a time while the device computes: a thousand that end together would make it wait.
                for index in answers.complete(_TEXTS_A_STEP if self.engine.has_work else None):
                    self.engine.abort(first_key + index)  # unknown by now, unless a stop string ended it
                    bar.update()
            while self.engine.has_work:  # steps that were launched before it was known that nobody needs them
                self.engine.step()


class _Answers:
    """The answers of one batch as they grow. What every step touches is in arrays, one element a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[IntArray],
        params: Sequence[SamplingParams],
        max_model_len: int,
    ) -> None:
        self.completions: list[Completion | None] = [None] * len(prompts)
        self.unfinished = set(range(len(prompts)))
        self._prompts, self._params = prompts, params
        self._answers = [Answer(tokenizer, each, prompt) for prompt, each in zip(prompts, params, strict=True)]
        self._deltas: list[list[Delta]] = [[] for _ in prompts]
        rooms = [max_model_len - len(prompt) for prompt in prompts]
        rooms = [
            min(room, room if each.max_tokens is None else max(1, each.max_tokens))
            for room, each in zip(rooms, params, strict=True)
        ]
        self._begin = np.cumsum([0, *rooms])  # where each request's tokens lie in the flat array
        self._tokens: IntArray = np.empty(self._begin[-1], np.int32)  # untouched pages take no memory
        self._taken = self._begin[:-1].copy()  # up to here they are in a delta
        self._end = self._begin[:-1].copy()
        self._logprobs: dict[int, list[TokenLogprob]] = {i: [] for i, p in enumerate(params) if p.logprobs is not None}
        # Text is worked out at the end, but where a stop string may end an answer at any token.
        self._watched = np.array([bool(each.stop) for each in params], np.bool_)
        self._scores: dict[int, list[PromptScores]] = {}
        self._ready: deque[tuple[int, FinishReason | None, int | None]] = deque()

    def add(self, output: StepOutput, first_key: int) -> None:
        """Take in what a step brought; requests have the keys from ``first_key`` on."""
        for key, cached in output.started:
            self._answers[key - first_key].cached_tokens = cached
        for key, scores in output.scores:
            self._scores.setdefault(key - first_key, []).append(scores)
        indices = output.keys - first_key
        self._tokens[self._end[indices]] = output.tokens
        self._end[indices] += 1
        for row, logprob in output.logprobs.items():
            self._logprobs[int(indices[row])].append(logprob)
        ended = [(end.key - first_key, end.reason, end.stop_token) for end in output.finished]
        self._ready.extend(ended)
        watched = set(indices[self._watched[indices]].tolist()).difference(index for index, _, _ in ended)
        self._ready.extendleft((index, None, None) for index in watched)

    def complete(self, most: int | None) -> list[int]:
        """Work out the text of at most so many answers (None: all that can be); returns those that are complete."""
        complete: list[int] = []
        while self._ready and (most is None or len(complete) < most):
            index, reason, stop_token = self._ready.popleft()
            if index in self.unfinished and self._take(index, reason, stop_token):
                self.unfinished.remove(index)
                complete.append(index)
        return complete

    def _take(self, index: int, reason: FinishReason | None, stop_token: int | None) -> bool:
        """Turn an answer's new tokens into text; whether that ended it."""
        tokens = self._tokens[self._taken[index] : self._end[index]].tolist()
        self._taken[index] = self._end[index]
        logprobs = self._logprobs.pop(index, [])
        delta = self._answers[index].take(Made(tokens, logprobs, reason, stop_token))
        deltas = self._deltas[index]
        deltas.append(delta)
        if delta.finish_reason is None:
            if delta.logprobs is not None:
                self._logprobs[index] = []
            return False
        with_logprobs = delta.logprobs is not None
        self.completions[index] = Completion(
            prompt_token_ids=self._prompts[index].tolist(),
            token_ids=[token for d in deltas for token in d.token_ids],
            text="".join(d.text for d in deltas),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=[entry for d in deltas for entry in d.logprobs or ()] if with_logprobs else None,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=self._prompt_logprobs(index),
        )
        return True

    def _prompt_logprobs(self, index: int) -> list[PromptLogprob | None] | None:
        if (top := self._params[index].prompt_logprobs) is None:
            return None
        prompt, scores = self._prompts[index], self._scores.pop(index, [])
        return [None, *(entry for some in scores for entry in some.entries(prompt, top))]


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
