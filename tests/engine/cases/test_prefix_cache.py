"""Faults that prefix caches have been reported to have. ``cached`` is what the first admission found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nanoengine.sampling.params import SamplingParams
from tests.engine.cases.run import Run, greedy
from tests.engine.test_equality import Reference
from tests.engine.tiny_models import VOCAB

SIZE = 8  # of a block


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
    return found


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_prompt_that_is_cached_whole(folder: Path, reference: Reference, blocks: int, more: int) -> None:
    """Case C01: there is always a token left to compute, and the chain of keys goes on behind it."""
    run = Run(folder, block_size=SIZE)
    prompt = tokens(blocks * SIZE + more)
    whole = (len(prompt) - 1) // SIZE * SIZE
    for max_tokens in (1, SIZE + 1):
        first, *later = (run.all([prompt], greedy(max_tokens))[0] for _ in range(3))
        assert run.cached[first] == (0 if max_tokens == 1 else whole)
        assert [run.cached[each] for each in later] == [whole] * 2
        for each in run.all([prompt] * 3, greedy(max_tokens)):
            assert run.cached[each] == whole
    longer = [*prompt, *run.tokens[-1][:SIZE], 7]
    (last,) = run.all([longer], greedy(2))
    assert run.cached[last] >= len(prompt) // SIZE * SIZE
    run.check(reference)


def test_prefixes_under_way_and_an_abort(folder: Path, reference: Reference) -> None:
    """Case C06: nobody takes a block before it is computed, and twins do not take each other's place in the index."""
    prompt = tokens(3 * SIZE + 2)
    prompts = [prompt] * 4 + [prompt[: 2 * SIZE] + tokens(SIZE + 3, seed) for seed in (1, 2)]
    run = Run(folder, block_size=SIZE, num_blocks=24, max_num_batched_tokens=10, max_num_seqs=8)
    numbers = [run.add(each, greedy(6)) for each in prompts]
    run.step()
    run.engine.abort(numbers[0])  # in the middle of its prefill
    run.until_idle()
    assert run.tokens[0] == []
    run.check(reference, *numbers[1:])
    evictions = run.engine.load().evictions
    filling = run.all([tokens(60, seed) for seed in range(10, 16)], greedy(20))
    assert run.engine.load().evictions - evictions > 20
    again = run.all(prompts, greedy(6))
    run.check(reference, *filling, *again)


def test_a_key_is_of_the_whole_prefix(folder: Path, reference: Reference) -> None:
    """Case C08: an equal block after another one is another block, and part of a block is none."""
    x, y, z, tail = (tokens(SIZE, seed) for seed in range(4))
    run = Run(folder, block_size=SIZE)
    found = []
    for prompt in ([*x, *y, 5], [*z, *y, 5], [*x, *y[: SIZE // 2], *tail], [*y, 5], [*x, *y, 6]):
        (number,) = run.all([prompt], greedy(3))
        found.append(run.cached[number])
    assert found == [0, 0, SIZE, 0, 2 * SIZE]
    run.check(reference)


def test_a_hit_that_cannot_be_scheduled(folder: Path, reference: Reference) -> None:
    """Case C12: its blocks are nobody's while it waits, and it can be aborted and come again."""
    prefix = tokens(2 * SIZE)
    run = Run(folder, block_size=SIZE, num_blocks=16, max_num_seqs=8)
    run.all([[*prefix, 9]], greedy(1))
    waiting = [*prefix, *tokens(9 * SIZE, 3)]  # its prefix is there, and for the rest there is no room
    for _ in range(8):
        held = [run.add(tokens(30, seed), greedy(20)) for seed in (1, 2)]
        run.until(held[1], 1)
        for _ in range(13):
            number = run.add(waiting, greedy(4))
            used = run.engine.load().blocks_used
            run.step()  # checks references
            assert run.engine.load().waiting == 1
            assert run.engine.load().blocks_used - used <= 2, "more than what the running ones grow by"
            run.engine.abort(number)
            run.engine.check()
        run.until_idle()
    held = [run.add(tokens(30, seed), greedy(20)) for seed in (1, 2)]
    run.until(held[1], 1)
    number = run.add(waiting, greedy(4))
    run.step()
    assert run.engine.load().waiting == 1
    run.until_idle()
    assert run.cached[number] == 2 * SIZE
    run.check(reference, *held, number)


def test_hits_on_the_way_back_from_a_preemption(folder: Path, reference: Reference) -> None:
    """Case C02: what a sequence finds when it is admitted again, its own blocks among them, is counted then."""
    prefix = tokens(9)
    run = Run(folder, block_size=4, num_blocks=24, max_num_seqs=16)
    run.all([prefix + tokens(3, seed) for seed in range(1, 17)], greedy(24))
    load = run.engine.load()
    assert load.preemptions > 0
    assert load.prefix_hit_tokens > 0
    assert [len(each) for each in run.tokens] == [24] * 16
    run.check(reference)


@pytest.mark.parametrize("first", [5, 6, 7, 8, 9, 15, 16, 17])
def test_a_preemption_loses_and_doubles_nothing(folder: Path, reference: Reference, first: int) -> None:
    """Case C03: at every length beside a block's border."""
    run = Run(folder, block_size=SIZE, num_blocks=12, max_num_seqs=4)
    run.all([tokens(first, 1), tokens(first + 3, 2)], greedy(57))
    assert run.engine.load().preemptions > 0
    assert [len(each) for each in run.tokens] == [57, 57]
    run.check(reference)


def test_a_preemption_keeps_the_state_of_sampling(folder: Path) -> None:
    """Case C04: random numbers go on, output stays output, and the list of log-probabilities is whole."""
    params = SamplingParams(
        temperature=0.9, seed=11, frequency_penalty=0.8, min_tokens=20, max_tokens=57, logprobs=1, ignore_eos=True
    )
    prompts = [tokens(6, 1), tokens(9, 2)]
    pressed, free = Run(folder, block_size=SIZE, num_blocks=12), Run(folder, block_size=SIZE)
    for run in (pressed, free):
        run.all(prompts, params)
    assert pressed.engine.load().preemptions > free.engine.load().preemptions == 0
    assert pressed.tokens == free.tokens
    for ours, theirs in zip(pressed.logprobs, free.logprobs, strict=True):
        assert len(ours) == len(theirs) == 57
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
        assert [[i for i, _ in entry.top] for entry in ours] == [[i for i, _ in entry.top] for entry in theirs]
