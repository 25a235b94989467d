"""What makes a request acceptable: checked where it comes in, and by the scheduler, which has to keep the promise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from nanoengine.errors import ContextLengthError, InvalidRequestError
from nanoengine.sampling.params import SamplingParams


def token_array(ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Token ids as int32 [length]; raises ``InvalidRequestError`` if they are not integers that fit."""
    array = np.asarray(ids) if len(ids) else np.empty(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequestError("a prompt must be one flat list of token ids (integers)", param="prompt")
    if len(array) and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InvalidRequestError("a token id does not fit 32 bits", param="prompt", code="invalid_token")
    return array.astype(np.int32, copy=False)


def check_request(
    tokens: npt.NDArray[np.int32],
    params: SamplingParams,
    max_model_len: int,
    vocab_size: int,
    num_tokens: int,
    generated: int = 0,
) -> None:
    """Raise ``InvalidRequestError`` or ``ContextLengthError``, saying what to change, if it can never be served.

    ``tokens`` are those of the prompt, and at the end the ``generated`` ones of an answer that is to go on.
    ``vocab_size`` is the model's; its ids from ``num_tokens`` on are padding, and stand for no token.
    """
    length = len(tokens) - generated
    prompt, answer = tokens[:length], tokens[length:]
    if length == 0:
        raise InvalidRequestError("the prompt is empty: send at least one token", param="prompt", code="empty_prompt")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"token id {bad} is outside the model's vocabulary (0 to {vocab_size - 1})",
            param="prompt",
            code="invalid_token",
        )
    if length >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens, but this model's context is {max_model_len} tokens, output included: "
            f"shorten the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
        )
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        raise ContextLengthError(
            f"{length} prompt tokens and max_tokens {params.max_tokens} exceed this model's context of {max_model_len} "
            f"tokens: shorten the prompt, or ask for at most {max_model_len - length} tokens",
            param="max_tokens",
        )
    if generated and not (
        int(answer.min()) >= 0
        and int(answer.max()) < num_tokens
        and generated < min(params.max_tokens or max_model_len, max_model_len - length)
    ):
        raise InvalidRequestError("the answer so far is not one that this request can have had", code="invalid_answer")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), num_tokens)
    _check_ids("allowed_token_ids", params.allowed_token_ids, num_tokens)


def _check_ids(param: str, ids: Collection[int], limit: int) -> None:
    if (high := max(ids, default=0)) >= limit:
        raise InvalidRequestError(
            f"{param}: token id {high} is outside the model's vocabulary (0 to {limit - 1})",
            param=param,
            code="invalid_token",
        )
