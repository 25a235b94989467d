"""From logits to tokens without sorting the vocabulary: greedy, or the inverse CDF with min-p, top-k and top-p.

The reference is ``nanoengine.sampling.sampler.Sampler`` and the semantics are its: filters compare weights
exp((logit - max) / temperature) with a threshold, ties are kept, tokens count in the order of their ids, and u is a
function of (seed, position). Sums are taken in another order, so a token may differ where u, or top_p, falls within
rounding of a boundary.

Three kernels. The first reads the logits once, in chunks, and leaves the maximum and the sum of each. The second has a
program a row and returns at once where there is no filter; else it finds the threshold by bisection on the bits of the
weights, and replaces the sums by those of what is kept. The third finds the chunk in which the CDF crosses u, and
the token in it. The size of a chunk is fixed, so a row's token does not depend on the batch.

Rows with a mask are known later than the others, and sampled again by a launch of their own: each load of logits adds
what the mask says, as one bit a token, which is nothing beside the logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.dependent import options, start_next, wait

_CHUNK = 2048
_GROUP = 4  # chunks that a filter reads at once
_FEW = 4096  # so many weights are searched in registers
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight

_SETTINGS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("unused", np.int32),
        ("seed", np.uint64),
    ]
)


def pack_settings(
    temperature: npt.ArrayLike, top_k: npt.ArrayLike, top_p: npt.ArrayLike, min_p: npt.ArrayLike, seed: npt.ArrayLike
) -> npt.NDArray[np.int32]:
    """Rows of the table that ``sample`` reads, int32 [n, 8], from [n] each (or one for all).

    ``temperature`` 0 is greedy; ``top_k`` below 1 is off; ``top_p`` in (0, 1] and ``min_p`` in [0, 1] are off at 1 and
    0; ``seed`` is uint64.
    """
    given = np.broadcast_arrays(np.atleast_1d(temperature), top_k, top_p, min_p, np.asarray(seed, np.uint64))
    rows = np.zeros(len(given[0]), _SETTINGS)
    # No underflow into greedy.
    rows["temperature"] = np.where(given[0] == 0, 0, np.maximum(given[0], 1e-30))
    rows["top_k"], rows["top_p"], rows["min_p"], rows["seed"] = given[1:]
    return rows.view(np.int32).reshape(-1, 8)


@triton.jit
def _weigh(x, best, temperature):  # type: ignore[no-untyped-def]
    """The likeliest weighs exactly 1: the maximum goes before the temperature."""
    return tl.exp((x - best) / temperature)


@triton.jit
def _load(row_ptr, mask_ptr, token, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of tokens, in float32; what a mask forbids is -inf, or NaN if it was NaN or +inf."""
    x = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    if MASKED:
        word = tl.load(mask_ptr + token // 32, mask=inside, other=0)
        x += tl.where((word >> (token % 32)) & 1 != 0, 0.0, float("-inf"))
    return x


@triton.jit
def _row(rows_ptr, masks_ptr, words, MASKED: tl.constexpr, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the program's place among those that are sampled, its row of the logits, its mask)."""
    at = tl.program_id(axis).to(tl.int64)
    row, mask_ptr = at, 0
    if MASKED:
        row = tl.load(rows_ptr + at).to(tl.int64)
        mask_ptr = masks_ptr + at * words
    return at, row, mask_ptr


@triton.jit
def _summarise(  # type: ignore[no-untyped-def]
    logits_ptr,
    settings_ptr,
    slots_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    mass_ptr,
    vocab,
    stride,
    words,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of a chunk, and the sum of weights relative to it: NaN if the chunk holds a NaN or +inf."""
    start_next(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    at, row, mask_ptr = _row(rows_ptr, masks_ptr, words, MASKED, 1)
    slot = tl.load(slots_ptr + at).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load((settings_ptr + slot * 8).to(tl.pointer_type(tl.float32)))
    temperature = tl.where(temperature > 0, temperature, 1.0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits_ptr + row * stride, mask_ptr, token, token < vocab, MASKED)
    best = tl.max(x, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    tl.store(best_ptr + at * CHUNKS + chunk, best)
    tl.store(mass_ptr + at * CHUNKS + chunk, tl.sum(_weigh(x, base, temperature), axis=0).to(tl.float64))


@triton.jit
def _list_chunks(top, low, list_ptr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the chunks whose largest weight is at least ``low``; returns how many."""
    chunk = tl.arange(0, CHUNKS_PAD)
    listed = ((top >= low) & (chunk < CHUNKS)).to(tl.int32)
    tl.debug_barrier()  # others may still read what was listed before
    tl.store(list_ptr + tl.cumsum(listed, axis=0) - 1, chunk, mask=listed > 0)
    tl.debug_barrier()
    return tl.sum(listed, axis=0)


@triton.jit
def _group(  # type: ignore[no-untyped-def]
    first,
    listed,
    row_ptr,
    mask_ptr,
    list_ptr,
    best,
    temperature,
    vocab,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(weights [GROUP, CHUNK] of the listed chunks from ``first`` on, the chunks [GROUP], which of them are there)."""
    at = first + tl.arange(0, GROUP)
    there = at < listed
    chunk = tl.load(list_ptr + at, mask=there, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = there[:, None] & (token < vocab)
    x = _load(row_ptr, mask_ptr, token, inside, MASKED)
    return _weigh(x, best, temperature), chunk, there


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    low,
    listed,
    row_ptr,
    mask_ptr,
    list_ptr,
    few_ptr,
    best,
    temperature,
    vocab,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write the weights of at least ``low`` (bits) to ``few_ptr``, the first FEW of them; returns how many they are."""
    count = 0
    tl.debug_barrier()
    first = 0
    while first < listed:
        weights, _, _ = _group(
            first, listed, row_ptr, mask_ptr, list_ptr, best, temperature, vocab, CHUNK, GROUP, MASKED
        )
        flat = tl.ravel(weights, can_reorder=True)
        kept = (flat.to(tl.int32, bitcast=True) >= low).to(tl.int32)
        place = count + tl.cumsum(kept, axis=0) - 1
        tl.store(few_ptr + place, flat, mask=(kept > 0) & (place < FEW))
        count += tl.sum(kept, axis=0)
        first += GROUP
    tl.debug_barrier()
    return count


@triton.jit
def _halved(low, high, middle, reached, above, below):  # type: ignore[no-untyped-def]
    """The bracket after a look at ``middle``, drawn in to weights that occur: few distinct logits, few turns."""
    low_next = tl.where(reached, above, low)
    high_next = tl.where(reached, high, tl.maximum(below, low) + 1)
    return low_next, high_next


@triton.jit
def _largest_reaching(  # type: ignore[no-untyped-def]
    goal,
    low,
    count,
    stored,
    listed,
    row_ptr,
    mask_ptr,
    list_ptr,
    few_ptr,
    best,
    temperature,
    vocab,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The largest weight t such that those of at least t are ``goal`` in number, or in mass: (its bits, how many, ...).

    Bits of floats that are not negative order as the floats do. ``low`` is a bound from below, ``count`` the number of
    weights of at least ``low``. If that is at most FEW, they are among the ``stored`` at ``few_ptr``.
    """
    high = _ONE + 1
    many = count > FEW
    while (count > FEW) & (high - low > 1):
        middle = low + (high - low) // 2
        masses = tl.zeros((GROUP, CHUNK), tl.float32)
        counts = tl.zeros((GROUP, CHUNK), tl.int32)
        aboves = tl.full((GROUP, CHUNK), _ONE, tl.int32)
        belows = tl.zeros((GROUP, CHUNK), tl.int32)
        first = 0
        while first < listed:
            weights, _, _ = _group(
                first, listed, row_ptr, mask_ptr, list_ptr, best, temperature, vocab, CHUNK, GROUP, MASKED
            )
            bits = weights.to(tl.int32, bitcast=True)
            kept = bits >= middle
            masses += tl.where(kept, weights, 0.0)
            counts += kept.to(tl.int32)
            aboves = tl.minimum(aboves, tl.where(kept, bits, _ONE))
            belows = tl.maximum(belows, tl.where(kept, 0, bits))
            first += GROUP
        found = tl.sum(counts)
        reached = tl.sum(masses.to(tl.float64)) >= goal if BY_MASS else found >= goal
        low, high = _halved(low, high, middle, reached, tl.min(aboves), tl.max(belows))
        count = tl.where(reached, found, count)
    if many & (count <= FEW):
        stored = _collect(
            low, listed, row_ptr, mask_ptr, list_ptr, few_ptr, best, temperature, vocab, CHUNK, GROUP, FEW, MASKED
        )
    if (count <= FEW) & (high - low > 1):
        at = tl.arange(0, FEW)
        weights = tl.load(few_ptr + at, mask=at < stored, other=0.0)
        bits = weights.to(tl.int32, bitcast=True)
        while high - low > 1:
            middle = low + (high - low) // 2
            kept = bits >= middle
            found = tl.sum(kept.to(tl.int32), axis=0)
            mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
            reached = mass >= goal if BY_MASS else found >= goal
            above = tl.min(tl.where(kept, bits, _ONE), axis=0)
            below = tl.max(tl.where(kept, 0, bits), axis=0)
            low, high = _halved(low, high, middle, reached, above, below)
            count = tl.where(reached, found, count)
    return low, count, stored


@triton.jit
def _filter(  # type: ignore[no-untyped-def]
    logits_ptr,
    settings_ptr,
    slots_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    mass_ptr,
    threshold_ptr,
    list_ptr,
    few_ptr,
    vocab,
    stride,
    words,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest weight that a row's filters keep, and the mass of each chunk that they keep."""
    start_next(PDL)
    wait(PDL)
    at, row, mask_ptr = _row(rows_ptr, masks_ptr, words, MASKED, 0)
    slot = tl.load(slots_ptr + at).to(tl.int64)
    if slot < 0:
        return
    settings_ptr += slot * 8
    temperature = tl.load(settings_ptr.to(tl.pointer_type(tl.float32)))
    top_k = tl.load(settings_ptr + 1)
    top_p = tl.load((settings_ptr + 2).to(tl.pointer_type(tl.float64)))
    min_p = tl.load((settings_ptr + 4).to(tl.pointer_type(tl.float32)))
    by_rank = (top_k > 0) & (top_k < vocab)
    filtered = (temperature > 0) & (by_rank | (top_p < 1.0) | (min_p > 0.0))
    if not filtered:
        tl.store(threshold_ptr + at, 0.0)
        return

    best_ptr += at * CHUNKS
    mass_ptr += at * CHUNKS
    chunk = tl.arange(0, CHUNKS_PAD)
    bests = tl.load(best_ptr + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    masses = tl.load(mass_ptr + chunk, mask=chunk < CHUNKS, other=0.0)
    best = tl.max(bests, axis=0)
    top = _weigh(bests, tl.where(best == float("-inf"), 0.0, best), temperature)
    total = tl.sum(masses * top.to(tl.float64), axis=0)
    hopeless = (total > 0.0) == 0  # NaN, or nothing: the next kernel sees that for itself
    if hopeless:
        tl.store(threshold_ptr + at, 0.0)
        return

    row_ptr = logits_ptr + row * stride
    list_ptr += at * CHUNKS_PAD
    few_ptr += at * FEW
    known = (min_p <= 0.0) & (not by_rank)  # top-p alone, of the total that is known
    # What weighs less than the mean of what top-p may drop cannot be what crosses p. The last factor is for rounding.
    bound = tl.where(known, (1.0 - top_p) * total / vocab * 0.999, min_p.to(tl.float64)).to(tl.float32)
    if by_rank:  # a weight that k chunks reach with their best is reached by k weights
        reach = tl.sum((bests[None, :] >= bests[:, None]).to(tl.int32), axis=1)
        bound = tl.maximum(bound, tl.max(tl.where(reach >= top_k, top, 0.0), axis=0))
    listed = _list_chunks(top, bound, list_ptr, CHUNKS, CHUNKS_PAD)
    low = bound.to(tl.int32, bitcast=True)
    count = _collect(
        low, listed, row_ptr, mask_ptr, list_ptr, few_ptr, best, temperature, vocab, CHUNK, GROUP, FEW, MASKED
    )
    stored = count
    if by_rank:
        low, count, stored = _largest_reaching(
            top_k, low, count, stored, listed, row_ptr, mask_ptr, list_ptr, few_ptr, best, temperature,
            vocab, False, CHUNK, GROUP, FEW, MASKED,
        )  # fmt: skip
        listed = _list_chunks(top, low.to(tl.float32, bitcast=True), list_ptr, CHUNKS, CHUNKS_PAD)
    if top_p < 1.0:
        if not known:
            sums = tl.zeros((GROUP, CHUNK), tl.float32)
            first = 0
            while first < listed:
                weights, _, _ = _group(
                    first, listed, row_ptr, mask_ptr, list_ptr, best, temperature, vocab, CHUNK, GROUP, MASKED
                )
                sums += tl.where(weights.to(tl.int32, bitcast=True) >= low, weights, 0.0)
                first += GROUP
            total = tl.sum(sums.to(tl.float64))
        low, count, stored = _largest_reaching(
            top_p * total, low, count, stored, listed, row_ptr, mask_ptr, list_ptr, few_ptr, best,
            temperature, vocab, True, CHUNK, GROUP, FEW, MASKED,
        )  # fmt: skip
        listed = _list_chunks(top, low.to(tl.float32, bitcast=True), list_ptr, CHUNKS, CHUNKS_PAD)

    tl.store(threshold_ptr + at, low.to(tl.float32, bitcast=True))
    # Masses are relative to the best of the chunk: from here on that is the row's.
    tl.store(best_ptr + chunk, tl.where(bests == float("-inf"), bests, best), mask=chunk < CHUNKS)
    tl.store(mass_ptr + chunk, tl.zeros((CHUNKS_PAD,), tl.float64), mask=chunk < CHUNKS)
    tl.debug_barrier()
    first = 0
    while first < listed:
        weights, chunks, there = _group(
            first, listed, row_ptr, mask_ptr, list_ptr, best, temperature, vocab, CHUNK, GROUP, MASKED
        )
        kept = tl.where(weights.to(tl.int32, bitcast=True) >= low, weights, 0.0)
        tl.store(mass_ptr + chunks, tl.sum(kept, axis=1).to(tl.float64), mask=there)
        first += GROUP


@triton.jit
def _split_mix(state, n):  # type: ignore[no-untyped-def]
    """The n-th output of SplitMix64, see sampling/random.py; uint64, which wraps."""
    x = state + (n + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _first_above(cumulated, mass, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index with a mass at which the cumulated exceeds the target; by rounding there may be none: the last.

    SIZE if nothing has a mass.
    """
    index = tl.arange(0, SIZE)
    above = tl.min(tl.where((cumulated > target) & (mass > 0.0), index, SIZE), axis=0)
    last = tl.max(tl.where(mass > 0.0, index, -1), axis=0)
    return tl.where((above == SIZE) & (last >= 0), last, above)


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits_ptr,
    settings_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    mass_ptr,
    threshold_ptr,
    tokens_ptr,
    last_token_ptr,
    vocab,
    stride,
    words,
    FALLBACK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    at, row, mask_ptr = _row(rows_ptr, masks_ptr, words, MASKED, 0)
    slot = tl.load(slots_ptr + at).to(tl.int64)
    if slot < 0:
        tl.store(tokens_ptr + row, FALLBACK)
        return
    settings_ptr += slot * 8
    temperature = tl.load(settings_ptr.to(tl.pointer_type(tl.float32)))
    seed = tl.load((settings_ptr + 6).to(tl.pointer_type(tl.uint64)))
    position = tl.load(positions_ptr + at).to(tl.uint64)
    threshold = tl.load(threshold_ptr + at)
    chunk = tl.arange(0, CHUNKS_PAD)
    bests = tl.load(best_ptr + at * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    masses = tl.load(mass_ptr + at * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    best = tl.max(bests, axis=0)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    masses *= _weigh(bests, tl.where(best == float("-inf"), 0.0, best), temperature).to(tl.float64)
    total = tl.sum(masses, axis=0)

    token = FALLBACK
    if total > 0:  # neither NaN nor nothing
        inner = tl.arange(0, CHUNK)
        row_ptr = logits_ptr + row * stride
        if greedy:
            where = tl.min(tl.where(bests == best, chunk, CHUNKS_PAD), axis=0)
            ids = where * CHUNK + inner
            x = _load(row_ptr, mask_ptr, ids, ids < vocab, MASKED)
            token = tl.min(tl.where(x == best, ids, CHUNKS * CHUNK), axis=0)
        else:
            u = (_split_mix(_split_mix(seed, 0), position) >> 11).to(tl.float64) * (2.0**-53)
            where = _first_above(tl.cumsum(masses, axis=0), masses, u * total, CHUNKS_PAD)
            before = tl.sum(tl.where(chunk < where, masses, 0.0), axis=0)
            ids = where * CHUNK + inner
            x = _load(row_ptr, mask_ptr, ids, ids < vocab, MASKED)
            weights = _weigh(x, best, temperature)
            weights = tl.where(weights >= threshold, weights, 0.0)
            inside = _first_above(tl.cumsum(weights.to(tl.float64), axis=0), weights, u * total - before, CHUNK)
            token = tl.where(inside < CHUNK, where * CHUNK + inside, FALLBACK)
    tl.store(tokens_ptr + row, token)
    tl.store(last_token_ptr + slot, token)


def sample(
    logits: Tensor,
    settings: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    last_token: Tensor,
    *,
    fallback: int,
    rows: Tensor | None = None,
    masks: Tensor | None = None,
) -> None:
    """Sample row i of ``logits`` [n, vocab] (float32, bfloat16 or float16) for the sequence in ``slots[i]``.

    ``settings`` int32 [slots, 8] holds ``pack_settings``' rows; ``positions`` int32 [n] is the index in its sequence
    of the token that is sampled. Writes ``tokens`` int32 [n], and ``last_token`` [slots] (int32 or int64) at
    ``slots[i]``. A negative slot is a padded row: its token is ``fallback``, and ``last_token`` stays. ``fallback`` is
    also the token of a row that cannot be sampled: one with a NaN or +inf, or all -inf.

    With ``masks`` int32 [m, words], of the form that ``nanoengine.structured.masks`` describes, only m rows are
    sampled: ``slots`` and ``positions`` are theirs, and ``rows`` int32 [m] says where in ``logits`` and ``tokens`` they
    are.
    """
    count, vocab = len(slots), logits.shape[1]
    if not count:
        return
    assert logits.stride(1) == 1
    chunks = triton.cdiv(vocab, _CHUNK)
    pad = triton.next_power_of_2(chunks)
    device, stride = logits.device, logits.stride(0)
    best = torch.empty(count, chunks, dtype=torch.float32, device=device)
    mass = torch.empty(count, chunks, dtype=torch.float64, device=device)
    threshold = torch.empty(count, dtype=torch.float32, device=device)
    listed = torch.empty(count, pad, dtype=torch.int32, device=device)
    few = torch.empty(count, _FEW, dtype=torch.float32, device=device)
    masked, words = masks is not None, 0 if masks is None else masks.shape[1]
    _summarise[(chunks, count)](
        logits,
        settings,
        slots,
        rows,
        masks,
        best,
        mass,
        vocab,
        stride,
        words,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        MASKED=masked,
        num_warps=4,
        **options(device),
    )
    _filter[(count,)](
        logits,
        settings,
        slots,
        rows,
        masks,
        best,
        mass,
        threshold,
        listed,
        few,
        vocab,
        stride,
        words,
        CHUNKS=chunks,
        CHUNKS_PAD=pad,
        CHUNK=_CHUNK,
        GROUP=_GROUP,
        FEW=_FEW,
        MASKED=masked,
        num_warps=16,
        **options(device),
    )
    _draw[(count,)](
        logits,
        settings,
        slots,
        positions,
        rows,
        masks,
        best,
        mass,
        threshold,
        tokens,
        last_token,
        vocab,
        stride,
        words,
        FALLBACK=fallback,
        CHUNKS=chunks,
        CHUNKS_PAD=pad,
        CHUNK=_CHUNK,
        MASKED=masked,
        num_warps=4,
        **options(device),
    )
