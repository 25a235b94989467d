"""StepTimes: the fit, and how soon there is one."""

from __future__ import annotations

import random

import pytest

from nanoengine.scheduling.pace import StepTimes

BASE, PREFILL, DECODE = 0.01, 0.002, 0.001


def steps(count: int, seed: int = 0) -> StepTimes:
    """As a server at work makes them: prompts of any length beside decodes."""
    rng, times = random.Random(seed), StepTimes()
    for _ in range(count):
        prefill, decodes = rng.choice((0, rng.randrange(1, 256))), rng.randrange(8)
        times.add(prefill, decodes, BASE + PREFILL * prefill + DECODE * decodes)
    return times


def test_parts_of_a_step_are_told_apart() -> None:
    times = steps(64)
    assert (times.base, times.prefill, times.decode) == pytest.approx((BASE, PREFILL, DECODE), rel=0.1)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(50))
def test_noise_makes_no_part_of_alike_steps_nothing(seed: int, count: int) -> None:
    """Prompts that wait fill every step, to a few tokens: only the sum of the parts can be known."""
    rng, times = random.Random(seed), StepTimes()
    for i in range(count):
        prefill, decodes = rng.randrange(248, 257), min(i, 3)
        times.add(prefill, decodes, (BASE + PREFILL * prefill + DECODE * decodes) * rng.uniform(0.97, 1.1))
    assert times.prefill > 0
    assert times.base + 256 * times.prefill == pytest.approx(BASE + 256 * PREFILL, rel=0.15)


def test_what_was_not_seen_is_not_known() -> None:
    times = StepTimes()
    for _ in range(64):
        times.add(0, 1, 0.01)
    assert times.prefill == 0
    assert times.base + times.decode == pytest.approx(0.01, rel=0.01)


def test_a_full_step_s_time_is_known_after_two() -> None:
    """Where a step takes half a second, 32 of them are as long as a start."""
    times = StepTimes()
    for _ in range(2):
        assert times.prefill == 0
        times.add(256, 2, 0.5)
    assert times.base + 256 * times.prefill + 2 * times.decode == pytest.approx(0.5, rel=0.01)
    for _ in range(62):  # from then on all of them count, if not at once
        times.add(256, 2, 0.25)
    assert times.base + 256 * times.prefill + 2 * times.decode == pytest.approx(0.26, abs=0.02)
