"""LLM: offline batches. Prompts in, answers out, in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from nanoengine.answer import Answer, Made
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine, StepOutput
from nanoengine.errors import InvalidRequestError
from nanoengine.outputs import Completion, Delta
from nanoengine.request import check_request, token_array
from nanoengine.sampling.params import SamplingParams
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """An engine in this process, for scripts and evaluations.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text
    """

    def __init__(self, model: str = "smollm2-135m-instruct", **settings: Any) -> None:
        """``settings`` are the fields of ``EngineConfig``. Raises ``ModelLoadError`` or ``ValueError``."""
        config = EngineConfig(model=model, **settings)
        self.tokenizer = load_tokenizer(resolve_model(config.model, config.revision))
        self.engine = Engine(config, self.tokenizer.eos_token_ids)
        self._keys = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer each prompt: a text or its token ids, one or many; ``sampling_params`` one for all or one for each.

        Raises ``InvalidRequestError`` before anything is computed if one of them can never be served.
        """
        batch = [self._token_ids(prompt) for prompt in _as_batch(prompts)]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        else:
            params = list(sampling_params)
            if len(params) != len(batch):
                raise InvalidRequestError(
                    f"{len(batch)} prompts, but {len(params)} sampling parameters: give one or each"
                )
        info = self.engine.info
        for prompt, each in zip(batch, params, strict=True):
            check_request(token_array(prompt), each, info.max_model_len, info.vocab_size)
        answers: dict[int, _Growing] = {}
        for prompt, each in zip(batch, params, strict=True):
            key = next(self._keys)
            self.engine.add(key, token_array(prompt), each)
            answers[key] = _Growing(Answer(self.tokenizer, each, prompt), each, prompt)
        try:
            self._run(answers, use_tqdm)
        finally:
            for key, answer in answers.items():
                if answer.completion is None:  # interrupted: leave nothing behind for the next call
                    self.engine.abort(key)
        return [answer.completion for answer in answers.values() if answer.completion is not None]

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

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_array(prompt).tolist()

    def _run(self, answers: dict[int, _Growing], use_tqdm: bool) -> None:
        unfinished = len(answers)
        with tqdm(total=unfinished, desc="prompts", disable=not use_tqdm) as bar:
            while unfinished:
                output = self.engine.step()
                assert output is not None, "requests are unfinished, but the engine has nothing to do"
                for key in self._apply(output, answers):
                    if (completion := answers[key].completion) is None:
                        continue
                    unfinished -= 1
                    bar.update()
                    bar.set_postfix_str(f"{len(completion.token_ids)} tokens", refresh=False)

    def _apply(self, output: StepOutput, answers: dict[int, _Growing]) -> list[int]:
        """Hand out a step's tokens; returns the keys of answers that may have ended."""
        for key, cached in output.started:
            answers[key].answer.cached_tokens = cached
        keys = output.keys.tolist()
        for i, (key, token) in enumerate(zip(keys, output.tokens.tolist(), strict=True)):
            made = answers[key].made
            made.tokens.append(token)
            if i in output.logprobs:
                made.logprobs.append(output.logprobs[i])
        for end in output.finished:
            made = answers[end.key].made
            made.finish_reason, made.stop_token = end.reason, end.stop_token
        # Text is worked out at the end, but where a stop string may end an answer at any token.
        ready = [end.key for end in output.finished] + [key for key in keys if answers[key].watched]
        for key in dict.fromkeys(ready):
            answers[key].take()
            if answers[key].completion is not None:
                self.engine.abort(key)  # unknown to the engine by now, unless a stop string ended it
        return list(dict.fromkeys(ready))


class _Growing:
    """One answer of a batch."""

    def __init__(self, answer: Answer, params: SamplingParams, prompt: list[int]) -> None:
        self.answer = answer
        self.made = Made()
        self.watched = bool(params.stop)
        self.completion: Completion | None = None
        self._prompt = prompt
        self._deltas: list[Delta] = []

    def take(self) -> None:
        """Turn what was made into text, and into a completion if that ended the answer."""
        delta = self.answer.take(self.made)
        self.made = Made()
        self._deltas.append(delta)
        if delta.finish_reason is None:
            return
        deltas = self._deltas
        with_logprobs = delta.logprobs is not None
        self.completion = Completion(
            prompt_token_ids=self._prompt,
            token_ids=[token for d in deltas for token in d.token_ids],
            text="".join(d.text for d in deltas),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=[entry for d in deltas for entry in d.logprobs or ()] if with_logprobs else None,
            cached_tokens=delta.cached_tokens,
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
