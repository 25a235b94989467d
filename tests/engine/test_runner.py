"""The parts of a runner that need no model: the way of a step's inputs, and the grid of batch sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.config import EngineConfig
from nanoengine.runner.cuda_graphs import batch_sizes
from nanoengine.runner.inputs import Staging, flatten, words
from nanoengine.runner.masked_rows import MaskedRows
from nanoengine.scheduling.step import Step

CPU = torch.device("cpu")


@given(st.integers(1, 3000), st.integers(0, 4))
def test_the_grid_of_batch_sizes(most: int, fineness: int) -> None:
    sizes = batch_sizes(most, fineness)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    for below, size in itertools.pairwise(sizes):
        assert size - below <= max(1, below >> fineness), "padding costs more than it may"


@given(st.lists(st.lists(st.integers(-5, 5), max_size=9), min_size=1, max_size=6), st.integers(0, 3))
def test_what_is_sent_arrives(lists: list[list[int]], padded: int) -> None:
    arrays = [np.array(each, np.int32) for each in lists]
    pads = [12] * min(padded, len(arrays))
    staging = Staging(words([12] * len(arrays)), 2, CPU)
    first = staging.send(arrays, pads)
    second = staging.send([array + 1 for array in arrays], pads)
    for array, one, two in zip(arrays, first, second, strict=True):
        assert one.tolist() == array.tolist(), "a step's arrays stay while the next one is sent"
        assert two.tolist() == (array + 1).tolist()
        assert one.data_ptr() % 16 == first[0].data_ptr() % 16, "not aligned"


def test_a_padded_array_has_its_place_whatever_its_length() -> None:
    staging = Staging(words([8, 8, 8]), 1, CPU)
    places = [[view.data_ptr() for view in staging.send([np.zeros(n, np.int32)] * 3, (8, 8))] for n in (1, 5, 8)]
    assert places[0] == [*places[1][:2], places[0][2]]
    assert len({tuple(place) for place in places}) == 1


def test_rows_with_masks_have_their_places_and_what_pads_them_is_nobodys() -> None:
    rows, rng, places = MaskedRows(10, 3, CPU), np.random.default_rng(0), set()
    for count, size in ((10, 10), (3, 8), (0, 4), (5, 5)):
        at, slots, positions = (rng.integers(0, 9, count).astype(np.int32) for _ in range(3))
        rows.masks[:count] = masks = rng.integers(-(2**31), 2**31, (count, 3), dtype=np.int32)
        rows.write(at, slots, positions, size)
        rows.send(size)
        sent = rows.views(size)
        pad = size - count
        assert [each.tolist() for each in sent[:3]] == [
            [*at, *[10] * pad], [*slots, *[-1] * pad], [*positions, *[0] * pad],
        ]  # fmt: skip
        assert sent[3].shape == (size, 3)
        assert (sent[3][:count].numpy() == masks).all()
        places.add(tuple(each.data_ptr() for each in sent))
    assert len(places) == 1, "a graph reads them where they were when it was recorded"


def test_a_mixed_step_is_laid_out_row_by_row() -> None:
    step = Step(
        id=1,
        num_decodes=1,
        keys=np.array([7, 8, 9]),
        slots=np.array([0, 1, 2], np.int32),
        starts=np.array([5, 0, 4], np.int32),
        counts=np.array([1, 3, 2], np.int32),
        samples=np.array([True, False, True]),
        tokens=np.arange(5, dtype=np.int32),
        block_table=np.array([[3, 4], [1, 0], [2, 6]], np.int32),
        admissions=(),
        constrained=np.empty(0, np.int32),
    )
    inputs = flatten(step, block_size=4)
    assert inputs.positions.tolist() == [5, 0, 1, 2, 4, 5]
    assert inputs.kv_slots.tolist() == [17, 4, 5, 6, 24, 25]
    assert inputs.query_start.tolist() == [0, 1, 4, 6]
    assert inputs.seq_lens.tolist() == [6, 3, 6]
    assert inputs.sampled_rows.tolist() == [0, 2]
    assert inputs.sampled_at.tolist() == [0, 5]


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cpu", (256, 2048)),
        ({}, "cuda", (1024, 8192)),
        ({"max_num_seqs": 4096}, "cpu", (4096, 4096)),
        ({"max_num_batched_tokens": 100}, "cuda", (100, 100)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 64}, "cuda", (8, 64)),
    ],
)
def test_step_limits(settings: dict[str, int], device: str, expected: tuple[int, int]) -> None:
    assert EngineConfig.model_validate(settings).step_limits(device) == expected
