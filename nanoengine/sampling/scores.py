"""Log-probabilities of tokens that are given, as those of a prompt: not sampled, but scored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.sampling.sampler import NO_LOGPROB


class Scores(NamedTuple):
    """Of n tokens. Log-probabilities are natural, and of the raw distribution."""

    logprobs: Tensor  # float32 [n]
    ranks: Tensor  # int32 [n]: 1 is the likeliest; tokens that tie share the better rank
    top_ids: Tensor  # int32 [n, k], likeliest first
    top_logprobs: Tensor  # float32 [n, k]


def score(logits: Tensor, targets: Tensor, top: int) -> Scores:
    """Score the tokens ``targets`` int64 [n] under ``logits`` [n, vocab] (any float dtype, left as it is)."""
    logits = logits.float()
    total = logits.logsumexp(dim=1, keepdim=True)
    # Of a prompt's ids in the padded vocabulary there are no logits: they are as unlikely as can be.
    known = targets < logits.shape[1]
    chosen = logits.gather(1, targets.clamp(max=logits.shape[1] - 1).unsqueeze(1))
    chosen = torch.where(known.unsqueeze(1), chosen, -torch.inf)
    likeliest = logits.topk(min(top, logits.shape[1]), dim=1)
    return Scores(
        _finite(chosen - total).squeeze(1),
        (logits > chosen).sum(dim=1, dtype=torch.int32) + 1,
        likeliest.indices.int(),
        _finite(likeliest.values - total),
    )


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=NO_LOGPROB, neginf=NO_LOGPROB)
