"""From penalised logits to a token: temperature, min-p, top-k, top-p, and the draw.

All functions are row-wise: a row's result depends on that row alone, bit for bit, whatever else is in the batch.

Filters keep a token by comparing its weight with a threshold, never by its rank. So tokens that tie with the last one
kept are kept too (as transformers' and vLLM's top-k do), and the result does not depend on the order in which a sort
or a device happens to put equal values: logits in bfloat16 tie all the time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_BLOCK = 64  # the draw sums weights in blocks: one pass over the vocabulary, then a search in blocks and in one block
_PROBE = 64  # top-p looks at so many of the largest weights before it sorts a whole row
_LEAST = -86.0  # its exponential is a normal float32, and not much more
_SORT_ABOVE = 512  # so many largest weights cost torch's topk on CPU more than numpy's sort of the whole row


def argmax(logits: Tensor) -> Tensor:
    """Token int64 [n] of the largest logit [n, vocab]; the lowest id among equals."""
    if logits.device.type == "cpu":  # numpy's argmax is vectorised, torch's is not: 50 us against 1 ms at [8, 49152]
        return torch.from_numpy(logits.float().numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def weigh(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities, float32 [n, width], of logits [n, vocab] at a temperature float32 [n] > 0.

    The likeliest token weighs exactly 1. ``width`` is the vocabulary padded to whole blocks with weights of 0. Rows
    that hold a NaN or +inf, or only -inf, come out as NaN.
    """
    num_rows, vocab_size = logits.shape
    width = -(-vocab_size // _BLOCK) * _BLOCK
    scaled = torch.empty(num_rows, width, dtype=torch.float32, device=logits.device)
    scaled[:, :vocab_size] = logits
    scaled[:, vocab_size:] = -torch.inf
    # The maximum goes first: then no temperature overflows, and the smallest acts as argmax.
    scaled -= scaled.amax(dim=1, keepdim=True)
    scaled /= temperature.unsqueeze(1)
    if scaled.device.type != "cpu":
        return scaled.exp_()
    # On CPU exp is 4 to 20 times slower where it comes to 0 or to a denormal, as behind a mask or at a low temperature.
    # What weighs so little could not be drawn.
    scaled.clamp_(min=_LEAST)
    return torch.threshold_(scaled.exp_(), 2 * math.exp(_LEAST), 0.0)


def keep_min_p(weights: Tensor, min_p: Tensor) -> None:
    """Drop, in place, what weighs less than ``min_p`` float32 [n]; the likeliest weighs 1 (arXiv 2407.01082)."""
    _drop_below(weights, min_p)


def keep_top_k(weights: Tensor, top_k: Tensor, most: int) -> None:
    """Drop, in place, what weighs less than the ``top_k``-th largest weight of its row; int64 [n], 1 to ``most``."""
    _drop_below(weights, _largest(weights, most).gather(1, (top_k - 1).unsqueeze(1)).squeeze(1))


def keep_top_p(weights: Tensor, top_p: Tensor) -> None:
    """Drop, in place, all but the largest weights whose sum reaches ``top_p`` float64 [n], 0 < p <= 1, of the row's.

    The one that crosses it is kept (nucleus sampling, arXiv 1904.09751).

    On CPU only a few of the largest are sorted, and whole rows where that was not enough. On a GPU it would take a wait
    for the device to know, so rows are sorted whole.
    """
    width = weights.shape[1]
    probe = min(width, _PROBE) if weights.device.type == "cpu" else width
    goal = top_p * block_sums(weights).cumsum(dim=1)[:, -1]
    threshold, found = _crossing(_largest(weights, probe), goal)
    if probe < width and not found.all():
        rest = (~found).nonzero().squeeze(1)
        threshold[rest] = _crossing(_largest(weights[rest], width), goal[rest])[0]
    _drop_below(weights, threshold)


def _drop_below(weights: Tensor, threshold: Tensor) -> None:
    # The mask is written as floats: torch's arithmetic with booleans is not vectorised on CPU, and took 2.6 ms here
    # where this takes 0.1 (8 rows of 49152, one thread).
    mask = torch.empty_like(weights)
    torch.ge(weights, threshold.unsqueeze(1), out=mask)
    weights *= mask


def _crossing(largest: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """(the weight [n] with which the sum of ``largest`` [n, m], descending, reaches ``goal`` [n], whether it does)."""
    mass = largest.cumsum(dim=1, dtype=torch.float64)
    index = torch.searchsorted(mass, goal.unsqueeze(1))
    # Of a whole row the sum falls short only by rounding: then its smallest weight is the threshold and nothing goes.
    last = largest.shape[1] - 1
    return largest.gather(1, index.clamp(max=last)).squeeze(1), index.squeeze(1) <= last


def _largest(weights: Tensor, k: int) -> Tensor:
    """The k largest weights of each row, descending: [n, k]."""
    # On CPU numpy's sort is vectorised, torch's is not: 0.3 ms against 4 for a row of 49152.
    if weights.device.type == "cpu" and k > _SORT_ABOVE:
        return torch.from_numpy(np.ascontiguousarray(np.sort(weights.numpy(), axis=1)[:, : -k - 1 : -1]))
    return weights.topk(k, dim=1).values


def block_sums(weights: Tensor) -> Tensor:
    """Sums of each block of each row: float64 [n, width / block].

    The 64 weights of a block are added in float32, which is as exact as the weights are, and casts nothing of the size
    of the vocabulary; sums of blocks are float64, where 150k terms lose nothing that matters.
    """
    return weights.view(len(weights), -1, _BLOCK).sum(dim=2).to(torch.float64)


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF: (token int64 [n] at the quantile ``u`` float64 [n] in [0, 1) of weights [n, width], whether the row
    had anything to draw from [n]).

    Tokens count in the order of their ids. A weight of 0 is never drawn: the token found is the first at which the
    cumulated sum exceeds the target, so its own weight is positive, and the target is kept below the total: in the row
    and again in the block, whose own sum may differ by rounding.
    """
    blocks = block_sums(weights).cumsum(dim=1)
    total = blocks[:, -1]
    block, target = _first_above(blocks, u * total)
    before = blocks.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1) * (block > 0)
    rows = torch.arange(len(weights), device=weights.device)
    inside = weights.view(len(weights), -1, _BLOCK)[rows, block].cumsum(dim=1, dtype=torch.float64)
    token, _ = _first_above(inside, (target - before).clamp(min=0))
    return block * _BLOCK + token, total > 0


def _first_above(cumulated: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(first index [n] at which ``cumulated`` [n, m] exceeds ``target`` [n], the target used: kept below the total)."""
    total = cumulated[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp(max=cumulated.shape[1] - 1), target
